# What the words of a slot say, and what this process knows of it.

cdef enum Found:  # by looks and calls that raise nothing; -1 is an exception's
    PENDING = 0
    COMPLETE = 1
    IS_CLOSED = -2
    IS_LOST = -3
    NEEDS = -4  # an import or a marker
    BUSY = -5
    UNUSABLE = -6  # a stream that is captured, or that the driver does not know
    UNKNOWN = -7
    NO_ROOM = -8
    DEPENDS = -9
    REFUSED = -10
    AGAIN = -11
    GO_ON = -12
    ELSEWHERE = -13

# --- words of the board -----------------------------------------------------------------------------------------------

cdef inline int64_t last_of(Core self) noexcept nogil:
    """The last generation recorded, by whichever session; below 0 before the use's first word."""
    return <int64_t>(load(self.place, RECORDED) - self.base)

cdef inline bint is_open(Core self) noexcept nogil:
    return load(self.place, STATE) == OPEN

cdef inline bint is_broken(Core self) noexcept nogil:
    return load(self.place, STATE) == BROKEN

cdef inline bint was_closed(Core self) noexcept nogil:
    """Whether this use was closed here. Asked *after* words of the board were read, it also proves that they were this
    use's: the slot is reused only once this process has closed and released it."""
    step(b"own is_closed")
    return self.is_closed

cdef inline int64_t known_of(Core self) noexcept nogil:
    return <int64_t>ipcsync_load(<const uint64_t *>&self.known_complete)

cdef inline void note(Core self, int64_t generation) noexcept nogil:
    """Remember that everything up to `generation` is complete; of two threads, neither undoes the other's."""
    ipcsync_raise_to(&self.known_complete, generation)

cdef int64_t board_completed(Core self) noexcept nogil:
    """Up to where the board says that all is complete."""
    cdef uint64_t count = load(self.place, COMPLETED)  # before the state, which shows that it was released
    if is_broken(self) or count == INT64_MAX:
        count = load(self.place, WATERMARK)
    done = <int64_t>(count - self.base)
    if self.has_ring:
        return done
    # The GPU writes the word also if a wait before it was lost, so what it depends on is looked at.
    first = first_unsettled(self)
    if first == 0 or done < first:
        return done
    # Behind a lost coordinator the streams go on that wait for sessions which live.
    if not is_broken(self) and not (is_clear(self, done) and is_unchanged(self.header, self.running)):
        return first - 1
    # An event may break between any two of these looks: then its watermark says what counts, and not its word.
    return <int64_t>(load(self.place, WATERMARK) - self.base) if is_broken(self) else done

cdef int look(Core self, int64_t generation) noexcept nogil:
    """By the board and this process's memory: COMPLETE, PENDING, or why that is not known any more."""
    if generation <= known_of(self):
        return COMPLETE
    if generation >= self._lost_from:
        return IS_LOST
    done = board_completed(self)
    if done < generation:
        found = IS_LOST if is_lost(self, generation) else PENDING
        return IS_CLOSED if was_closed(self) else found
    # A recorder that died between its driver's call and the store has published nothing, complete or not.
    done = min(done, last_of(self), self._lost_from - 1)
    if was_closed(self):
        return IS_CLOSED
    if generation > done:
        return PENDING
    note(self, done)
    return COMPLETE

cdef inline int64_t counted(Core self) noexcept nogil:
    """Up to where the board says that all was recorded and is complete."""
    cdef int64_t done = board_completed(self)  # before what is recorded: C's order of arguments is anybody's
    return min(done, last_of(self), self._lost_from - 1)

cdef inline bint is_on_board(Core self, int64_t generation) noexcept nogil:
    return generation <= counted(self)

# --- looks that raise -------------------------------------------------------------------------------------------------

cdef inline bint is_complete(Core self, int64_t generation) except -1 nogil:
    """Whether the board, or this process's memory, says that `generation` is complete. Raises for a lost one."""
    cdef int found = look(self, generation)
    if found < 0:
        with gil:
            if found == IS_CLOSED:
                self.raise_closed()
            self.raise_lost(generation)
    return found == COMPLETE

cdef inline bint check_open(Core self) except -1 nogil:
    if was_closed(self):
        with gil:
            self.raise_closed()
    return True

cdef int check_use(Core self) except -1:
    """Raise if this use is over: by a fork, the session, the coordinator, a close, or a later use of the slot."""
    if not self.session.is_good():
        self.session.slowly()
    if was_closed(self) or load(self.place, INCARNATION) != self.incarnation:
        self.raise_closed()

cdef bint is_orphaned(Core self) except -1 nogil:
    """Whether the coordinator has died or stopped: then a driver may say anything about its CUDA events. The kernel
    marks the header before it tears down a dying process's exports."""
    if coordinator_is_good(self):
        return False
    with gil:
        return not self.guard.coordinator_is_alive()

cdef int check_coordinator(Core self) except -1 nogil:
    """Raise CoordinatorLost if the coordinator is lost; called after a driver's answer about its events."""
    if is_orphaned(self):
        with gil:
            self.guard.check_liveness()
            if was_closed(self):  # a closed client does not watch its coordinator any more
                self.raise_closed()

cdef bint recorder_lives(Core self) except -1 nogil:
    """Whether the recorder's process lives; True while there is no recorder."""
    cdef uint64_t serial = load(self.place, RECORDER)
    if serial == 0:
        now = ipcsync_now()
        self.nobody_since = self.nobody_since or now
        if now - self.nobody_since > NOBODY_NS:
            self.nobody_since = INT64_MAX
            with gil:
                self.log_nobody()
    if serial == 0 or self.is_recorder:
        return True
    if serial == self.peer and lives(self, serial):
        return True
    with gil:  # at first too, for the error of a later loss: its line may be another session's by then
        self.peer = serial
        return self.peer_is_alive(serial)

cdef int check_recorder(Core self, int64_t generation) except -1 nogil:
    """Raise RecorderLost if the recorder is dead, and `generation` not known complete."""
    cdef bint is_alive = recorder_lives(self)
    check_open(self)
    if not is_alive:
        check_good(self, generation)

cdef bint check_good(Core self, int64_t generation) except -1 nogil:
    """Raise RecorderLost unless the board says that `generation` is complete; the recorder is dead."""
    if not is_complete(self, generation):
        with gil:
            self.raise_lost(generation)
    return True

cdef int check_finished(Core self, int64_t generation) except -1 nogil:
    """Raise RecorderLost if `generation` is not complete and never will be: broken, or closed before it."""
    cdef uint64_t state = load(self.place, STATE)
    check_open(self)
    if state == OPEN:
        is_clear(self, generation)  # asks the recorder: a stuck stream must not hide a loss
        return 0
    if not is_complete(self, generation) and (state == BROKEN or generation > last_of(self)):
        with gil:
            self.raise_lost(generation)

cdef object find_outcome(Core self, int64_t generation):
    """The outcome of `generation`, by the board and this process's memory: True (good), a Loss, or None (open). Raises
    nothing; this use may be closed already, since records that depend on it ask."""
    if generation <= known_of(self) or is_on_board(self, generation):
        return True
    state = load(self.place, STATE)
    if (
        state == BROKEN
        or (state == CLOSED and generation > max(last_of(self), 0))
        or self._lost_from <= generation
        or not recorder_lives(self)
        or is_lost(self, generation)
    ):
        return is_on_board(self, generation) or self.loss_of(generation)
    if is_orphaned(self):  # no later answer about it counts, so it would stay open for ever
        return is_on_board(self, generation) or self.loss_of(generation)._replace(cause="orphaned")
    return None
