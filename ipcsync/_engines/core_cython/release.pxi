# The end of a use: it may be released once its markers are complete, its records are complete, no thread is inside the
# driver for it, and there is an outcome on each wait that was queued for it.

cdef bint end_waits(Core self) except -1:
    """Forget what was queued for this slot and destroy the markers; False while any of it is pending."""
    cdef bint are_decided = False
    cdef int sleepers
    if self.state.mine():
        return False
    enter_state(self)
    sleepers = self.sleepers  # with `state`: who found this use open with that held is counted by now
    self.state.give()
    if sleepers:
        return False
    try:
        if self.guard.coordinator_is_alive():
            if not (renew_markers(self) and is_drained_now(self) and drop_all_markers(self, False)):
                return False
        if self.guard.coordinator_is_alive():
            for wait in waits_on(self):  # the streams have passed all of them
                if wait.resolved() is None:
                    ring(self, load(self.place, RECORDER))
                    return False
            are_decided = True
    except (DriverError, CoordinatorLost):
        if self.guard.coordinator_is_alive():
            raise
    renew_markers(self)
    self.free_streams()
    # If the coordinator is lost, the driver must not be asked about its events, and no process waits for this
    # release.
    for wait in waits_on(self):
        # One that is open though all were decided was listed just now, and is not queued: nothing is lost by it.
        outcome = wait.outcome or self.outcome_of(wait.generation)
        wait.outcome = outcome or are_decided or self.loss_of(wait.generation)
    release(self)
    return drop_all_markers(self, True)

cdef bint drop_all_markers(Core self, bint all) except -1:
    cdef bint are_gone
    enter_state(self)
    with nogil:
        are_gone = drop_markers(self, all)
    self.state.give()
    return are_gone

cdef bint says(Core self, int64_t generation) except -1:
    """As `says_complete`: the driver is asked without the GIL, of which it may need another's call."""
    cdef bint says
    with nogil:
        says = says_complete(self, generation)
    return says

cdef bint is_drained_now(Core self) except -1:
    """Whether all that was recorded here is complete. With the turn."""
    cdef uint64_t state = load(self.place, STATE)
    open_pending(self)
    if self.has_ring and self._begun != self._recorded and not says(self, self._begun):
        return False
    if not self.is_recorder or state not in (OPEN, CLOSED):  # a timeline's apart from what the markers show
        return not self.has_ring or self._completed == self._recorded or says(self, self._recorded)
    if not publish(self):
        return False
    if self.chain.first <= self._recorded:  # what is left of a record that was refused is never settled
        return False
    return load(self.place, COMPLETED) >= self.base + self._recorded
