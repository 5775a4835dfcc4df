# What differs between the engines, in the driver's calls.
#
# event: a ring of CUDA events, of which generation g is a record of number (g - 1) mod depth. It may be full, and has
# hazards; the recorder stores what is complete.
# timeline: a word of the board, of which generation g is the value base + g. The recorder's stream writes it.

cdef struct Refusal:  # the driver's errors from calls of which the stream may have work all the same; 0: none
    int wait
    int write
    int record


cdef inline bint has_import(Core self, int64_t generation) noexcept nogil:
    """Whether what a driver's call for `generation` needs is there."""
    return event_of(self, generation) != NULL if self.has_ring else self._address != 0

cdef bint open_import(Core self, int64_t generation, double patience_s) except -1:
    """Have it be there; False if another thread opens one for longer than `patience_s` (below 0: it is waited for)."""
    cdef int index
    cdef bint is_unused
    cdef Handle handle
    if has_import(self, generation):
        return True
    if not self.has_ring:
        self._address = self.open_word()
        return True
    index = (generation - 1) % self.depth
    event = self.open_event(index, None if patience_s < 0 else patience_s)
    if event is None:
        return False
    handle = <Handle><uintptr_t>int(event)  # before the lock is taken: this may raise
    if patience_s == 0:  # within a resolution, which has the lock of another use
        if not self.state.take():
            return False  # the import stays open, for the next call
    else:
        enter_state(self)
    is_unused = self.is_unused
    if not is_unused:
        self.ring[index] = handle
    self.state.give()
    if is_unused:
        self.close_event(index)
        self.raise_closed()
    return True

cdef inline int give_wait(Core self, Handle stream, int64_t generation) noexcept nogil:
    """Have the stream wait for `generation`; the driver's result."""
    if self.has_ring:
        step(b"cuStreamWaitEvent")
        return cuStreamWaitEvent(stream, event_of(self, generation), 0)
    step(b"cuStreamWaitValue64")
    return cuStreamWaitValue64(stream, self._address, self.base + generation, self._flags)

cdef int64_t harvest(Core self) except -1 nogil:
    """Up to where this session's records are complete, whatever they depend on; -2: released. With `state`."""
    cdef uint64_t count
    cdef int64_t done = self._completed
    cdef int64_t newest = self._recorded
    if not self.has_ring:
        count = load(self.place, COMPLETED)
        return -2 if count == INT64_MAX else min(<int64_t>(count - self.base), newest)
    if done < newest:
        if says_complete(self, newest):  # each generation is complete only after all before it
            return newest
        while done + 1 < newest and says_complete(self, done + 1):
            done += 1
    return done
