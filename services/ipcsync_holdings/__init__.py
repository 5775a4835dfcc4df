"""What outlives a coordinator: CUDA events, board, sockets, journal; and the link to the process that keeps them.

A keeper has it for one coordinator after the other. A coordinator without a keeper has it in its own process.
"""
