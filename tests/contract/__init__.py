"""What CUDA promises, asked of whichever driver the environment selects.

The same tests run on the software driver (IPCSYNC_DRIVER=host, also with IPCSYNC_HOST_ASYNC=1) and on a GPU
(IPCSYNC_DRIVER=cuda).
"""
