# Locks. No section under one runs Python code that is not this package's, and who may wait for long sleeps in slices.

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1
    int PyGC_Disable()
    int PyGC_Enable()

cdef enum:
    SLICE_NS = 50000000
    WITHIN_NS = 500000000
    LONGEST_NS = 200000000  # for which a wait sleeps, in slices, before it takes the GIL for Python's signals

cdef class Lock:
    """A lock over a futex, which is taken without the GIL."""

    cdef uint32_t word  # 0: free, 1: held, 2: held, and somebody sleeps
    cdef uint64_t owner

    cdef inline bint take(self) noexcept nogil:
        if not ipcsync_swap(&self.word, 0, 1):
            return False
        self.owner = thread_now()
        return True

    cdef inline bint mine(self) noexcept nogil:
        return self.owner == thread_now()

    cdef bint take_within(self, int64_t ns) noexcept nogil:
        """Take it; False if another has it for `ns`. No signal ends that: FOREVER is for short sections only."""
        cdef int64_t now = ipcsync_now()
        cdef int64_t until = now + ns
        if self.take():
            return True
        while ipcsync_exchange(&self.word, 2) != 0:
            now = ipcsync_now()
            if now >= until:
                return False
            ipcsync_futex_wait(&self.word, True, 2, until - now)
        self.owner = thread_now()
        return True

    cdef inline void give(self) noexcept nogil:
        self.owner = 0
        if ipcsync_exchange(&self.word, 0) == 2:
            ipcsync_futex_wake(&self.word, True, 1)

    cdef bint await_turn(self, int64_t deadline, guard=None) except -1:
        """Take it, with Python's signals handled and the session looked at between slices; False once `deadline` is over."""
        cdef bint taken = self.take()
        while not taken:
            left = deadline - ipcsync_now()
            if left <= 0:
                return False
            with nogil:
                taken = self.take_within(min(left, <int64_t>SLICE_NS))
            if not taken:
                PyErr_CheckSignals()
                if guard is not None:
                    guard.check_liveness()
        return True

def has_turn():
    """Whether a call of this thread has an event's turn, and may run anybody's code."""
    return ipcsync_turns(0) > 0

cdef inline bint begin(Lock lock) noexcept:
    """Begin a section of this process's objects: with the lock, and without the collector; what `end` is to be given.
    No section waits for anything, so neither does this for long, and no exception keeps what is about to be listed from
    it. Up to Python 3.11 a collection may begin wherever an object is made, and its finalizers may call anything."""
    if not lock.take():
        with nogil:
            lock.take_within(FOREVER)
    return PyGC_Disable()

cdef inline void end(Lock lock, bint collects) noexcept:
    if collects:
        PyGC_Enable()
    lock.give()
