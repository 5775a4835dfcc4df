# What differs between the engines. Another one is a class here, and its name in ENGINES.

from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

cdef struct Refusal:  # the driver's errors from calls of which the stream may have work all the same; 0: none
    int wait
    int write
    int record


cdef struct Marker:  # an event of this process on a stream, recorded behind the last work that this use queued there
    uint64_t stream
    Handle event
    Handle handle  # of the stream, if the marker may not be behind all: the driver refused one, or it is owed
    int ordinal
    uintptr_t over  # a word of a lane, if it is owed there: once this has `number`, the stream is past what was queued
    int64_t number


@cython.internal
cdef class EventEngine:
    """A ring of CUDA events: generation g is a record of number (g - 1) mod depth."""

    cdef bint has_ring  # which may be full, and has hazards; the recorder stores what is complete
    cdef str wait_call

    def __cinit__(self):
        self.has_ring, self.wait_call = True, "cuStreamWaitEvent"

    cdef bint has_import(self, Streams use, int64_t generation) noexcept nogil:
        """Whether what a driver's call for `generation` needs is there."""
        return use.event(generation) != NULL

    cdef bint open_import(self, Streams use, int64_t generation, double patience_s) except -1:
        """Open it; False if another thread opens one for longer than `patience_s` (below 0: it is waited for)."""
        cdef int index = (generation - 1) % use.depth
        cdef bint is_unused
        event = use.open_event(index, None if patience_s < 0 else patience_s)
        if event is None:
            return False
        if patience_s == 0:  # within a resolution, which has the lock of another use
            if not use.state.take():
                return False  # the import stays open, for the next call
        else:
            use.enter_state()
        is_unused = use.is_unused
        if not is_unused:
            use.ring[index] = <Handle><uintptr_t>int(event)
        use.state.give()
        if is_unused:
            use.close_event(index)
            use.raise_closed()
        return True

    cdef int query(self, Streams use, int64_t generation) noexcept nogil:
        """0 if a record that was made is complete, NOT_READY, or the driver's error. Its import is there, and stays."""
        return query_relaxed(use.event(generation))

    cdef int begin_sleep(self, Queries use, int64_t generation, Handle *event) except -1 nogil:
        """Before a sleep until `generation` is complete: 1 if it is, 0 if it never will be; 2: go on, until `event` is
        complete, if there is one. Then `sleepers` is to be lowered."""
        if use.done(generation, -1):  # often it is complete already
            return 1
        if not use.enter_driver(generation, -1):
            return 0
        event[0] = use.event(generation)
        return 2

    cdef int wait(self, Streams use, Handle stream, int64_t generation) noexcept nogil:
        """Have the stream wait for `generation`; the driver's result."""
        step(b"cuStreamWaitEvent")
        return cuStreamWaitEvent(stream, use.event(generation), 0)

    cdef int follow(self, Streams use, Handle stream, Marker *last) noexcept nogil:
        """Have the stream wait for a refused record that another one may have. `last`: the marker behind it."""
        return self.wait(use, stream, use._begun)  # if it was not made, its CUDA event is an older one's

    cdef void record(
        self, Streams use, Handle handle, uint64_t stream, int64_t generation, Refusal *refusal
    ) noexcept nogil:
        step(b"cuEventRecord")
        refusal.record = cuEventRecord(use.event(generation), handle)

    cdef int64_t harvest(self, Queries use) except -1 nogil:
        """Up to where this session's records are complete, whatever they depend on; -2: released. With `state`."""
        cdef int64_t done = use._completed
        cdef int64_t newest = use._recorded
        if done < newest:
            if use.says_complete(newest):  # each generation is complete only after all before it
                return newest
            while done + 1 < newest and use.says_complete(done + 1):
                done += 1
        return done


@cython.internal
cdef class TimelineEngine(EventEngine):
    """A word of the board: generation g is its value base + g, which the recorder's stream writes."""

    def __cinit__(self):
        self.has_ring, self.wait_call = False, "cuStreamWaitValue64"

    cdef bint has_import(self, Streams use, int64_t generation) noexcept nogil:
        return use._address != 0

    cdef bint open_import(self, Streams use, int64_t generation, double patience_s) except -1:
        use._address = use.open_word()
        return True

    cdef int query(self, Streams use, int64_t generation) noexcept nogil:
        return 0 if use.is_on_board(generation) else NOT_READY

    cdef int begin_sleep(self, Queries use, int64_t generation, Handle *event) except -1 nogil:
        cdef uint64_t count
        if use.is_complete(generation):
            return 1
        count = use.load(COMPLETED)
        if <int64_t>(count - use.base) < generation:
            return 2
        # Released or broken, which the caller sees; else it depends on something.
        return count != INT64_MAX and not use.is_broken()

    cdef int wait(self, Streams use, Handle stream, int64_t generation) noexcept nogil:
        step(b"cuStreamWaitValue64")
        return cuStreamWaitValue64(stream, use._address, use.base + generation, use._flags)

    cdef int follow(self, Streams use, Handle stream, Marker *last) noexcept nogil:
        return 0 if last == NULL else cuStreamWaitEvent(stream, last.event, 0)  # null: all there was found complete

    cdef void record(
        self, Streams use, Handle handle, uint64_t stream, int64_t generation, Refusal *refusal
    ) noexcept nogil:
        step(b"cuStreamWriteValue64")
        refusal.write = cuStreamWriteValue64(handle, use._address, use.base + generation, 0)
        refusal.record = use.mark(handle, stream)

    cdef int64_t harvest(self, Queries use) except -1 nogil:
        cdef uint64_t count = use.load(COMPLETED)
        return -2 if count == INT64_MAX else min(<int64_t>(count - use.base), use._recorded)


cdef dict ENGINES = {"event": EventEngine(), "timeline": TimelineEngine()}
