# One use of a slot: its words, and what this process knows of it.

cdef enum Look:  # the looks that raise nothing; -1 is an exception's
    PENDING = 0
    COMPLETE = 1
    WAS_CLOSED = -2
    WAS_LOST = -3


cdef class Slot:
    """One attachment's use of one slot. Thread-safe: `calls` is held across a driver's call that queues work, `state`
    never across one that may block.

    A generation counts as complete here only in these cases: this process saw it complete before; the board's
    `completed` reached it while the slot was not broken; the driver called it complete, and the recorder and the
    coordinator were found alive *afterwards*; the slot is broken, and the watermark that the coordinator took at the
    break covers it. What the records depend on must be good too.

    The methods that it does not have are in Python (`engine`): what is opened once, errors and their texts.
    """

    cdef public object name, node, kind, origin, board, line, guard
    cdef public int slot, ordinal, depth
    cdef public uint64_t incarnation, base
    cdef public bint is_recorder, is_closed, is_traced
    cdef bint depends_on_all
    cdef public Dependencies dependencies
    cdef public Chain chain
    cdef public object earlier  # the use whose chain that is, if not this one's
    cdef public bint is_unused  # nothing of it is in use any more: its imports are being destroyed
    cdef public bint is_released

    cdef EventEngine engine
    cdef Lock calls, state
    cdef Sessions sessions
    cdef SessionCheck session
    cdef const uint8_t *fork_mark
    cdef uint64_t own  # the line of this session
    cdef uint64_t *place  # of the slot's line
    cdef uint8_t *hazards
    cdef patience patience
    cdef uint64_t peer  # the recorder that Python has seen
    cdef int64_t nobody_since

    cdef readonly int64_t known_complete  # the highest generation that this process knows to be complete
    cdef public int64_t _lost_from, _begun, _completed
    cdef public int64_t _recorded  # the last generation that this session recorded, published or about to be; 0: none
    cdef public int64_t _room  # up to this generation a record has nothing to wait for
    cdef int sleepers  # threads within a question or a wait of the driver for an import of this use

    def __init__(self, board, guard, attachment, int ordinal, fork_mark):
        origin = attachment.origin
        self.name, self.kind = attachment.name, attachment.engine
        self.engine = ENGINES[self.kind]
        self.slot, self.incarnation, self.base = attachment.slot, attachment.incarnation, attachment.base
        self.depth, self.is_recorder = attachment.depth, attachment.recorder
        self.node = "" if origin is None else origin.node
        self.origin = (
            (board.epoch, self.slot, attachment.incarnation)
            if origin is None
            else (origin.epoch, origin.slot, origin.incarnation)
        )
        self.board, self.guard, self.ordinal = board, guard, ordinal
        self.line = board.slot(attachment.slot)
        self.place = <uint64_t *><uintptr_t>self.line.address
        self.hazards = <uint8_t *><uintptr_t>self.line.hazards_address
        check = getattr(guard, "session_check", None)
        self.session = check if isinstance(check, SessionCheck) else None
        self.own = guard.line_index
        self.depends_on_all = guard.depends_on_all
        self.fork_mark = <const uint8_t *><uintptr_t>fork_mark.address
        self.calls, self.state = Lock(), Lock()
        self.dependencies = Dependencies(board, self.line, self.base)
        self.sessions = self.dependencies.sessions
        self.chain = Chain(self)
        self._lost_from = FOREVER
        if self.is_recorder:  # an earlier use of the same event included
            self._recorded = self._begun = max(self.last(), 0)
        self._completed = min(max(<int64_t>(ipcsync_load(self.place + COMPLETED) - self.base), 0), self._recorded)
        self._room = 0 if self.engine.has_ring else FOREVER

    # --- words of the board -------------------------------------------------------------------------------------------

    cdef inline uint64_t load(self, int word) noexcept nogil:
        return load(self.place, word)

    cdef inline int64_t last(self) noexcept nogil:
        """The last generation recorded, by whichever session; below 0 before the use's first word."""
        return <int64_t>(self.load(RECORDED) - self.base)

    cdef inline bint is_open(self) noexcept nogil:
        return self.load(STATE) == OPEN

    cdef inline bint is_broken(self) noexcept nogil:
        return self.load(STATE) == BROKEN

    cdef inline bint closed(self) noexcept nogil:
        """Whether this use was closed here.

        Asked *after* words of the board were read, it also proves that they were this use's: the slot is reused only
        once this process has closed and released it.
        """
        step(b"own is_closed")
        return self.is_closed

    cdef inline int64_t known(self) noexcept nogil:
        return <int64_t>ipcsync_load(<const uint64_t *>&self.known_complete)

    cdef inline void note(self, int64_t generation) noexcept nogil:
        """Remember that everything up to `generation` is complete; of two threads, neither undoes the other's."""
        ipcsync_raise_to(&self.known_complete, generation)

    cdef int64_t board_completed(self) noexcept nogil:
        """Up to where the board says that all is complete."""
        cdef uint64_t count = self.load(COMPLETED)  # before the state, which shows that it was released
        cdef int64_t first, done
        if self.is_broken() or count == INT64_MAX:
            count = self.load(WATERMARK)
        done = <int64_t>(count - self.base)
        if self.engine.has_ring:
            return done
        # The GPU writes the word also if a wait before it was lost, so what it depends on is looked at.
        first = self.dependencies.first_unsettled()
        if first == 0 or done < first:
            return done
        if not self.is_broken() and not self.is_clear(done):
            return first - 1
        # An event may break between any two of these looks: then its watermark says what counts, and not its word.
        return <int64_t>(self.load(WATERMARK) - self.base) if self.is_broken() else done

    cdef bint is_clear(self, int64_t generation) noexcept nogil:
        """Whether all is well with what `generation` depends on; else its recorder is asked to resolve."""
        cdef uint64_t recorder
        if not self.dependencies.depends(generation):
            return True
        recorder = self.load(RECORDER)
        if self.dependencies.is_clear(recorder):
            return True
        self.dependencies.ring(recorder)
        return False

    cdef int look(self, int64_t generation) noexcept nogil:
        """By the board and this process's memory: COMPLETE, PENDING, or why that is not known any more."""
        cdef int64_t done
        cdef bint is_lost
        if generation <= self.known():
            return COMPLETE
        if generation >= self._lost_from:
            return WAS_LOST
        done = self.board_completed()
        if done < generation:
            is_lost = self.dependencies.is_lost(generation)
            if self.closed():
                return WAS_CLOSED
            return WAS_LOST if is_lost else PENDING
        # A recorder that died between its driver's call and the store has published nothing, complete or not.
        done = min(done, self.last(), self._lost_from - 1)
        if self.closed():
            return WAS_CLOSED
        if generation > done:
            return PENDING
        self.note(done)
        return COMPLETE

    cdef inline bint is_on_board(self, int64_t generation) noexcept nogil:
        cdef int64_t done = self.board_completed()  # before what is recorded: C's order of arguments is anybody's
        return generation <= min(done, self.last(), self._lost_from - 1)

    # --- looks that raise ---------------------------------------------------------------------------------------------

    cdef inline bint is_complete(self, int64_t generation) except -1 nogil:
        """Whether the board, or this process's memory, says that `generation` is complete. Raises for a lost one."""
        cdef int found = self.look(generation)
        if found < 0:
            with gil:
                if found == WAS_CLOSED:
                    self.raise_closed()
                self.raise_lost(generation)
        return found == COMPLETE

    cdef inline bint check_open(self) except -1 nogil:
        if self.closed():
            with gil:
                self.raise_closed()
        return True

    cdef int check_use(self) except -1:
        """Raise if this use is over: by a fork, the session, the coordinator, a close, or a later use of the slot."""
        if self.session is None:
            self.guard.check()
        elif not self.session.is_good():
            self.session.slowly()
        if self.closed() or self.load(INCARNATION) != self.incarnation:
            self.raise_closed()

    cdef bint is_orphaned(self) except -1 nogil:
        """Whether the coordinator has died or stopped: then a driver may say anything about its CUDA events.

        The kernel marks the header before it tears down a dying process's exports.
        """
        if self.sessions.coordinator_is_good():
            return False
        with gil:
            return not self.guard.coordinator_is_alive()

    cdef int check_coordinator(self) except -1 nogil:
        """Raise CoordinatorLost if the coordinator is lost; called after a driver's answer about its events."""
        if self.is_orphaned():
            with gil:
                self.guard.check_liveness()
                if self.closed():  # a closed client does not watch its coordinator any more
                    self.raise_closed()

    cdef bint recorder_lives(self) except -1 nogil:
        """Whether the recorder's process lives; True while there is no recorder."""
        cdef uint64_t serial = self.load(RECORDER)
        cdef int64_t now
        if serial == 0:
            now = ipcsync_now()
            self.nobody_since = self.nobody_since or now
            if now - self.nobody_since > NOBODY_NS:
                self.nobody_since = INT64_MAX
                with gil:
                    self.log_nobody()
        if serial == 0 or self.is_recorder:
            return True
        if serial == self.peer and self.sessions.lives(serial):
            return True
        with gil:  # at first too, for the error of a later loss: its line may be another session's by then
            self.peer = serial
            return self.peer_is_alive(serial)

    cdef int check_alive(self, int64_t generation) except -1 nogil:
        """Check this session, the coordinator and the recorder; called in every slice of a wait."""
        if self.session is None or not self.session.is_good() or not self.sessions.coordinator_is_good():
            with gil:
                self.guard.check_liveness()
        if self.closed() or self.load(INCARNATION) != self.incarnation:
            with gil:
                self.check_use()
        self.check_recorder(generation)

    cdef int check_recorder(self, int64_t generation) except -1 nogil:
        """Raise RecorderLost if the recorder is dead, and `generation` not known complete."""
        cdef bint lives = self.recorder_lives()
        self.check_open()
        if not lives:
            self.check_good(generation)

    cdef bint check_good(self, int64_t generation) except -1 nogil:
        """Raise RecorderLost unless the board says that `generation` is complete; the recorder is dead."""
        if not self.is_complete(generation):
            with gil:
                self.raise_lost(generation)
        return True

    cdef int check_finished(self, int64_t generation) except -1 nogil:
        """Raise RecorderLost if `generation` is not complete and never will be: broken, or closed before it."""
        cdef uint64_t state = self.load(STATE)
        self.check_open()
        if state == OPEN:
            self.is_clear(generation)  # asks the recorder: a stuck stream must not hide a loss
            return 0
        if not self.is_complete(generation) and (state == BROKEN or generation > self.last()):
            with gil:
                self.raise_lost(generation)

    # --- for Python ---------------------------------------------------------------------------------------------------

    @property
    def generation(self):
        """The last generation recorded, by whichever session."""
        return max(self.last(), 0)

    @property
    def recorder(self):
        """The serial of the session that records, 0 while there is none."""
        return self.load(RECORDER)

    @property
    def completed(self):
        """Everything up to this generation is complete."""
        self.publish_completed()
        done = self.board_completed()
        return max(self.known(), min(done, max(self.last(), 0), self._lost_from - 1))

    @property
    def may_be_recorded(self):
        """Whether the driver refused a record that the GPU may have all the same: then it will write that number."""
        return not self.engine.has_ring and self._begun != self._recorded

    @property
    def oldest_in_the_way(self):
        """The generation that has to be complete before there is room for a further record; 0 if none has to be."""
        oldest = self._recorded + 1 - self.depth
        return oldest if self._recorded >= self._room and oldest > self._completed else 0

    def check(self):
        self.check_use()

    def check_liveness(self, int64_t generation):
        """Check this session, the coordinator and the recorder; called in every slice of a wait."""
        self.guard.check_liveness()
        self.check_use()
        self.check_recorder(generation)

    def raise_if_over(self, int64_t generation):
        """Raise the error that would end a wait for `generation`, if any; it is not complete."""
        self.check_liveness(generation)
        self.check_finished(generation)

    def outcome_of(self, int64_t generation):
        return self.find_outcome(generation)

    cdef object find_outcome(self, int64_t generation):
        """The outcome of `generation`, by the board and this process's memory: True (good), a Loss, or None (open).

        Raises nothing; this use may be closed already, since records that depend on it ask.
        """
        cdef uint64_t state
        if generation <= self.known() or self.is_on_board(generation):
            return True
        state = self.load(STATE)
        if (
            state == BROKEN
            or (state == CLOSED and generation > max(self.last(), 0))
            or self._lost_from <= generation
            or not self.recorder_lives()
            or self.dependencies.is_lost(generation)
        ):
            return self.is_on_board(generation) or self.loss_of(generation)
        if self.is_orphaned():  # no later answer about it counts, so it would stay open for ever
            return self.is_on_board(generation) or self.loss_of(generation)._replace(cause="orphaned")
        return None
