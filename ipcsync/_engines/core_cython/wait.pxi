# wait: a stream's later work waits for a generation. Its model: tests/models/board_waiter.py; hazards: docs/design/protocol.md.

cdef uint64_t NO_STREAM = <uint64_t>-1

cdef int look_before(Core self, Handle handle, int64_t generation, int64_t deadline, bint ahead) except -1 nogil:
    """1: complete; 2: to be queued; 0: not recorded before `deadline`."""
    if is_complete(self, generation):
        return 1
    if ahead:
        check_finished(self, generation)
        return 2
    if last_of(self) < generation or was_closed(self):
        if not sleep_until_recorded(self, generation, deadline):
            return 0
        if not is_usable(self, handle):  # another thread may have begun a capture meanwhile
            with gil:
                check_usable(self, handle, "wait")
    if not is_open(self):
        check_finished(self, generation)
    # A question to the driver costs less than a wait that it has to queue. If the ring went round meanwhile, it is
    # about a later record: not complete then, as far as is known.
    if self.has_ring and self.is_recorder and look_at_own(self):  # one lock and one look for all of its records
        return 1 if is_complete(self, generation) else 2
    return 1 if self.has_ring and is_done(self, generation) and confirm(self, generation) else 2

cdef uint64_t queue_wait(Core self, Handle handle, int ordinal, int64_t generation, int64_t deadline, timeout, bint ahead
) except? 0:
    """The id of the stream on which the wait was queued; 0 if there was nothing to wait for. NO_STREAM, and nothing is
    changed: `ordinal` is below 0, and it is not known of which device the stream is."""
    cdef uint64_t stream = 0
    cdef int64_t bound = generation
    cdef Wait listed
    cdef Refusal refusal = Refusal(0, NULL)
    with nogil:
        found = look_before(self, handle, generation, deadline, ahead)
        if found == 2:
            stream = id_of(self, handle)
    if found == 0:
        self.raise_timeout(generation, timeout, "recorded")
    if found == 1:
        return 0
    if ordinal < 0:
        ordinal = device_of(stream)
    if ordinal < 0:
        return NO_STREAM
    open_import(self, generation)  # before the hazard: opening one takes long
    sweep()
    was_taken = enter_calls(self, deadline, generation, timeout, "waited for (another thread's wait or record blocks)", True)
    if was_taken == 2:
        return 0
    try:
        if was_taken:  # by one that may have begun a capture meanwhile
            check_usable(self, handle, "wait")
        make_marker(self, handle, stream, ordinal)  # before `key_of`: the driver refuses it on another device's stream
        check_open(self)  # while it is open, the import stays, and there is a marker
        key = key_of(self, handle, stream, ordinal)
        listed = add(key, self, generation, stream, ordinal)  # only now: what is not queued is not depended on
        with nogil:
            found = queue_announced(self, handle, stream, &bound, &refusal)
        if found == PENDING and (bound > generation or isinstance(listed.outcome, Loss)):  # a resume may forget that one
            drop([listed])
            listed = add(key, self, bound, stream, ordinal)
    finally:
        leave_calls(self)
    if found == IS_CLOSED:
        self.raise_closed()
    if found == IS_LOST:
        self.raise_lost(generation)
    if found == COMPLETE:
        return 0
    if refusal.error:
        self.raise_driver(refusal.error, refusal.call.decode())
    listed.is_queued = True
    check_queued(self, bound)
    return stream

cdef int queue_announced(Core self, Handle handle, uint64_t stream, int64_t *bound, Refusal *refusal) noexcept nogil:
    """With the turn: PENDING, and queued, for `bound` or perhaps a later record; COMPLETE by now; IS_CLOSED or IS_LOST."""
    cdef int found = PENDING
    cdef int64_t generation = bound[0]
    if self.has_ring:
        announce(self)  # from here on its event is recorded again only if it was complete before
        # The recorder stores what is complete before it looks at the hazards.
        if <int64_t>(load(self.place, COMPLETED) - self.base) >= generation:
            found = look(self, generation)
    if found == PENDING:
        give_wait(self, handle, generation, refusal)
        if self.has_ring and last_of(self) >= generation + self.depth:  # this took longer than a hazard counts
            bound[0] += (last_of(self) - generation) // self.depth * self.depth  # the last one on the same CUDA event
        tell(refusal, mark(self, handle, stream), b"cuEventRecord")  # behind a refused one too: the stream may have it
    if self.has_ring:
        retract(self)
    return found

cdef inline void announce(Core self) noexcept nogil:
    """Announce a wait's call; a recorder records under the same lock, and a child's would be its parent's."""
    cdef uint8_t *hazard = self.hazards + self.own
    if self.is_recorder or not self.session.fork_mark[0]:
        return
    if load(self.place, ANNOUNCED) == 0:  # it stays 1, as `awaited`
        store(self.place, ANNOUNCED, 1)
    step(b"announce")
    ipcsync_store_byte(hazard, <uint8_t>((ipcsync_load_byte(hazard) + 1) | 1))  # never what an earlier one was
    fence()

cdef inline void retract(Core self) noexcept nogil:
    cdef uint8_t *hazard = self.hazards + self.own
    if not self.is_recorder and self.session.fork_mark[0]:
        step(b"retract")
        if ipcsync_load_byte(hazard) & 1:
            ipcsync_store_byte(hazard, <uint8_t>(ipcsync_load_byte(hazard) + 1))

cdef int check_queued(Core self, int64_t generation) except -1:
    """Raise if the queued wait may end wrongly: a driver may let a stream pass a dead process's work or exports."""
    if not is_open(self) or depends(self, generation):
        check_finished(self, generation)
        is_complete(self, generation)  # raises if its recorder has said that it is lost
    check_recorder(self, generation)
    check_coordinator(self)

cdef bint try_wait(Core self, uintptr_t address, int64_t generation) except -1:
    """Wait on a stream that this use knows; False, and nothing is changed, if it does not."""
    check_use(self)
    if not is_usable(self, <Handle>address):
        return False
    if generation <= known_of(self):
        return True
    return queue_wait(self, <Handle>address, -1, generation, FOREVER, None, False) != NO_STREAM
