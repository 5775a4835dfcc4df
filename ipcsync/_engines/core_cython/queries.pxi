# query and synchronize: whether a generation is complete.

cdef class Queries(State):

    cdef inline int on_board(self, int64_t generation) noexcept nogil:
        """1: complete by the board or by memory; 0: not so; -1: not me."""
        cdef uint64_t count
        cdef int64_t complete, recorded
        if generation <= self.known():
            return 1
        if generation >= self._lost_from:
            return -1
        count = self.load(LOAD_COMPLETED, COMPLETED)
        if self.load(LOAD_STATE, STATE) == BROKEN or count == INT64_MAX:
            return -1
        complete = <int64_t>(count - self.base)
        if self.is_timeline and self.stands(complete):
            # The GPU writes the word also if a wait before it was lost. A broken event's word was released.
            if not self.is_clear(complete) or self.load(LOAD_STATE, STATE) == BROKEN:
                return -1
        if complete < generation:
            return -1 if self.is_lost(generation) or self.closed() else 0
        recorded = <int64_t>(self.load(LOAD_RECORDED, RECORDED) - self.base)
        if self.closed():
            return -1
        complete = min(complete, recorded)
        if generation > complete:
            return 0
        ipcsync_raise_to(&self.complete, min(complete, self._lost_from - 1))
        return 1

    cdef int ask(self, int64_t generation) noexcept nogil:
        """As `query`, behind its first looks: 1: complete; 0: not so; -1: not me."""
        cdef int result
        if <int64_t>(self.load(LOAD_RECORDED, RECORDED) - self.base) < generation:
            return 0 if self.goes_on(generation) else -1
        if self.is_timeline:
            return -1
        if MISTAKE == 7 and not self.recorder_lives():
            return -1
        result = self.ask_driver(generation)
        return -1 if result == 0 and not self.goes_on(generation) else result

    cdef int ask_driver(self, int64_t generation) noexcept nogil:
        """Whether the driver calls a recorded generation complete, and that counts: 1; 0: pending; -1: not me."""
        cdef int result
        if not self.take():
            return -1
        result = -1 if self.closed() else self.done(generation)
        self.give()
        if result == 0:
            if MISTAKE != 12 and not self.is_clear(generation):
                return -1
            if MISTAKE != 7 and not self.recorder_lives():
                return -1
            if self.load(LOAD_STATE, STATE) == BROKEN or self.closed() or not self.session.coordinator_is_good():
                return -1
            ipcsync_raise_to(&self.complete, generation)
            if self.is_recorder and self.take():
                if not self.closed():
                    self.store(generation)
                self.give()
            return 1
        return 0 if result == NOT_READY else -1

    cdef int try_query(self, int64_t generation) except -9:
        cdef int result = -1
        if self.session is None or not self.good() or self.is_chained():
            return -1
        if generation <= self.known():
            result = 1
        else:
            result = self.on_board(generation)
            if result == 0:
                with nogil:
                    result = self.ask(generation)
        if result >= 0:
            self.session.shortcuts += 1
        return result

    cdef bint await_record(self, int64_t generation, int64_t until) noexcept nogil:
        """Sleep until the generation is recorded; False: not me, or it is past `until`, 0 for at once.

        Each slice ends with the looks of `check_liveness`, by what the kernel marks. The GIL is not asked for: in a busy
        process that alone may take longer than a slice.
        """
        cdef uint64_t recorded
        cdef int64_t left
        cdef bint is_interrupted
        while True:
            recorded = self.load(LOAD_RECORDED, RECORDED)
            if <int64_t>(recorded - self.base) >= generation:
                return not self.closed()
            if not self.goes_on(generation):
                return False
            left = until - ipcsync_now() if until else 0
            if left <= 0:
                return False
            is_interrupted = self.sleep(recorded, min(left, <int64_t>SLICE_NS))
            if self.load(LOAD_RECORDED, RECORDED) == recorded and (
                is_interrupted or not self.good() or not self.recorder_lives() or not self.session.coordinator_is_good()
            ):
                return False

    cdef int await_done(self, int64_t generation, int64_t until) noexcept nogil:
        """Sleep until the driver says that a recorded generation is complete; then as `query`."""
        cdef Handle event = NULL
        if not self.is_timeline:
            if not self.take():
                return -1
            event = NULL if self.closed() else self.event(generation)
            if event != NULL:
                ipcsync_add(&self._sleepers, 1)  # who would destroy the import looks for them under the lock
            self.give()
            if event == NULL:
                return -1
        step(AWAIT_WORK)
        if not await_work(
            event, self.place + COMPLETED, self.base + generation, until, self.nudge_of_recorder(), &self.patience
        ):
            generation = 0
        if event != NULL:
            ipcsync_add(&self._sleepers, -1)
        return self.ask_anew(generation) if generation and self.good() else -1

    cdef inline const void *nudge_of_recorder(self) noexcept nogil:
        cdef uint64_t line = self.load(LOAD_RECORDER, RECORDER) & 0xFFFF
        return self.session.header + FIRST_SESSION + line * LINE + S_NUDGE if line < self.session.sessions else NULL

    cdef inline int ask_anew(self, int64_t generation) noexcept nogil:
        cdef int result = self.on_board(generation)
        return self.ask(generation) if result == 0 and not self.is_timeline else result

    cdef bint try_synchronize(self, int64_t generation, int64_t slice_ns) except -1:
        cdef int result = -1
        cdef int64_t until
        if self.session is None or not self.good() or self.is_chained():
            return False
        result = self.on_board(generation)  # with the GIL: to give it up may cost 5 ms for each busy thread
        if result == 0:
            with nogil:
                until = ipcsync_now() + slice_ns if slice_ns else 0
                result = -1
                if self.await_record(generation, until) and self.good():
                    result = self.ask_anew(generation)
                    if result == 0 and slice_ns > 0:
                        result = self.await_done(generation, min(until, ipcsync_now() + <int64_t>SLICE_NS))
        if result == 1:
            self.session.shortcuts += 1
        return result == 1
