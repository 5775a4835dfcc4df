"""`ipcsync doctor`: what this machine and two of its processes can do, tried with real calls.

- `command`: the command itself
- `checks`: what is tried, in order, and what follows for the user
- `two_process_checks`: the parts of it that two processes do together
- `workers`: the processes, none of which is waited for without a deadline
- `actions`: what each process does
- `report`: for people and for programs
"""

from ipcsync.cli.doctor.command import command

__all__ = ["command"]
