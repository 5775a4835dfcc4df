"""The keeper: holds what must outlive a coordinator (CUDA events, board, sockets, journal) and keeps one serving.

It takes no input but its own coordinator's: no ZeroMQ, no asyncio, and no import after its start.
"""
