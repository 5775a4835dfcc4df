# record: the next generation, behind what a stream has been given so far.
#
# Generation g of the event engine is a record of the ring's event number (g - 1) mod depth; a record into a full ring
# first waits on the host for the oldest. On the timeline engine the stream writes base + g to the word.
# The model is tests/models/board_recorder.py.

cdef class Records(Waits):

    cdef dict watched  # since when, by `awake`, records have waited for each hazard
    cdef int64_t awake, looked  # for how long some record has, in ns, of any thread; the last look

    def __cinit__(self, *_):
        self.watched = {}

    cdef int64_t record_on(self, Handle handle, bint is_ours, int64_t deadline, timeout, further) except -1:
        """Record the next generation; 0, and nothing is done: it is not known whether the stream is of this device.

        A number is never given to two records. If the driver refused one that the stream may have all the same, the
        next call makes it again, behind its possible place and all records before it, and then one of its own number.
        """
        cdef uint64_t stream = 0
        cdef int64_t generation = 0
        cdef int found
        cdef bint depends = further is not None
        cdef Refusal refusal = Refusal(0, 0, 0)
        while True:
            with nogil:
                found = self.begin_record(handle, is_ours, depends, &stream, &generation)
                if found == GO_ON:
                    found = self.make_record(handle, stream, generation, &refusal)
            if found == DEPENDS:  # it has the turn
                found = self.record_dependent(handle, stream, generation, further, &refusal)
            if found == UNKNOWN:
                return 0
            elif found == BUSY:
                if not self.enter_calls(deadline):
                    self.raise_timeout(
                        self._recorded + 1, timeout, "recorded (another thread's record or wait is under way)"
                    )
                self.leave_calls()
            elif found == NO_ROOM:
                self.make_room(self._recorded + 1, deadline, timeout)
            elif found == NEEDS:
                self.get_needed(handle, stream, generation)
            elif found == CAPTURES:
                self.check_usable(handle, "record")
            elif found == NO_ID:
                with nogil:
                    self.id_of(handle)
            elif found == IS_CLOSED or found == IS_OVER:
                self.raise_no_record()
            elif found == REFUSED:
                self.raise_refused(&refusal)
            elif found != AGAIN:  # else one that had been refused before: this call's own is to follow
                return generation

    cdef int begin_record(
        self, Handle handle, bint is_ours, bint depends, uint64_t *stream, int64_t *generation
    ) except -1 nogil:
        """GO_ON or DEPENDS, with the turn; or what is to be done before the next try."""
        cdef unsigned long long id = 0
        cdef int64_t next
        if not self.is_usable(handle):
            return CAPTURES
        if self._begun == self._recorded and not self.find_room(self._recorded + 1):
            return NO_ROOM
        step(b"cuStreamGetId")
        if cuStreamGetId(handle, &id) != 0:
            return NO_ID
        stream[0] = id
        if not is_ours and not self.is_of_device(id):
            return UNKNOWN
        step(b"lock")
        if not self.calls.take():
            return BUSY
        next = self._begun if self._begun != self._recorded else self._recorded + 1
        generation[0] = next
        if self.closed() or not self.is_open():
            return self.give_turn(IS_CLOSED)
        if next > self._room and next != self._begun:
            return self.give_turn(NO_ROOM)
        if not self.has_needed(id, next):
            return self.give_turn(NEEDS)
        if depends or self.chain.is_needed or row_count != 0 or self.depends_on_all or next == self._begun:
            return DEPENDS
        return GO_ON

    cdef inline int give_turn(self, int found) noexcept nogil:
        step(b"unlock")
        self.calls.give()
        return found

    cdef inline bint is_of_device(self, uint64_t stream) noexcept nogil:
        """Whether this event was recorded on the stream lately, which then is of its device."""
        cdef int index
        for index in range(RECENT):
            if self.recent[index] == stream and stream != 0:
                return True
        return False

    cdef inline bint follows(self, uint64_t stream, int64_t generation) noexcept nogil:
        """Whether the stream is to wait for the record before, which was made on another one."""
        return stream != self.last_stream and generation > 1

    cdef inline bint has_needed(self, uint64_t stream, int64_t generation) noexcept nogil:
        """Whether all is there that the driver's calls need."""
        return (
            self.has_import(generation)
            and (self.engine.has_ring or self.marker(stream) != NULL)
            and (not self.follows(stream, generation) or self.has_import(generation - 1))
        )

    cdef int get_needed(self, Handle handle, uint64_t stream, int64_t generation) except -1:
        self.open_import(generation, -1)
        if self.follows(stream, generation):
            self.open_import(generation - 1, -1)
        if not self.engine.has_ring and self.enter_calls(INT64_MAX):
            try:
                self.make_marker(stream, self.ordinal)
            finally:
                self.leave_calls()

    cdef int record_dependent(
        self, Handle handle, uint64_t stream, int64_t generation, further, Refusal *refusal
    ) except -1:
        """With the turn, which it gives: a record that depends on others, or one that the driver refused before."""
        cdef list entries
        cdef Wait followed = None
        cdef int found = REFUSED
        cdef bint has_turn = True
        ipcsync_turns(1)
        try:
            if generation == self._begun:
                refusal.wait = self.follow_refused(handle, stream)
            if refusal.wait == 0:
                entries = self.depend_on(self.key_of(handle, stream, self.ordinal), stream, generation, further)
                if (self.chain.entries or entries) and self.follows(stream, generation):
                    followed = add(self.key_of(handle, stream, self.ordinal), self, generation - 1, stream)
                self.chain.commit(generation, generation, entries)
                has_turn = False
                with nogil:
                    found = self.make_record(handle, stream, generation, refusal)
                if followed is not None and refusal.wait == 0:
                    followed.is_queued = True
        finally:
            ipcsync_turns(-1)
            if has_turn:
                self.give_turn(0)
        return found

    cdef list depend_on(self, int64_t key, uint64_t stream, int64_t generation, further):
        """What the record will depend on: the waits of a list, and others. RecorderLost if any of it is lost."""
        if len(self.chain.entries) >= self.chain.resolve_at:
            self.publish()
            self.chain.resolve_at = max(<int64_t>MANY_ENTRIES, <int64_t>(2 * len(self.chain.entries)))
        waits = latest(None if self.depends_on_all else key)
        if further:
            waits = dict.fromkeys([*waits, *further])
        return self.chain.entries_of(generation, stream, waits)

    cdef int follow_refused(self, Handle handle, uint64_t stream) except -1:
        """Have the stream wait for all records before the refused one, and for that one if it was made; the error."""
        cdef Marker *last
        cdef int result = 0
        self.renew_markers()
        last = self.marker(self.last_stream)
        if stream != self.last_stream and not self.engine.has_ring and last != NULL and last.handle != NULL:
            self.raise_unknown_place()
        with nogil:
            if stream != self.last_stream:
                result = self.engine.follow(self, handle, last)
            if result == 0 and self._recorded > 0 and self.has_import(self._recorded):
                result = self.engine.wait(self, handle, self._recorded)
        return result

    cdef int make_record(self, Handle handle, uint64_t stream, int64_t generation, Refusal *refusal) noexcept nogil:
        """With the turn, which it gives: GO_ON, AGAIN, REFUSED, or IS_OVER (made, and the event is not open now)."""
        cdef bint repeats = generation == self._begun
        if not repeats and self.follows(stream, generation):
            refusal.wait = self.engine.wait(self, handle, generation - 1)
            if refusal.wait != 0:
                return self.give_turn(REFUSED)
        self.set_stream(stream)
        self._begun = generation
        self.engine.record(self, handle, stream, generation, refusal)
        if refusal.write != 0 or refusal.record != 0:  # the driver may have the record: the next call makes it again
            return self.give_turn(REFUSED)
        self._recorded = generation
        self.publish_record(generation)
        self.give_turn(0)
        if self.is_awaited():
            self.wake()
        if not self.is_open():
            return IS_OVER
        return AGAIN if repeats else GO_ON

    cdef inline void set_stream(self, uint64_t stream) noexcept nogil:
        self.last_stream = stream
        if not self.is_of_device(stream):
            self.recent[self.next_recent] = stream
            self.next_recent = (self.next_recent + 1) % RECENT

    cdef inline void publish_record(self, int64_t generation) noexcept nogil:
        store(self.place, RECORDED, self.base + generation)
        fence()  # before the looks at `state` and at who waits: those store, then look what is recorded

    cdef inline bint is_awaited(self) noexcept nogil:
        return self.load(AWAITED) != 0 or self.load(FOLLOWED) != 0

    cdef inline void wake(self) noexcept nogil:
        wake_all(self.place)

    cdef int64_t try_record(self, uintptr_t address) except -1:
        """Record on a stream that this use knows; 0, and nothing is changed, if it does not."""
        self.check_use()
        if not self.is_recorder:
            return 0
        return self.record_on(<Handle>address, False, FOREVER, None, None)

    def record_next(self, handle, int64_t deadline_ns, timeout, further):
        """Record the next generation on the CUstream `handle`, of the event's device and with its context if it is a
        default one; its number. `further`: more waits that it depends on, or None."""
        return self.record_on(<Handle><uintptr_t>int(handle), True, deadline_ns, timeout, further)

    # --- room in the ring ---------------------------------------------------------------------------------------------

    cdef void raise_room(self) noexcept nogil:
        """Let records go on behind what is complete, unless another process may be about to queue a wait on a CUDA event
        that would be recorded again."""
        cdef const uint64_t *words = <const uint64_t *>self.hazards
        cdef uint64_t word
        if self._room >= self._completed + self.depth:
            return
        fence()  # behind the store of `completed`: who announces later sees that
        if self.load(ANNOUNCED) != 0:
            step(b"load hazards")
            for word in range((self.sessions.sessions + 7) // 8):
                if ipcsync_has_odd(ipcsync_load(words + word)):
                    return
        self._room = self._completed + self.depth

    cdef bint find_room(self, int64_t generation) except -1 nogil:
        """Whether there is room for a record of `generation` after a look at what is complete; without a resolution."""
        if generation <= self._room:
            return True
        if not self.try_state():
            return False
        try:
            if self.chain.is_needed:  # asked with `state`: another thread's record may depend on something by now
                return False
            if not self.closed():
                self.store(self.engine.harvest(self))
                self.raise_room()
        finally:
            self.state.give()
        return generation <= self._room

    cdef int make_room(self, int64_t generation, int64_t deadline, timeout) except -1:
        """Wait until there is room for a record of `generation`."""
        cdef int64_t oldest = generation - self.depth
        if self.calls.mine():
            self.raise_reentered()
        self.publish_room()
        if generation > self._room and oldest > self._completed:
            self.guard.count_full_ring()
            self.await_oldest(oldest, deadline, timeout)
        if generation > self._room:
            self.await_hazards(oldest, deadline, timeout)

    cdef int publish_room(self) except -1:
        self.check_open()
        self.publish()
        if self.chain.loss is not None:
            self.raise_no_record()
        self.enter_state()
        self.raise_room()
        self.state.give()

    cdef int look_for_room(self) except -1:
        self.check_use()
        if not self.is_open():
            self.raise_no_record()
        self.publish_room()

    cdef int await_oldest(self, int64_t oldest, int64_t deadline, timeout) except -1:
        cdef int64_t now, first = ipcsync_now()
        cdef int found
        while oldest > self._completed:
            now = ipcsync_now()
            if now >= deadline:
                self.raise_full(oldest, timeout)
            if now - first > FULL_NS:
                self.note_full(oldest)
            with nogil:
                found = self.await_driver(oldest, first, min(deadline, now + <int64_t>SLICE_NS))
            PyErr_CheckSignals()
            self.guard.check_liveness()
            self.look_for_room()
            if found == 1 and oldest > self._completed:  # it depends on something that is not resolved yet
                self.dependencies.ring(self.load(RECORDER))
                with nogil:
                    self.dependencies.pause(deadline)

    cdef int await_hazards(self, int64_t oldest, int64_t deadline, timeout) except -1:
        """Wait while a process may be about to queue a wait for a complete generation whose CUDA event is next.

        Such a call takes microseconds. Those of processes found dead, which the coordinator ends, do not count, nor
        what has been seen for long: its process may be stopped, its stream's queue be full.
        """
        cdef int64_t done = self._completed
        cdef int64_t pause = 0
        hazards = self.hazards_left()
        deadline = max(deadline, self.looked + LEAST_NS)
        while True:
            hazards &= self.hazards_left()
            if not hazards:
                break
            if self.looked >= deadline:
                self.raise_full(oldest, timeout, True)
            with nogil:
                ipcsync_pause(pause)
            PyErr_CheckSignals()
            pause = min(2 * pause + 10000, <int64_t>LONGEST_GAP_NS)
            self.look_for_room()
            if pause == LONGEST_GAP_NS:
                self.watched |= {hazard: -PATIENCE_NS for hazard in hazards if not self.session_is_alive(hazard[0])}
        self.enter_state()
        self._room = max(self._room, done + self.depth)
        self.state.give()

    cdef set hazards_left(self):
        """The hazards to wait for: a session's line, and its byte."""
        cdef int64_t now = ipcsync_now()
        self.awake += min(now - self.looked, LONGEST_LOOK_NS)  # while this process is stopped, it does not watch
        self.looked = now
        self.watched = {hazard: self.watched.get(hazard, self.awake) for hazard in self.line.hazards().items()}
        return {hazard for hazard, since in self.watched.items() if self.awake - since < PATIENCE_NS}
