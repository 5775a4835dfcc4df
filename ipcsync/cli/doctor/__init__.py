"""`ipcsync doctor`: what this machine and two processes on it can do, tested with real calls.

- `command`: the command itself
- `checks`: the checks, in order, and the advice that follows
- `two_process_checks`: the checks with two processes
- `workers`: the processes; every wait for one has a deadline
- `actions`: what each process does
- `report`: the output, for people and for programs
"""
