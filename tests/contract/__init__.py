"""What CUDA promises, asked of whichever driver the environment selects.

The same tests run on the host driver (IPCSYNC_DRIVER=host, also with IPCSYNC_HOST_ASYNC=1), on a software libcuda
through the real bindings (IPCSYNC_DRIVER=cuda and its LD_LIBRARY_PATH), and on a GPU (IPCSYNC_DRIVER=cuda).
"""
