# query and synchronize: whether a generation is complete. What the recorder publishes of it.

# --- the driver's answer, and whether it counts -----------------------------------------------------------------------

cdef int is_done(Core self, int64_t generation) except -1 nogil:
    """Whether the driver calls `generation`, which was recorded, complete; 0 too if it cannot be asked now. The import
    is not destroyed meanwhile, and no lock is held: the question may have to wait for another's call."""
    if not self.has_ring:
        return is_on_board(self, generation)
    if not enter_driver(self, generation):
        return 0
    try:
        return says_complete(self, generation)
    finally:
        ipcsync_add(&self.sleepers, -1)

cdef bint enter_driver(Core self, int64_t generation) except -1 nogil:
    """Have the import of a generation stay until `sleepers` is lowered; False if another thread has the lock."""
    if not has_import(self, generation):
        with gil:
            open_import(self, generation)
    if not try_state(self):
        return False
    try:
        check_open(self)
        ipcsync_add(&self.sleepers, 1)  # in this order: a release looks at `sleepers` after the close
    finally:
        self.state.give()
    return True

cdef bint confirm(Core self, int64_t generation) except -1 nogil:
    """After the driver said complete: whether that counts. Recorder and coordinator must live now, after it. What the
    generation depends on must be good too: False while that is unknown."""
    if depends(self, generation):
        if self.is_recorder:
            if is_complete_now(self, generation):
                return True
            ring(self, load(self.place, RECORDER))  # it may have to resolve others first
            return False
        if not is_clear(self, generation):
            return False
    is_good = recorder_lives(self) and not is_broken(self)
    check_open(self)
    check_coordinator(self)
    if not is_good:
        return check_good(self, generation)
    note(self, generation)
    if self.is_recorder and self.has_ring:
        look_at_own(self)
    return True

cdef bint is_complete_now(Core self, int64_t generation) except -1 nogil:
    """`is_complete`; the recorder itself first resolves what its records depend on, if nobody else does now."""
    if self.is_recorder and self.chain.is_needed:
        with gil:
            publish(self)
    return is_complete(self, generation)

# --- query ------------------------------------------------------------------------------------------------------------

cdef bint ask(Core self, int64_t generation, bint may_block=True) except -1:
    cdef bint is_there = False
    check_use(self)
    if generation <= known_of(self) or is_complete_now(self, generation):
        return True
    if last_of(self) >= generation and not is_broken(self) and (may_block or openings == 0 or has_import(self, generation)):
        with nogil:
            is_there = is_done(self, generation) and confirm(self, generation)
    if not is_there:
        check_finished(self, generation)
    return is_there

# --- synchronize ------------------------------------------------------------------------------------------------------

cdef bint sleep_until_recorded(Core self, int64_t generation, int64_t deadline) except -1 nogil:
    """Block until `generation` is recorded; False once `deadline` is over. Each slice ends with the looks of
    `end_slice`, by what the kernel marks. The GIL is seldom asked for: that may take longer than a slice."""
    cdef int64_t last = 0
    while True:
        recorded = load(self.place, RECORDED)
        if <int64_t>(recorded - self.base) >= generation:
            return check_open(self)
        check_finished(self, generation)
        now = ipcsync_now()
        left = deadline - now
        if left <= 0:
            return False
        last = last or now
        is_interrupted = sleep_on(self.place, recorded, min(left, <int64_t>SLICE_NS))
        if load(self.place, RECORDED) == recorded:
            last = end_slice(self, generation, last, is_interrupted)

cdef int64_t end_slice(Core self, int64_t generation, int64_t last, bint is_interrupted) except -1 nogil:
    """Check this session, the coordinator and the recorder; `last` is when Python last had its turn, or has now."""
    if not self.session.is_good() or not coordinator_is_good(self):
        with gil:
            self.guard.check_liveness()
    if was_closed(self) or load(self.place, INCARNATION) != self.incarnation:
        with gil:
            check_use(self)
    check_recorder(self, generation)
    now = ipcsync_now()
    if not is_interrupted and now - last < LONGEST_NS:
        return last
    with gil:
        PyErr_CheckSignals()
        self.guard.check_liveness()  # which also beats, if this is the thread that does
    return now

cdef int sleep_until_complete(Core self, int64_t generation, int64_t deadline, int64_t since) except -1 nogil:
    """Block until `generation` is complete: 1. Once `deadline` is over: 0 if it is recorded by then, else 2."""
    cdef int64_t last = ipcsync_now()
    cdef int64_t began = since if <int64_t>(ipcsync_load(self.place + RECORDED) - self.base) >= generation else 0
    if not sleep_until_recorded(self, generation, deadline):
        return 2
    began = began or ipcsync_now()
    if self.state.mine() and not is_complete(self, generation):  # then the driver could not be asked
        with gil:
            self.raise_reentered()
    while True:
        if is_complete_now(self, generation):
            return 1
        check_finished(self, generation)
        now = ipcsync_now()
        until = min(deadline, now + self.slice_ns)
        found = await_driver(self, generation, began, until)
        if found == 1:
            if confirm(self, generation):
                return 1
            pause(self, deadline)
        now = ipcsync_now()
        last = end_slice(self, generation, last, found < 0)
        if now >= deadline:  # only now: the driver is asked once even with a timeout of 0
            return 0

cdef int await_driver(Core self, int64_t generation, int64_t began, int64_t until) except -2 nogil:
    """Wait until the driver calls `generation` complete: 1; 0 once `until` is over, -1 if a signal came."""
    cdef Handle event = NULL
    if self.has_ring:
        if is_done(self, generation):  # often it is complete already
            return 1
        if not enter_driver(self, generation):
            return 0
        event = event_of(self, generation)
    else:
        if is_complete(self, generation):
            return 1
        count = load(self.place, COMPLETED)
        if <int64_t>(count - self.base) >= generation:
            # Released or broken, which the caller sees; else it depends on something.
            return count != INT64_MAX and not is_broken(self)
    step(b"await work")
    is_there = await_work(
        event, self.place + COMPLETED, self.base + generation, self.place + STATE, began, until, &self.patience
    )
    if event != NULL:
        ipcsync_add(&self.sleepers, -1)
    if not is_there:
        return 0 if ipcsync_now() >= until else -1
    return is_done(self, generation) or is_complete(self, generation)

# --- what the recorder publishes --------------------------------------------------------------------------------------

cdef bint says_complete(Core self, int64_t generation) except -1 nogil:
    """Whether the driver calls a record complete, of the ring."""
    step(b"cuEventQuery")
    if not has_import(self, generation):
        return False
    result = query_relaxed(event_of(self, generation))
    if result != 0 and result != NOT_READY:
        with gil:
            self.raise_driver(result, "cuEventQuery")
    return result == 0

cdef int open_pending(Core self) except -1:
    """Open the imports of this session's records that are not complete: an earlier use may have made them."""
    if self.has_ring and not self.is_unused:
        for generation in range(self._completed + 1, max(self._recorded, self._begun) + 1):
            open_import(self, generation)

cdef int64_t harvest(Core self) except -1 nogil:
    """Up to where this session's records are complete, whatever they depend on; -2: released. With `state`, or the turn."""
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

cdef bint store_completed(Core self, int64_t done) except -1 nogil:
    """Store what is complete, unless the coordinator is lost. With `state`."""
    if not self.has_ring or done <= self._completed or is_orphaned(self):
        return False
    if not is_broken(self) and <int64_t>(ipcsync_load(self.place + COMPLETED) - self.base) < done:  # by another use here
        store(self.place, COMPLETED, self.base + done)
    self._completed = done
    note(self, done)
    return True

cdef bint look_at_own(Core self) except -1 nogil:
    """Publish what is complete of this session's records, if they depend on nothing; False: it cannot be asked now."""
    if not try_state(self):
        return False
    try:
        if self.chain.is_needed:  # asked with `state`: another thread's record may depend on something by now
            return False
        if not was_closed(self):  # else it may be released, and the slot used by another event
            store_completed(self, harvest(self))
            raise_room(self)
    finally:
        self.state.give()
    return True

cdef bint publish(Core self) except -1:
    """Publish what is complete, and resolve what it depends on, unless another call does now."""
    open_pending(self)
    if not self.state.take():
        return False
    try:
        if self.is_unused or not (self.has_ring or self.chain.is_needed):
            return True  # in the first case the slot may be another event's by now
        with nogil:
            done = harvest(self)
        if not self.chain.is_needed:
            store_completed(self, done)
        elif done >= 0 and not is_orphaned(self) and not is_broken(self):  # else its watermark says what counts
            store_completed(self, self.chain.resolve(self, done))
            self.chain.store(self)
    finally:
        self.state.give()
    return True

# --- the end of a use -------------------------------------------------------------------------------------------------
#
# It may be released once its markers are complete, its records are complete, no thread is inside the
# driver for it, and there is an outcome on each wait that was queued for it.

cdef bint end_waits(Core self) except -1:
    """Forget what was queued for this slot and destroy the markers; False while any of it is pending."""
    cdef bint are_decided = False
    if self.state.mine():
        return False
    enter_state(self)
    sleepers = self.sleepers  # with `state`: who found this use open with that held is counted by now
    self.state.give()
    try:
        if self.guard.coordinator_is_alive():
            if not (renew_markers(self) and is_drained_now(self) and drop_markers(self, False)):
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
    if sleepers:
        return False
    renew_markers(self)
    self.free_streams()
    # If the coordinator is lost, the driver must not be asked about its events, and nobody waits for this release.
    for wait in waits_on(self):
        # One that is open though all were decided was listed just now, and is not queued: nothing is lost by it.
        outcome = wait.outcome or self.outcome_of(wait.generation)
        (<Wait>wait).settle(outcome or are_decided or self.loss_of(wait.generation))
    release(self)
    return drop_markers(self, True)

cdef bint is_drained_now(Core self) except -1:
    """Whether all that was recorded here is complete. With the turn."""
    cdef uint64_t state = load(self.place, STATE)
    cdef bint publishes = self.is_recorder and (state == OPEN or state == CLOSED)
    open_pending(self)
    if self.has_ring:
        with nogil:  # the driver may need the GIL for another's call
            if self._begun != self._recorded and not says_complete(self, self._begun):
                return False
            if not publishes and harvest(self) != self._recorded:
                return False
    if not publishes:  # of a timeline's records the markers show it
        return True
    if not publish(self):
        return False
    if self.chain.first <= self._recorded:  # what is left of a record that was refused is never settled
        return False
    self.has_drained = load(self.place, COMPLETED) >= self.base + self._recorded
    return self.has_drained
