# wait: a stream's later work waits for a generation.
#
# On the event engine, a point's CUDA event is recorded again only once the point is complete. A stream's wait is queued
# after a look that found it pending. If it completes between that look and the driver's call, the recorder, before its
# ring goes round, waits until the call is made: else the stream would wait for a later record. The waiter announces the
# call on the board (a hazard); the model is tests/models/board_waiter.py.

cdef enum Turn:  # of calls that queue work, where Python is to do something before they go on; beside those of Look
    GO_ON = 0
    IS_CLOSED = -2
    NEEDS = -4  # an import or a marker
    BUSY = -5
    CAPTURES = -6
    NO_ID = -7
    UNKNOWN = -8
    NO_ROOM = -9
    DEPENDS = -10
    REFUSED = -11
    IS_OVER = -12
    AGAIN = -13


cdef uint64_t NO_STREAM = <uint64_t>-1


cdef class Waits(Queries):

    cdef int look_before(self, Handle handle, int64_t generation, int64_t deadline, bint ahead) except -1 nogil:
        """1: complete; 2: to be queued; 0: not recorded before `deadline`."""
        if self.is_complete(generation):
            return 1
        if ahead:
            self.check_finished(generation)
            return 2
        if self.last() < generation or self.closed():
            if not self.sleep_until_recorded(generation, deadline):
                return 0
            if not self.is_usable(handle):  # another thread may have begun a capture meanwhile
                with gil:
                    self.check_usable(handle, "wait")
        if not self.is_open():
            self.check_finished(generation)
        # A question to the driver costs less than a wait that it has to queue. If the ring went round meanwhile, it is
        # about a later record: not complete then, as far as is known.
        if self.engine.has_ring and self.done(generation, -1) and self.confirm(generation):
            return 1
        return 2

    cdef uint64_t queue_wait(
        self, Handle handle, int ordinal, int64_t generation, int64_t deadline, timeout, bint ahead
    ) except? 0:
        """The id of the stream on which the wait was queued; 0 if there was nothing to wait for.

        NO_STREAM, and nothing is changed: `ordinal` is below 0, and it is not known of which device the stream is.
        """
        cdef uint64_t stream = 0
        cdef int64_t key = 0
        cdef int found
        cdef Wait listed
        cdef Refusal refusal = Refusal(0, 0, 0)
        with nogil:
            found = self.look_before(handle, generation, deadline, ahead)
            if found == 2:
                stream = self.id_of(handle)
        if found == 0:
            self.raise_timeout(generation, timeout, "recorded")
        if found == 1:
            return 0
        if ordinal >= 0:
            key = self.key_of(handle, stream, ordinal)
        elif not self.find_list(stream, &key, &ordinal):
            return NO_STREAM
        listed = add(key, self, generation, stream)
        while True:
            if not self.has_import(generation):
                self.open_import(generation, -1)  # before the hazard: opening one takes long
            if not self.enter_calls(deadline):
                self.raise_timeout(generation, timeout, "waited for (another thread's wait or record blocks)")
            try:
                if self.marker(stream) == NULL:
                    self.make_marker(stream, ordinal)
                with nogil:
                    found = self.queue_announced(handle, stream, generation, &refusal)
            finally:
                self.leave_calls()
            if found != NEEDS:
                break
        if found == IS_CLOSED:
            self.raise_closed()
        if found == WAS_LOST:
            self.raise_lost(generation)
        if found == COMPLETE:
            return 0
        if refusal.wait == 0:
            listed.is_queued = True
        if refusal.wait or refusal.record:
            self.raise_refused(&refusal)
        self.check_queued(generation)
        return stream

    cdef int queue_announced(self, Handle handle, uint64_t stream, int64_t generation, Refusal *refusal) noexcept nogil:
        """With the turn: GO_ON, queued; COMPLETE by now; NEEDS, IS_CLOSED or WAS_LOST."""
        cdef int found = GO_ON
        if self.closed():
            return IS_CLOSED  # while it is open, the import stays
        if self.marker(stream) == NULL or not self.has_import(generation):
            return NEEDS
        if self.engine.has_ring:
            self.announce()  # from here on its event is recorded again only if it was complete before
            # The recorder stores what is complete before it looks at the hazards.
            if <int64_t>(self.load(COMPLETED) - self.base) >= generation:
                found = self.look(generation)
        if found == GO_ON:
            refusal.wait = self.engine.wait(self, handle, generation)
            refusal.record = self.mark(handle, stream)  # behind a refused one too, of which the stream may have work
        if self.engine.has_ring:
            self.retract()
        return found

    cdef inline void announce(self) noexcept nogil:
        """Announce a wait's call; a recorder records under the same lock, and a child's would be its parent's."""
        cdef uint8_t *hazard = self.hazards + self.own
        if self.is_recorder or not self.fork_mark[0]:
            return
        if self.load(ANNOUNCED) == 0:  # it stays 1, as `awaited`
            store(self.place, ANNOUNCED, 1)
        step(b"announce")
        ipcsync_store_byte(hazard, <uint8_t>((ipcsync_load_byte(hazard) + 1) | 1))  # never what an earlier one was
        fence()

    cdef inline void retract(self) noexcept nogil:
        cdef uint8_t *hazard = self.hazards + self.own
        if not self.is_recorder and self.fork_mark[0]:
            step(b"retract")
            if ipcsync_load_byte(hazard) & 1:
                ipcsync_store_byte(hazard, <uint8_t>(ipcsync_load_byte(hazard) + 1))

    cdef int check_queued(self, int64_t generation) except -1:
        """Raise if the queued wait may end wrongly: a driver may let a stream pass a dead process's work or exports."""
        if not self.is_open() or self.dependencies.depends(generation):
            self.check_finished(generation)
            self.is_complete(generation)  # raises if its recorder has said that it is lost
        self.check_recorder(generation)
        self.check_coordinator()

    cdef int raise_refused(self, const Refusal *refusal) except -1:
        if refusal.wait:
            self.raise_driver(refusal.wait, self.engine.wait_call)
        elif refusal.write:
            self.raise_driver(refusal.write, "cuStreamWriteValue64")
        else:
            self.raise_driver(refusal.record, "cuEventRecord")

    cdef bint try_wait(self, uintptr_t address, int64_t generation) except -1:
        """Wait on a stream that this use knows; False, and nothing is changed, if it does not."""
        self.check_use()
        if not self.is_usable(<Handle>address):
            return False
        if generation <= self.known():
            return True
        return self.queue_wait(<Handle>address, -1, generation, FOREVER, None, False) != NO_STREAM

    def queue(self, handle, int ordinal, int64_t generation, timeout, bint ahead, int64_t began, str what="wait"):
        """Have the CUstream `handle` of device `ordinal` wait for `generation`; the stream's id, or 0: it was complete.

        `timeout` counts from `began` in ns; the context of a default stream is current.
        """
        cdef Handle stream = <Handle><uintptr_t>int(handle)
        self.check_usable(stream, what)
        if generation <= self.known() and not ahead:
            return 0
        return self.queue_wait(stream, ordinal, generation, deadline_of(timeout, began), timeout, ahead)
