"""`ipcsync doctor`: what this machine and two processes on it can do, tested with real calls.

- `command`: the command itself
- `checks`: the checks, in order, and the advice that follows
- `workers`: the processes, and what two of them do together; every wait for one has a deadline
- `actions`: what each process does
- `report`: the output, for people and for programs
"""
