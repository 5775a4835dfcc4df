# query and synchronize: whether a generation is complete. What the recorder publishes of it.

cdef class Queries(Streams):

    # --- the driver's answer, and whether it counts -------------------------------------------------------------------

    cdef int done(self, int64_t generation, double patience_s) except -1 nogil:
        """Whether the driver calls `generation`, which was recorded, complete; 0 too if it cannot be asked now.

        The import is not destroyed meanwhile, and no lock is held: the question may have to wait for another's call.
        """
        if not self.engine.has_ring:
            return self.is_on_board(generation)
        if not self.enter_driver(generation, patience_s):
            return 0
        try:
            return self.says_complete(generation)
        finally:
            ipcsync_add(&self.sleepers, -1)

    cdef bint enter_driver(self, int64_t generation, double patience_s) except -1 nogil:
        """Have the import of a generation stay until `sleepers` is lowered; False if it cannot be opened now."""
        if not self.has_import(generation):
            with gil:
                if not self.open_import(generation, patience_s):
                    return False
        if not self.try_state():
            return False
        try:
            self.check_open()
            ipcsync_add(&self.sleepers, 1)  # in this order: a release looks at `sleepers` after the close
        finally:
            self.state.give()
        return True

    cdef bint confirm(self, int64_t generation) except -1 nogil:
        """After the driver said complete: whether that counts. Recorder and coordinator must live now, after it.

        What the generation depends on must be good too: False while that is unknown.
        """
        cdef bint is_good
        if self.dependencies.depends(generation):
            if self.is_recorder:
                if self.is_complete_now(generation):
                    return True
                self.dependencies.ring(self.load(RECORDER))  # it may have to resolve others first
                return False
            if not self.is_clear(generation):
                return False
        is_good = self.recorder_lives() and not self.is_broken()
        self.check_open()
        self.check_coordinator()
        if not is_good:
            return self.check_good(generation)
        self.note(generation)
        if self.is_recorder and self.engine.has_ring and self.try_state():
            try:
                if not self.is_closed:  # else it may be released, and the slot used by another event
                    self.store(generation)
            finally:
                self.state.give()
        return True

    cdef bint is_complete_now(self, int64_t generation) except -1 nogil:
        """`is_complete`; the recorder itself first resolves what its records depend on, if nobody else does now."""
        if self.is_recorder and self.chain.is_needed:
            with gil:
                if self.chain.is_open:
                    self.publish()
        return self.is_complete(generation)

    # --- query --------------------------------------------------------------------------------------------------------

    cdef bint ask(self, int64_t generation, double patience_s) except -1:
        cdef bint is_done
        self.check_use()
        if generation <= self.known() or self.is_complete_now(generation):
            return True
        if self.last() < generation:
            self.check_finished(generation)
            return False
        with nogil:
            is_done = self.done(generation, patience_s) and self.confirm(generation)
        if not is_done:
            self.check_finished(generation)
        return is_done

    def query(self, int64_t generation, double patience_s=-1):
        """Whether `generation` is complete.

        Another thread may open the import that is to be asked about, in a driver's call that blocks: after `patience_s`
        seconds (below 0: without a limit) this is False.
        """
        return self.ask(generation, patience_s)

    def accepts(self, int64_t generation):
        """Whether a waiter would accept `generation` now; asks the driver, raises nothing.

        False also while another thread has the lock, and for this process's own events, which it resolves itself.
        """
        cdef bint is_accepted = False
        if self.is_recorder or self.is_unused or self.last() < generation:
            return False
        try:
            if not self.open_import(generation, 0) or not self.state.take():
                return False
            try:
                if not self.is_unused:
                    with nogil:
                        is_accepted = (
                            self.engine.query(self, generation) == 0
                            and self.is_clear(generation)
                            and self.recorder_lives()
                            and not self.is_broken()
                            and not self.is_orphaned()
                        )
                if is_accepted:
                    self.note(generation)
            finally:
                self.state.give()
        except IpcSyncError as error:  # calls of this event raise it
            log.debug("whether generation %d of %s is complete cannot be asked: %s", generation, self.label, error)
            return False
        return is_accepted

    # --- synchronize --------------------------------------------------------------------------------------------------

    cdef bint sleep_until_recorded(self, int64_t generation, int64_t deadline) except -1 nogil:
        """Block until `generation` is recorded; False once `deadline` is over.

        Each slice ends with the looks of `check_alive`, by what the kernel marks. The GIL is seldom asked for: that
        alone may take longer than a slice in a busy process.
        """
        cdef uint64_t recorded
        cdef int64_t left, now, last = 0
        cdef bint is_interrupted
        while True:
            recorded = self.load(RECORDED)
            if <int64_t>(recorded - self.base) >= generation:
                return self.check_open()
            self.check_finished(generation)
            now = ipcsync_now()
            left = deadline - now
            if left <= 0:
                return False
            last = last or now
            is_interrupted = sleep_on(self.place, recorded, min(left, <int64_t>SLICE_NS))
            if self.load(RECORDED) == recorded:
                last = self.end_slice(generation, last, is_interrupted)

    cdef int64_t end_slice(self, int64_t generation, int64_t last, bint is_interrupted) except -1 nogil:
        """The looks at the end of a wait's slice; `last` is when Python last had its turn, or has now."""
        cdef int64_t now
        self.check_alive(generation)
        now = ipcsync_now()
        if not is_interrupted and now - last < LONGEST_NS:
            return last
        with gil:
            PyErr_CheckSignals()
            self.guard.check_liveness()  # which also beats, if this is the thread that does
        return now

    cdef int sleep_until_complete(self, int64_t generation, int64_t deadline, int64_t since) except -1 nogil:
        """Block until `generation` is complete: 1. Once `deadline` is over: 0 if it is recorded by then, else 2."""
        cdef int64_t until, now, last = ipcsync_now()
        cdef int64_t began = since if <int64_t>(ipcsync_load(self.place + RECORDED) - self.base) >= generation else 0
        cdef int found
        if not self.sleep_until_recorded(generation, deadline):
            return 2
        began = began or ipcsync_now()
        if self.state.mine() and not self.is_complete(generation):  # then the driver could not be asked
            with gil:
                self.raise_reentered()
        while True:
            if self.is_complete_now(generation):
                return 1
            self.check_finished(generation)
            now = ipcsync_now()
            until = min(deadline, now + self.dependencies.slice_ns)
            found = self.await_driver(generation, began, until)
            if found == 1:
                if self.confirm(generation):
                    return 1
                self.dependencies.pause(deadline)
            now = ipcsync_now()
            last = self.end_slice(generation, last, found < 0)
            if now >= deadline:  # only now: the driver is asked once even with a timeout of 0
                return 0

    cdef int await_driver(self, int64_t generation, int64_t began, int64_t until) except -2 nogil:
        """Wait until the driver calls `generation` complete: 1; 0 once `until` is over, -1 if a signal came."""
        cdef Handle event = NULL
        cdef bint is_there
        cdef int found = self.engine.begin_sleep(self, generation, &event)
        if found != 2:
            return found
        step(b"await work")
        is_there = await_work(
            event, self.place + COMPLETED, self.base + generation, self.place + STATE, began, until, &self.patience
        )
        if event != NULL:
            ipcsync_add(&self.sleepers, -1)
        if not is_there:
            return 0 if ipcsync_now() >= until else -1
        return self.done(generation, -1) or self.is_complete(generation)

    def await_recorded(self, int64_t generation, int64_t deadline_ns, timeout):
        """Block until `generation` is recorded; else WaitTimeout, RecorderLost, or an error of `check_liveness`."""
        cdef bint is_recorded
        with nogil:
            is_recorded = self.sleep_until_recorded(generation, deadline_ns)
        if not is_recorded:
            self.raise_timeout(generation, timeout, "recorded")

    def await_complete(self, int64_t generation, timeout, int64_t began=0, int64_t since=0):
        """As `synchronize`, and for the client's own threads, of which a trace does not show it.

        One that has waited for it, once it was recorded, since `since` in ns looks as seldom as after so long.
        """
        cdef int64_t deadline = deadline_of(timeout, began)
        cdef int found
        self.check_use()
        if self.is_complete(generation):
            return
        with nogil:
            found = self.sleep_until_complete(generation, deadline, since)
        if found != 1:
            self.raise_timeout(generation, timeout, "recorded" if found == 2 else "complete")

    def synchronize(self, int64_t generation, timeout=None, int64_t began=0):
        """Block until `generation` is complete, at most `timeout` seconds from now, or from `began` in ns."""
        self.await_complete(generation, timeout, began)

    # --- what the recorder publishes ----------------------------------------------------------------------------------

    cdef bint says_complete(self, int64_t generation) except -1 nogil:
        """Whether the driver calls a record of this session complete."""
        cdef int result
        step(b"cuEventQuery")
        if not self.has_import(generation):
            return False
        result = self.engine.query(self, generation)
        if result != 0 and result != NOT_READY:
            with gil:
                self.raise_driver(result, "cuEventQuery")
        return result == 0

    cdef int open_pending(self) except -1:
        """Open the imports of this session's records that are not complete: an earlier use may have made them."""
        cdef int64_t generation
        if self.engine.has_ring and not self.is_unused:
            for generation in range(self._completed + 1, max(self._recorded, self._begun) + 1):
                self.open_import(generation, -1)

    cdef bint store(self, int64_t done) except -1 nogil:
        """Store what is complete, unless the coordinator is lost. With `state`."""
        if not self.engine.has_ring or done <= self._completed or self.is_orphaned():
            return False
        if not self.is_broken():
            store(self.place, COMPLETED, self.base + done)
        self._completed = done
        self.note(done)
        return True

    cdef bint publish(self) except -1:
        """Publish what is complete, and resolve what it depends on, unless another call does now."""
        cdef int64_t done
        self.open_pending()
        if not self.state.take():
            return False
        try:
            if self.is_unused or not (self.engine.has_ring or self.chain.is_open):
                return True  # in the first case the slot may be another event's by now
            with nogil:
                done = self.engine.harvest(self)
            if not self.chain.is_open:
                self.store(done)
            elif done >= 0 and not self.is_orphaned() and not self.is_broken():  # else its watermark says what counts
                self.store(self.chain.resolve(done))
                self.chain.store()
        finally:
            self.state.give()
        return True

    def publish_completed(self):
        """Publish what is complete (recorder). Does nothing while another thread does."""
        if self.is_recorder:
            self.publish()
