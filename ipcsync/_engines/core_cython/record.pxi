# record: the next generation, behind what a stream has been given so far; one into a full ring first waits on the host
# for the oldest. The model is tests/models/board_recorder.py.
#
# A record's way is record_on, begin_record and make_record, which wakes. Where there is something to wait for,
# or to raise, record_on sees to it and begins again.

cdef uint64_t ODD_BYTES = 0x0101010101010101
cdef str UNDER_WAY = "recorded (another thread's record or wait is under way)"

cdef int64_t record_on(Core self, Handle handle, bint is_ours, int64_t deadline, timeout, further) except -1:
    """Record the next generation; 0, and nothing is done: the stream is not known to be of this device. A number is
    never given to two records. If the driver refused one that the stream may have all the same, the next call makes it
    again, behind its possible place and all records before it, and then one of its own number."""
    cdef uint64_t stream = 0
    cdef int64_t generation = 0
    cdef bint depends = further is not None
    cdef Refusal refusal = Refusal(0, NULL)
    while True:
        with nogil:
            found = begin_record(self, handle, is_ours, depends, &stream, &generation)
            if found == GO_ON:
                found = make_record(self, handle, stream, generation, &refusal)
        if found == DEPENDS:  # it has the turn
            found = record_dependent(self, handle, stream, generation, further, &refusal)
        if found == UNKNOWN:
            return 0
        elif found == BUSY:
            enter_calls(self, deadline, self._recorded + 1, timeout, UNDER_WAY)
            leave_calls(self)
        elif found == NO_ROOM:
            make_room(self, self._recorded + 1, deadline, timeout)
        elif found == NEEDS:
            get_needed(self, handle, stream, generation, deadline, timeout)
        elif found == UNUSABLE:
            check_usable(self, handle, "record")
            with nogil:
                id_of(self, handle)
        elif found == IS_CLOSED:
            self.raise_no_record()
        elif found == ELSEWHERE:
            self.raise_unusable(IpcSyncError("its records need streams of the primary CUDA context, as torch's are"))
        elif found == REFUSED:
            self.raise_driver(refusal.error, refusal.call.decode())
        elif found != AGAIN:  # else one that had been refused before: this call's own is to follow
            return generation

cdef int begin_record(
    Core self, Handle handle, bint is_ours, bint depends, uint64_t *stream, int64_t *generation
) except -1 nogil:
    """GO_ON or DEPENDS, with the turn; or what is to be done before the next try."""
    cdef unsigned long long id = 0
    cdef Handle home = NULL
    if not is_usable(self, handle):
        return UNUSABLE
    if self._begun == self._recorded >= self._room and not (look_at_own(self) and self._recorded < self._room):
        return NO_ROOM
    step(b"cuStreamGetId")
    if cuStreamGetId(handle, &id) != 0:
        return UNUSABLE
    stream[0] = id
    if not is_ours and device_of(id) != self.ordinal:
        return UNKNOWN
    step(b"lock")
    if not self.calls.take():
        return BUSY
    next = self._begun if self._begun != self._recorded else self._recorded + 1
    generation[0] = next
    if was_closed(self) or not is_open(self):
        return give_turn(self, IS_CLOSED)
    if next > self._room and next != self._begun:
        return give_turn(self, NO_ROOM)
    has_all = has_needed(self, id, next)  # first: another thread may open an import, in another context
    if self._home != 0 and id != self.last_stream and cuStreamGetCtx(handle, &home) == 0 and home != <Handle>self._home:
        return give_turn(self, ELSEWHERE)  # NVIDIA's driver crashes by such a record
    if not has_all:
        return give_turn(self, NEEDS)
    if depends or self.chain.is_needed or row_count != 0 or self.depends_on_all or next == self._begun:
        return DEPENDS
    return GO_ON

cdef int make_record(Core self, Handle handle, uint64_t stream, int64_t generation, Refusal *refusal) noexcept nogil:
    """With the turn, which it gives: GO_ON, AGAIN, REFUSED, or IS_CLOSED (made, and it is not open now)."""
    cdef bint repeats = generation == self._begun
    if not repeats and must_follow(self, stream) and not follow_last(self, handle, stream, generation, refusal):
        return give_turn(self, REFUSED)
    self.last_stream = stream
    self._begun = generation
    if self.has_ring:
        step(b"cuEventRecord")
        tell(refusal, cuEventRecord(event_of(self, generation), handle), b"cuEventRecord")
    else:
        step(b"cuStreamWriteValue64")
        result = cuStreamWriteValue64(handle, self._address, self.base + generation, 0)
        tell(refusal, result, b"cuStreamWriteValue64")
        tell(refusal, mark(self, handle, stream), b"cuEventRecord")
    if refusal.error != 0:  # the driver may have the record: the next call makes it again
        forget_stream(stream)  # perhaps it is of another device than it was said to be
        return give_turn(self, REFUSED)
    if known_stream(stream) == 0:  # what was seen before is true, whatever this call was told
        note_stream(stream, self.ordinal, 0)
    self._recorded = generation
    publish_record(self, generation)
    give_turn(self, 0)
    if is_awaited(self):
        wake(self)
    if not is_open(self):
        return IS_CLOSED
    return AGAIN if repeats else GO_ON

cdef bint follow_last(Core self, Handle handle, uint64_t stream, int64_t generation, Refusal *refusal) noexcept nogil:
    """Have the stream wait for the record before, which was made on another one; False if the driver refuses."""
    result = give_wait(self, handle, generation - 1, refusal)
    if marker_of(self, stream) != NULL and (result != 0 or (self.has_ring and self.chain.is_needed)):
        mark(self, handle, stream)  # behind a refused one too; a timeline's record has one itself
    if result == 0:
        self.last_stream = stream
    return result == 0

cdef inline int give_turn(Core self, int found) noexcept nogil:
    step(b"unlock")
    self.calls.give()
    return found

cdef inline bint must_follow(Core self, uint64_t stream) noexcept nogil:
    """Whether the stream is to wait for the record before, or for one that was refused, which is on another one."""
    return stream != self.last_stream and self._begun > 0

cdef inline bint has_needed(Core self, uint64_t stream, int64_t generation) noexcept nogil:
    """Whether all is there that the driver's calls need."""
    return (
        has_import(self, generation)
        and (not needs_marker(self, stream) or marker_of(self, stream) != NULL)
        and (not must_follow(self, stream) or self._recorded == 0 or has_import(self, self._recorded))
    )

cdef inline bint needs_marker(Core self, uint64_t stream) noexcept nogil:
    """Of a ring, a record that waits for the one before, which may be lost."""
    return not self.has_ring or (self.chain.is_needed and must_follow(self, stream))

cdef int get_needed(Core self, Handle handle, uint64_t stream, int64_t generation, int64_t deadline, timeout) except -1:
    open_import(self, generation)
    if must_follow(self, stream) and self._recorded > 0:
        open_import(self, self._recorded)
    if needs_marker(self, stream):
        if row_count != 0:
            check_lost(self, key_of(self, handle, stream, self.ordinal))  # such a stream may take in nothing more
        enter_calls(self, deadline, generation, timeout, UNDER_WAY)
        try:
            make_marker(self, handle, stream, self.ordinal)
        finally:
            leave_calls(self)

cdef int check_lost(Core self, int64_t key) except -1:
    """Raise RecorderLost if the next record behind the waits of a list is known to be lost."""
    cdef Wait wait
    for wait in latest(key):
        outcome = wait.known_outcome()
        if outcome is not None and isinstance(outcome, Loss):  # to ask what None is takes long
            raise outcome.behind(wait.label).error(self.name, self.label, self._recorded + 1)

cdef int record_dependent(
    Core self, Handle handle, uint64_t stream, int64_t generation, further, Refusal *refusal
) except -1:
    """With the turn, which it gives: a record that depends on others, or one that the driver refused before."""
    cdef Wait followed = None
    cdef Entry entry
    cdef int found = REFUSED
    cdef bint has_turn = True
    ipcsync_turns(1)
    try:
        key = key_of(self, handle, stream, self.ordinal)
        if generation == self._begun:
            check_place(self, stream)
            if stream != self.last_stream and not self.has_ring:  # a late marker of its place is behind later waits too
                keys = [lane.key for lane in lanes.copy().values() if lane.drainer_id == self.last_stream]
                keys += [self.last_stream, -1 - self.ordinal]  # the legacy stream's, as it may be a blocking one
                further = [*(further or ()), *[each for each in latest(None) if each.key in keys]]
        followed = depend_on(self, key, stream, generation, generation, further)
        for entry in list(self.chain.entries.values()) if generation == self._begun and stream != self.last_stream else ():
            is_before = not self.depends_on_all or entry.wait.stream == self.last_stream
            if is_before and entry.last >= generation and entry.wait.outcome is None:
                add(key, entry.wait.view, entry.wait.generation, entry.wait.stream, entry.wait.ordinal)
        with nogil:
            if generation == self._begun:
                follow_refused(self, handle, stream, refusal)
            elif followed is not None:
                follow_last(self, handle, stream, generation, refusal)
        if followed is not None:
            if isinstance(followed.outcome, Loss):  # as in `queue_wait`
                drop([followed])
                followed = add(key, self, self._recorded, stream, self.ordinal)
            followed.is_queued = refusal.error == 0
        if refusal.error == 0:
            has_turn = False
            with nogil:
                found = make_record(self, handle, stream, generation, refusal)
    finally:
        ipcsync_turns(-1)
        if has_turn:
            give_turn(self, 0)
    return found

cdef Wait depend_on(Core self, int64_t key, uint64_t stream, int64_t generation, int64_t last, further):
    """Store what the records of `generation` to `last` will depend on: the waits of a list, and others. RecorderLost if
    any of it is lost. The wait for the record before, if that is listed too."""
    cdef bint follows = must_follow(self, stream)  # a lost one would hold its stream up
    if len(self.chain.entries) >= self.chain.resolve_at or (follows and self.chain.may_be_lost()):
        publish(self)
        self.chain.resolve_at = max(<int64_t>MANY_ENTRIES, <int64_t>(2 * len(self.chain.entries)))
    sweep()
    waits = latest(None if self.depends_on_all else key)
    if further:
        waits = dict.fromkeys([*waits, *further])
    self.chain.extend(self, generation, last, stream, waits)
    return add(key, self, self._recorded, stream, self.ordinal) if follows and self._recorded and self.chain.entries else None

cdef int check_place(Core self, uint64_t stream) except -1:
    """Raise if the stream cannot be made to wait for the refused record: it is not known where that is on its own."""
    renew_markers(self)
    last = marker_of(self, self.last_stream)
    if stream != self.last_stream and not self.has_ring and last != NULL and last.handle != NULL and not is_fed(last):
        self.raise_unknown_place()

cdef void follow_refused(Core self, Handle handle, uint64_t stream, Refusal *refusal) noexcept nogil:
    """Have the stream wait for all records before the refused one, and for that one if it was made."""
    last = marker_of(self, self.last_stream)
    if stream != self.last_stream and self.has_ring:
        give_wait(self, handle, self._begun, refusal)  # if it was not made, its CUDA event is an older one's
    elif stream != self.last_stream and last != NULL:  # null: all there was found complete
        tell(refusal, cuStreamWaitEvent(handle, last.event, 0), b"cuStreamWaitEvent")
    if refusal.error == 0 and self._recorded > 0 and has_import(self, self._recorded):
        give_wait(self, handle, self._recorded, refusal)
    if marker_of(self, stream) != NULL and (self.has_ring or refusal.error != 0):
        mark(self, handle, stream)

cdef inline void publish_record(Core self, int64_t generation) noexcept nogil:
    store(self.place, RECORDED, self.base + generation)
    fence()  # before the looks at `state` and at who waits: those store, then look what is recorded

cdef inline bint is_awaited(Core self) noexcept nogil:
    return load(self.place, AWAITED) != 0 or load(self.place, FOLLOWED) != 0

cdef inline void wake(Core self) noexcept nogil:
    step(b"wake")
    ipcsync_futex_wake(self.place + RECORDED, False, 0x7FFFFFFF)

# --- room in the ring -------------------------------------------------------------------------------------------------

cdef void raise_room(Core self) noexcept nogil:
    """Let records go on behind what is complete, unless another process may be about to queue a wait on a CUDA event
    that would be recorded again."""
    cdef const uint64_t *words = <const uint64_t *>self.hazards
    if self._room >= self._completed + self.depth:
        return
    fence()  # behind the store of `completed`: who announces later sees that
    if load(self.place, ANNOUNCED) != 0:
        step(b"load hazards")
        for word in range((self.sessions + 7) // 8):
            if ipcsync_load(words + word) & ODD_BYTES:
                return
    self._room = self._completed + self.depth

cdef int make_room(Core self, int64_t generation, int64_t deadline, timeout) except -1:
    """Wait until there is room for a record of `generation`."""
    cdef int64_t oldest = generation - self.depth
    cdef int64_t first = 0
    if self.calls.mine():
        self.raise_reentered()
    publish_room(self)
    if oldest > self._completed:
        self.guard.full_rings += 1
        first = ipcsync_now()
    while oldest > self._completed:
        now = ipcsync_now()
        if now >= deadline:
            self.raise_full(oldest, timeout)
        if now - first > FULL_NS:
            self.note_full(oldest)
        with nogil:
            found = await_driver(self, oldest, first, min(deadline, now + <int64_t>SLICE_NS))
        PyErr_CheckSignals()
        self.guard.check_liveness()
        look_for_room(self)
        if found == 1 and oldest > self._completed:  # it depends on something that is not resolved yet
            ring(self, load(self.place, RECORDER))
            with nogil:
                pause(self, deadline)
    if generation > self._room:
        await_hazards(self, oldest, deadline, timeout)

cdef int publish_room(Core self) except -1:
    check_open(self)
    publish(self)
    if self.chain.loss is not None:
        self.raise_no_record()
    enter_state(self)
    raise_room(self)
    self.state.give()

cdef int look_for_room(Core self) except -1:
    check_use(self)
    if not is_open(self):
        self.raise_no_record()
    publish_room(self)

cdef int await_hazards(Core self, int64_t oldest, int64_t deadline, timeout) except -1:
    """Wait while a process may be about to queue a wait for a complete generation whose CUDA event is next. Such a call
    takes microseconds. Those of processes found dead, which the coordinator ends, do not count, nor what has been seen
    for long: its process may be stopped, its stream's queue be full."""
    cdef int64_t done = self._completed
    cdef int64_t pause = 0
    hazards = hazards_left(self)
    deadline = max(deadline, self.looked + LEAST_NS)
    while True:
        hazards &= hazards_left(self)
        if not hazards:
            break
        if self.looked >= deadline:
            self.raise_full(oldest, timeout, True)
        with nogil:
            ipcsync_pause(pause)
        PyErr_CheckSignals()
        pause = min(2 * pause + 10000, <int64_t>LONGEST_GAP_NS)
        look_for_room(self)
        if pause == LONGEST_GAP_NS:
            dead = {hazard: -PATIENCE_NS for hazard in hazards if not self.session_is_alive(hazard[0])}
            with cython.critical_section(self):
                self.watched |= dead
    enter_state(self)
    self._room = max(self._room, done + self.depth)
    self.state.give()

cdef set hazards_left(Core self):
    """The hazards to wait for: a session's line, and its byte."""
    cdef int64_t now = ipcsync_now()
    self.awake += min(now - self.looked, LONGEST_LOOK_NS)  # while this process is stopped, it does not watch
    self.looked = now
    there = self.line.hazards().items()
    with cython.critical_section(self):
        self.watched = {hazard: self.watched.get(hazard, self.awake) for hazard in there}
        return {hazard for hazard, since in self.watched.items() if self.awake - since < PATIENCE_NS}
