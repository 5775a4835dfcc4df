# wait: a stream's later work waits for a generation.

cdef enum:
    MANY_LISTS = 64


cdef class Waits(Queries):

    cdef int look_before(self, Handle stream, int64_t generation, int64_t slice_ns, uint64_t *id) noexcept nogil:
        """1: complete; 2: to be queued on the stream with that id; 0: not me."""
        cdef unsigned long long stream_id = 0
        cdef int result = self.on_board(generation)
        if result != 0:
            return 1 if result == 1 else 0
        if <int64_t>(self.load(LOAD_RECORDED, RECORDED) - self.base) < generation or self.closed():
            if not self.await_record(generation, ipcsync_now() + slice_ns if slice_ns else 0):
                return 0
            if not self.is_usable(stream):  # another thread may have begun a capture meanwhile
                return 0
        if not self.is_open():
            return 0
        if not self.is_timeline:
            result = self.ask_driver(generation)
            if result != 0:
                return 1 if result == 1 else 0
        step(GET_ID)
        if cuStreamGetId(stream, &stream_id) != 0:
            return 0
        id[0] = stream_id
        return 2

    cdef int queue_behind(
        self, Handle stream, uint64_t stream_id, int64_t generation, Refusal *refusal
    ) noexcept nogil:
        """1: queued; 2: complete by now; 0: not me; -1: queued, and something is wrong, or its marker is refused."""
        cdef Handle marker
        cdef bint is_queued = False
        cdef int result = 0
        if not self.take():
            return 0
        marker = self.marker(stream_id)
        if not self.closed() and self._unmarked == 0 and self.session.fork_mark[0] and marker != NULL and (
            self._address != 0 if self.is_timeline else self.event(generation) != NULL
        ):
            if not self.is_timeline:
                if MISTAKE != 14:
                    self.enter()  # from here on its event is recorded again only if it was complete before
                # The recorder stores what is complete before it looks at the visits.
                if MISTAKE != 13 and <int64_t>(self.load(LOAD_COMPLETED, COMPLETED) - self.base) >= generation:
                    result = self.on_board(generation)
                if MISTAKE == 14:
                    self.enter()
                elif MISTAKE == 15:
                    self.leave()
            if result == 0:
                if MISTAKE == 4:
                    step(MARK)
                    cuEventRecord(marker, stream)
                is_queued = self.queue(stream, generation) == 0
            if not self.is_timeline and MISTAKE != 15:
                self.leave()
            if result == 0:
                if is_queued and MISTAKE != 4:
                    step(MARK)
                    refusal.record = cuEventRecord(marker, stream)
                    if refusal.record != 0:
                        self.leave_unmarked(stream, stream_id)
        self.give()
        if result == 1:
            return 2
        if not is_queued:
            return 0
        if is_refused(refusal):
            return -1
        if MISTAKE != 8 and (not self.is_open() or not self.is_clear(generation)):
            return -1
        return 1 if self.recorder_lives() and not self.closed() and self.session.coordinator_is_good() else -1

    cdef object tell_of_wait(self, uint64_t stream_id, int64_t generation, place, uint64_t guess, dict alone):
        """Before a wait is queued: have the stream's next record stand behind it, as `queued.add`; None: not me.

        `alone`: as the only wait of the stream `guess`, made before this call might sleep; None if one stood there.
        """
        cdef int64_t key = 0
        if not self.find_list(stream_id, &key):
            return None
        if not self.behind_all:
            wait = self.listed(key, place, generation, stream_id)
            if wait is not None:
                return wait
            if alone is None or stream_id != guess:
                alone = {place: self.make_wait(self, generation, key, stream_id)}
            if len(self.waits) < MANY_LISTS and self.table_lock.take():
                wait = self.put_wait(key, place, generation, stream_id, alone)
                if wait is not None:
                    return wait
        return self._note_wait(stream_id, key, generation)

    cdef bint try_wait(self, stream, int64_t generation, int64_t slice_ns) except -1:
        cdef uintptr_t address
        cdef uint64_t stream_id = 0
        cdef uint64_t guess = 0
        cdef int64_t key = 0
        cdef int result
        cdef bint sleeps
        cdef Refusal refusal = Refusal(0, 0)
        if self.session is None or not self.good():
            return False
        address = address_of(stream)
        if address == 0:
            return False
        if not self.is_usable(<Handle>address):  # with the GIL: to give it up costs more than the call
            return False
        if generation <= self.known():
            self.session.shortcuts += 1
            return True
        # What follows the sleep is to be short. No object may be made under the lock: that may collect garbage.
        self.newest_list(&guess, &key)
        place = <object><uintptr_t><PyObject *>self
        alone = None
        sleeps = <int64_t>(ipcsync_load(self.place + RECORDED) - self.base) < generation
        if sleeps and self.listed(key, place, generation, guess) is None:
            alone = {place: self.make_wait(self, generation, key, guess)}
        with nogil:
            result = self.look_before(<Handle>address, generation, slice_ns, &stream_id)
        if result == 2:
            wait = self.tell_of_wait(stream_id, generation, place, guess, alone)
            if wait is None:
                return False
            with nogil:
                result = self.queue_behind(<Handle>address, stream_id, generation, &refusal)
            if result != 0 and result != 2 and wait.generation == generation:
                wait.is_queued = True
            if is_refused(&refusal):
                self.raise_refused(&refusal)
            if result < 0:
                self._check_after_wait(generation)
        if result != 0:
            self.session.shortcuts += 1
        return result != 0
