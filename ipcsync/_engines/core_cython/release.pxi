# The end of a use: it may be released once its markers are complete, its records are complete, no thread is inside the
# driver for it, and there is an outcome on each wait that was queued for it.

cdef class Core(Records):
    """What an engine is made over."""

    def await_calls(self, double seconds):
        """Wait until no other thread is in a record's or a wait's driver call; whether none is, within `seconds`."""
        if self.calls.mine():
            return True
        if not self.calls.await_turn(ipcsync_now() + <int64_t>(seconds * 1e9)):
            return False
        self.calls.give()
        return True

    def close(self):
        """End this use: later calls raise EventClosed, and those that wait now do within 50 ms.

        A record that is under way is published when this returns, unless the driver keeps it for longer. Wait by
        `await_calls` before, with no lock held that the heartbeat's thread needs.
        """
        cdef bint has_turn = False
        try:
            has_turn = not self.calls.mine() and self.calls.await_turn(ipcsync_now() + <int64_t>SLICE_NS)
        finally:
            self.is_closed = True
            if has_turn:
                self.calls.give()
            self.wake()

    def try_release(self):
        """Release everything if no thread is inside the driver, no queued wait pending and no record unfinished.

        A thread that waits on the host for a record only reads the board, and checks that this use is open after each
        read, so it does not count. Does not wait for a thread that has the turn.
        """
        if self.is_released or not self.calls.take():
            return self.is_released
        ipcsync_turns(1)
        try:
            if self.is_unused or self.end_waits():
                self.enter_state()
                self.is_unused = True  # before the first import is destroyed, which may take several tries
                memset(self.ring, 0, max(self.depth, 1) * sizeof(Handle))
                self.state.give()
                self.is_released = self.close_events()
        finally:
            ipcsync_turns(-1)
            self.calls.give()
        return self.is_released

    cdef bint end_waits(self) except -1:
        """Forget what was queued for this slot and destroy the markers; False while any of it is pending."""
        cdef bint are_decided = False
        cdef int sleepers
        if self.state.mine():
            return False
        self.enter_state()
        sleepers = self.sleepers  # with `state`: who found this use open with that held is counted by now
        self.state.give()
        if sleepers:
            return False
        try:
            if self.guard.coordinator_is_alive():
                if not (self.renew_markers() and self.is_drained_now() and self.drop_all_markers(False)):
                    return False
            if self.guard.coordinator_is_alive():
                for wait in waits_on(self):  # the streams have passed all of them
                    if wait.resolved() is None:
                        self.dependencies.ring(self.load(RECORDER))
                        return False
                are_decided = True
        except (DriverError, CoordinatorLost):
            if self.guard.coordinator_is_alive():
                raise
        self.renew_markers()
        self.free_streams()
        # If the coordinator is lost, the driver must not be asked about its events, and no process waits for this
        # release.
        for wait in waits_on(self):
            # One that is open though all were decided was listed just now, and is not queued: nothing is lost by it.
            outcome = wait.outcome or self.outcome_of(wait.generation)
            wait.outcome = outcome or are_decided or self.loss_of(wait.generation)
        release(self)
        return self.drop_all_markers(True)

    cdef bint drop_all_markers(self, bint all) except -1:
        cdef bint are_gone
        self.enter_state()
        with nogil:
            are_gone = self.drop_markers(all)
        self.state.give()
        return are_gone

    cdef bint says(self, int64_t generation) except -1:
        """As `says_complete`: the driver is asked without the GIL, of which it may need another's call."""
        cdef bint says
        with nogil:
            says = self.says_complete(generation)
        return says

    def free_streams(self):
        """If the coordinator is lost and streams of this process wait, release the timeline's word as it does at a break.

        The board is void, so nobody reads more from the word than that. Only a kernel's word that the coordinator has
        ended, or its own, counts: one that is silent may release it with a watermark yet. A dead process's late write
        may lower the word, so this is repeated.
        """
        if self.engine.has_ring or self.load(COMPLETED) == INT64_MAX:
            return
        if self.guard.coordinator_is_alive():
            return
        if any([wait.stream and wait.known_outcome() is not True for wait in waits_on(self)]):
            ipcsync_store(self.place + COMPLETED, INT64_MAX)

    def is_drained(self):
        """Whether this use is a recorder's and all its records are complete; other work may still be queued."""
        cdef uint64_t state = self.load(STATE)
        if not self.is_recorder or self.is_unused or state not in (OPEN, CLOSED):
            return False
        if not self.guard.coordinator_is_alive() or not self.calls.take():  # then the driver must not be asked
            return False
        ipcsync_turns(1)
        try:
            return self.renew_markers() and self.is_drained_now()
        finally:
            ipcsync_turns(-1)
            self.calls.give()

    cdef bint is_drained_now(self) except -1:
        """Whether all that was recorded here is complete. With the turn."""
        cdef uint64_t state = self.load(STATE)
        self.open_pending()
        if self.engine.has_ring and self._begun != self._recorded and not self.says(self._begun):
            return False
        if not self.is_recorder or state not in (OPEN, CLOSED):  # a timeline's apart from what the markers show
            return not self.engine.has_ring or self._completed == self._recorded or self.says(self._recorded)
        if not self.publish():
            return False
        if self.chain.first <= self._recorded:  # what is left of a record that was refused is never settled
            return False
        return self.load(COMPLETED) >= self.base + self._recorded

    # --- the markers, for the waits -----------------------------------------------------------------------------------

    def has_passed(self, uint64_t stream):
        """Whether the stream with that id is past all that this use queued there; asks the driver.

        False also while another thread has the lock. Raises Reentered within a call of this thread that has it.
        """
        cdef Marker *marker
        cdef bint has = True
        cdef bint needs_marker = False
        if self.is_unused:
            return True
        if self.state.mine():
            self.raise_reentered()
        if not self.state.take():
            return False
        marker = self.marker(stream)
        if marker != NULL:
            with nogil:
                has = is_past(marker)
            needs_marker = not has and marker.handle != NULL
        self.state.give()
        if needs_marker and self.calls.take():  # else nobody would learn of it before the next record
            self.renew_markers()
            self.calls.give()
        return has

    def ordinal_of(self, uint64_t stream):
        """The device of the stream with that id; -1 if nothing that this use queued there is pending."""
        cdef Marker *marker
        cdef int ordinal = -1
        if not self.state.mine() and self.enter_state():
            marker = self.marker(stream)
            ordinal = -1 if marker == NULL else marker.ordinal
            self.state.give()
        return ordinal

    def give_unpassed(self, streams):
        """Of these streams, those that are not past all waits for this slot: the markers behind these, and the devices.

        The caller destroys the markers. With the turn.
        """
        cdef Marker *marker
        cdef bint has_passed
        given = {}
        self.enter_state()
        try:
            for stream in streams:
                marker = self.marker(stream)
                with nogil:
                    has_passed = marker == NULL or is_past(marker)
                if not has_passed:
                    given[stream] = <uintptr_t>marker.event, marker.ordinal
                    self.marker_count -= 1
                    marker[0] = self.markers[self.marker_count]
        finally:
            self.state.give()
        return given
