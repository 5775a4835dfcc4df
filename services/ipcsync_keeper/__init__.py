"""The keeper: holds what must outlive a coordinator (CUDA events, board, sockets, journal) and keeps one serving.

Its only input comes from its own coordinator. It uses neither ZeroMQ nor asyncio, and imports nothing after its start.
"""
