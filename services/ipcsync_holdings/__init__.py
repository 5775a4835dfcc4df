"""The holdings, which outlive a coordinator: CUDA events, board, sockets, journal; and the link to the keeper.

A keeper has them for one coordinator after the other. A coordinator without a keeper has them in its own process.
"""
