# The lock that shortcuts share with the Python engine.

from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    SLICE_NS = 50000000
    LONGEST_NS = 200000000  # for which a shortcut sleeps, in slices, before the Python engine goes on


cdef class Lock:
    """As `_thread.RLock`; a shortcut takes it without the GIL, and only if no thread has it."""

    cdef uint32_t word  # 0: free, 1: held, 2: held, and somebody sleeps
    cdef uint64_t owner
    cdef int64_t depth

    cdef inline bint take(self) noexcept nogil:
        if not ipcsync_swap(&self.word, 0, 1):
            return False
        self.owner = ipcsync_thread()
        self.depth = 1
        return True

    cdef inline void give(self) noexcept nogil:
        self.depth = 0
        self.owner = 0
        if ipcsync_exchange(&self.word, 0) == 2:
            ipcsync_futex_wake(&self.word, True, 1)

    def acquire(self, bint blocking=True, double timeout=-1):
        if self.owner == ipcsync_thread():
            self.depth += 1
            return True
        if self.take():
            return True
        if not blocking:
            return False
        cdef int64_t deadline = INT64_MAX if timeout < 0 or timeout > 1e9 else ipcsync_now() + <int64_t>(timeout * 1e9)
        cdef int64_t now
        while ipcsync_exchange(&self.word, 2) != 0:
            now = ipcsync_now()
            if now >= deadline:
                return False
            with nogil:
                ipcsync_futex_wait(&self.word, True, 2, min(deadline - now, <int64_t>SLICE_NS))
            PyErr_CheckSignals()
        self.owner = ipcsync_thread()
        self.depth = 1
        return True

    def release(self):
        if self.owner != ipcsync_thread():
            raise RuntimeError("cannot release un-acquired lock")
        if self.depth > 1:
            self.depth -= 1
        else:
            self.give()

    def is_mine(self):
        return self.owner == ipcsync_thread()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, kind, error, traceback):
        self.release()
