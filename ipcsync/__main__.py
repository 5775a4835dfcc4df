"""`python -m ipcsync`: the command, where it is not on the PATH."""

from ipcsync.cli import main

main(prog_name="ipcsync")
