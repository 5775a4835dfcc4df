# One use of a slot: its words, what this process knows of it, and what it has in the driver.

from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

cdef enum:
    RECENT = 8
    NOT_READY = 600
    MANY_MARKERS = 16

cdef enum Look:  # the looks that raise nothing; -1 is an exception's
    PENDING = 0
    COMPLETE = 1
    WAS_CLOSED = -2
    WAS_LOST = -3


cdef struct Marker:  # an event of this process on a stream, recorded behind the last work that this use queued there
    uint64_t stream
    Handle event
    Handle handle  # of the stream, if the driver refused the marker or what is before it: then it may not be behind all
    int ordinal


cdef class Slot:
    """One attachment's use of one slot. Thread-safe: `calls` is held across a driver's call that queues work, `state`
    never across one that may block.

    A generation counts as complete here only in these cases: this process saw it complete before; the board's
    `completed` reached it while the slot was not broken; the driver called it complete, and the recorder and the
    coordinator were found alive *afterwards*; the slot is broken, and the watermark that the coordinator took at the
    break covers it. What the records stand behind must be good too.

    The methods that it does not have are in Python: `engine` opens what is opened once, `outcome` has errors and texts.
    """

    cdef public object name, node, kind, origin, board, line, guard
    cdef public int slot, ordinal, depth
    cdef public uint64_t incarnation, base
    cdef public bint is_recorder, is_closed, is_traced
    cdef bint stands_behind_all
    cdef public Behind behind
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

    cdef int64_t complete
    cdef public int64_t _lost_from, _recorded, _begun, _completed
    cdef public int64_t _room  # up to this generation a record has nothing to wait for
    cdef int sleepers  # threads within a question or a wait of the driver for an import of this use
    cdef readonly uint64_t last_stream  # that was recorded on, or that a record was begun on
    cdef uint64_t recent[RECENT]  # streams that were recorded on: they are of its device
    cdef int next_recent
    cdef ipcsync_pair lists[RECENT]  # streams, and their devices; of a blocking one the key of its list, which has it
    cdef int next_list

    cdef Handle *ring
    cdef Marker *markers
    cdef readonly int marker_count
    cdef int marker_room
    cdef public uint64_t _address  # of the timeline's word, for the process's devices
    cdef public unsigned int _flags  # of the waits for it

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
        self.hazards = <uint8_t *><uintptr_t>self.line.visits_address
        self.sessions = Sessions(board)
        check = getattr(guard, "session_check", None)
        self.session = check if isinstance(check, SessionCheck) else None
        self.own = guard.line_index
        self.stands_behind_all = guard.stands_behind_all
        self.fork_mark = <const uint8_t *><uintptr_t>fork_mark.address
        self.calls, self.state = Lock(), Lock()
        self.behind = Behind(board, self.line, self.base)
        self.chain = Chain(self)
        self.patience.look = LOOK_LATEST_NS
        self._lost_from = FOREVER
        self._flags = WAIT_GEQ
        if self.is_recorder:  # an earlier use of the same event included
            self._recorded = self._begun = max(self.last(), 0)
        self._completed = min(max(<int64_t>(ipcsync_load(self.place + COMPLETED) - self.base), 0), self._recorded)
        self.ring = <Handle *>calloc(max(self.depth, 1), sizeof(Handle))
        if self.ring == NULL:
            raise MemoryError
        self._room = 0 if self.engine.has_ring else FOREVER
        self.raise_room()

    def __dealloc__(self):
        free(self.ring)
        free(self.markers)

    # --- words of the board -------------------------------------------------------------------------------------------

    cdef inline uint64_t load(self, Step name, int word) noexcept nogil:
        step(name)
        return ipcsync_load(self.place + word)

    cdef inline int64_t last(self) noexcept nogil:
        """The last generation recorded, by whichever session; below 0 before the use's first word."""
        return <int64_t>(self.load(LOAD_RECORDED, RECORDED) - self.base)

    cdef inline bint is_open(self) noexcept nogil:
        return self.load(LOAD_STATE, STATE) == OPEN

    cdef inline bint is_broken(self) noexcept nogil:
        return self.load(LOAD_STATE, STATE) == BROKEN

    cdef inline bint closed(self) noexcept nogil:
        """Whether this use was closed here.

        Asked *after* words of the board were read, it also proves that they were this use's: the slot is reused only
        once this process has closed and released it.
        """
        step(OWN_CLOSED)
        return self.is_closed

    cdef inline int64_t known(self) noexcept nogil:
        return <int64_t>ipcsync_load(<const uint64_t *>&self.complete)

    cdef inline void note(self, int64_t generation) noexcept nogil:
        """Remember that everything up to `generation` is complete; of two threads, neither undoes the other's."""
        ipcsync_raise_to(&self.complete, generation)

    cdef int64_t board_completed(self) noexcept nogil:
        """Up to where the board says that all is complete."""
        cdef uint64_t count = self.load(LOAD_COMPLETED, COMPLETED)  # before the state, which shows that it was released
        cdef int64_t first, done
        if self.is_broken() or count == INT64_MAX:
            count = self.load(LOAD_WATERMARK, WATERMARK)
        done = <int64_t>(count - self.base)
        if self.engine.has_ring:
            return done
        # The GPU writes the word also if a wait before it was lost, so what it stands behind is looked at.
        first = self.behind.first_unsettled()
        if first == 0 or done < first:
            return done
        if not self.is_broken() and not self.is_clear(done):
            return first - 1
        # An event may break between any two of these looks: then its watermark says what counts, and not its word.
        return <int64_t>(self.load(LOAD_WATERMARK, WATERMARK) - self.base) if self.is_broken() else done

    cdef bint is_clear(self, int64_t generation) noexcept nogil:
        """Whether all is well with what `generation` stands behind; else its recorder is asked to judge."""
        cdef uint64_t recorder
        if not self.behind.stands(generation):
            return True
        recorder = self.load(LOAD_RECORDER, RECORDER)
        if self.behind.is_clear(recorder):
            return True
        self.behind.nudge(recorder)
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
            is_lost = self.behind.is_lost(generation)
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

    # --- room in the ring ---------------------------------------------------------------------------------------------

    cdef bint is_announced(self) noexcept nogil:
        """Whether another process may be about to queue a wait on a CUDA event that is about to be recorded again."""
        cdef const uint64_t *words = <const uint64_t *>self.hazards
        cdef uint64_t word
        step(FENCE)
        ipcsync_fence()  # behind the store of `completed`: who announces later sees that
        if self.load(LOAD_VISITED, VISITED) == 0:
            return False
        step(LOAD_VISITS)
        for word in range((self.sessions.sessions + 7) // 8):
            if ipcsync_has_odd(ipcsync_load(words + word)):
                return True
        return False

    cdef inline void raise_room(self) noexcept nogil:
        """Let records go on behind what is complete, unless somebody may be about to queue a wait for that."""
        if self._room < self._completed + self.depth and (MISTAKE == 16 or not self.is_announced()):
            self._room = self._completed + self.depth

    # --- looks that raise ---------------------------------------------------------------------------------------------

    cdef inline bint is_complete(self, int64_t generation) except -1 nogil:
        """Whether the board, or this process's memory, says that `generation` is complete. Raises for a lost one."""
        cdef int found = self.look(generation)
        if found < 0:
            with gil:
                self._raise_for(found, generation)
        return found == COMPLETE

    def _raise_for(self, int found, int64_t generation):
        """The error of a look."""
        if found == WAS_CLOSED:
            self.raise_closed()
        self.raise_lost(generation)

    cdef inline bint check_open(self) except -1 nogil:
        if self.closed():
            with gil:
                self.raise_closed()
        return True

    cdef bint check_use(self) except -1:
        """Raise if this use is over: by a fork, the session, the coordinator, a close, or a later use of the slot."""
        if self.session is None:
            self.guard.check()
        elif not self.session.is_good():
            self.session.slowly()
        if self.closed():
            self.raise_closed()
        if self.load(LOAD_INCARNATION, INCARNATION) != self.incarnation:
            self.raise_gone()
        return True

    cdef bint is_orphaned(self) except -1 nogil:
        """Whether the coordinator has died or stopped: then a driver may say anything about its CUDA events.

        The kernel marks the header before it tears down a dying process's exports.
        """
        if self.sessions.coordinator_is_good():
            return False
        with gil:
            return not self.guard.coordinator_is_alive()

    cdef bint check_coordinator(self) except -1 nogil:
        """Raise CoordinatorLost if the coordinator is lost; called after a driver's answer about its events."""
        if self.is_orphaned():
            with gil:
                self.guard.check_liveness()
                if self.closed():  # a closed client does not watch its coordinator any more
                    self.raise_closed()
        return True

    cdef bint recorder_lives(self) except -1 nogil:
        """Whether the recorder's process lives; True while there is no recorder."""
        cdef uint64_t serial = self.load(LOAD_RECORDER, RECORDER)
        if serial == 0:
            self.note_nobody()
            return True
        if self.is_recorder:
            return True
        if serial == self.peer and self.sessions.lives(serial):
            return True
        with gil:  # at first too, for the error of a later loss: its line may be another session's by then
            self.peer = serial
            return self.peer_is_alive(serial)

    cdef void note_nobody(self) noexcept nogil:
        """Have Python log, once, that waits of this process have lasted for a while, and nobody is there to record."""
        cdef int64_t now = ipcsync_now()
        if self.nobody_since == 0:
            self.nobody_since = now
        elif now - self.nobody_since > NOBODY_NS:
            self.nobody_since = INT64_MAX
            with gil:
                self.log_nobody()

    cdef bint check_alive(self, int64_t generation) except -1 nogil:
        """Check this session, the coordinator and the recorder; called in every slice of a wait."""
        if self.session is None or not self.session.is_good() or not self.sessions.coordinator_is_good():
            with gil:
                self.guard.check_liveness()
        if self.closed() or self.load(LOAD_INCARNATION, INCARNATION) != self.incarnation:
            with gil:
                self.check_use()
        return self.check_recorder(generation)

    cdef bint check_recorder(self, int64_t generation) except -1 nogil:
        """Raise RecorderLost if the recorder is dead, and `generation` not known complete."""
        cdef bint lives = self.recorder_lives()
        self.check_open()
        if not lives:
            self.check_good(generation)
        return True

    cdef bint check_good(self, int64_t generation) except -1 nogil:
        """Raise RecorderLost unless the board says that `generation` is complete; the recorder is dead."""
        if not self.is_complete(generation):
            with gil:
                self.raise_lost(generation)
        return True

    cdef bint check_finished(self, int64_t generation) except -1 nogil:
        """Raise RecorderLost if `generation` is not complete and never will be: broken, or closed before it."""
        cdef uint64_t state = self.load(LOAD_STATE, STATE)
        self.check_open()
        if state == OPEN:
            self.is_clear(generation)  # asks the recorder: a stuck stream must not hide a loss
            return True
        if not self.is_complete(generation) and (state == BROKEN or generation > self.last()):
            with gil:
                self.raise_lost(generation)
        return True

    # --- imports, the word, markers -----------------------------------------------------------------------------------

    cdef inline Handle event(self, int64_t generation) noexcept nogil:
        return self.ring[(generation - 1) % self.depth]

    cdef inline bint has_import(self, int64_t generation) noexcept nogil:
        return self.engine.has_import(self, generation)

    cdef bint open_import(self, int64_t generation, double patience_s) except -1:
        return self.has_import(generation) or self.engine.open_import(self, generation, patience_s)

    cdef bint enter_calls(self, int64_t deadline) except -1:
        """Take the turn of calls that queue work; False once `deadline` is over. `leave_calls` gives it.

        A call within another one of its thread, which has a turn too, waits half a second at most: two such might wait
        for each other. On the thread that beats, the wait beats.
        """
        cdef int64_t until
        cdef bint is_within = ipcsync_turns(0) > 0
        step(LOCK)
        if not self.calls.take():
            if self.calls.mine():
                self.raise_reentered()
            if is_within:
                deadline = min(deadline, ipcsync_now() + WITHIN_NS)
            while True:
                until = ipcsync_now() + LONGEST_NS
                if self.calls.await_turn(min(until, deadline)):
                    break
                if until >= deadline:
                    if is_within:
                        self.raise_reentered()
                    return False
                self.guard.check_liveness()
        ipcsync_turns(1)
        return True

    cdef inline void leave_calls(self) noexcept:
        step(UNLOCK)
        ipcsync_turns(-1)
        self.calls.give()

    cdef bint enter_state(self) except -1:
        if not self.state.take():
            if self.state.mine():
                self.raise_reentered()
            self.state.await_turn(INT64_MAX)
        return True

    cdef bint try_state(self) noexcept nogil:
        """As `enter_state`, without the GIL, which who has it may need; False if this thread has it, or another for long."""
        return self.state.take() or (not self.state.mine() and self.state.take_within(LONGEST_NS))

    cdef inline Marker *marker(self, uint64_t stream) noexcept nogil:
        """The stream's marker; null if it has none, or if that was found complete."""
        cdef int index
        for index in range(self.marker_count):
            if self.markers[index].stream == stream:
                return &self.markers[index]
        return NULL

    cdef bint make_marker(self, uint64_t stream, int ordinal) except -1:
        """Have a marker for the stream. Called with the turn."""
        cdef Handle event
        cdef Marker *grown
        if self.marker(stream) != NULL:
            return True
        event = <Handle><uintptr_t>int(self.create_event(ordinal))
        try:
            self.enter_state()
        except BaseException:
            cuEventDestroy(event)
            raise
        if self.marker_count >= MANY_MARKERS:
            with nogil:
                self.drop_markers(False)  # a program may make a stream for each piece of work
        if self.marker_count == self.marker_room:
            grown = <Marker *>realloc(self.markers, (self.marker_room + MANY_MARKERS) * sizeof(Marker))
            if grown == NULL:
                self.state.give()
                cuEventDestroy(event)
                raise MemoryError
            self.markers = grown
            self.marker_room += MANY_MARKERS
        self.markers[self.marker_count] = Marker(stream, event, NULL, ordinal)
        self.marker_count += 1
        self.state.give()
        return True

    cdef inline int mark(self, Handle handle, uint64_t stream) noexcept nogil:
        """Record the stream's marker behind the work just queued; the driver's result."""
        cdef Marker *marker = self.marker(stream)
        cdef int result
        step(MARK)
        result = cuEventRecord(marker.event, handle)
        marker.handle = NULL if result == 0 else handle
        return result

    cdef bint settle_doubts(self) noexcept:
        """Record the markers that the driver refused; whether every stream has its marker now. With the turn."""
        cdef int index
        cdef bint is_settled = True
        cdef Handle stream
        with nogil:  # the driver may need the GIL for another's call
            for index in range(self.marker_count):
                stream = self.markers[index].handle
                if stream != NULL:  # up to 2 it may mean another stream on this thread
                    if <uintptr_t>stream <= 2 or self.mark(stream, self.markers[index].stream) != 0:
                        is_settled = False
        return is_settled

    cdef bint drop_markers(self, bint all) noexcept nogil:
        """Destroy those that are complete (`all`: any), unless their streams may have later work; whether none is left."""
        cdef int index = 0
        cdef Marker *marker
        while index < self.marker_count:
            marker = &self.markers[index]
            if all or (marker.handle == NULL and query_relaxed(marker.event) == 0 and not is_in_berth(marker.event)):
                cuEventDestroy(marker.event)
                self.marker_count -= 1
                self.markers[index] = self.markers[self.marker_count]
            else:
                index += 1
        return self.marker_count == 0

    # --- which list a stream's waits are in ---------------------------------------------------------------------------

    cdef bint find_list(self, uint64_t stream, int64_t *key, int *ordinal) noexcept nogil:
        """Whether it is known which list the waits on the stream are in, and of which device it is."""
        cdef int index
        cdef uint64_t found = 0, place = 0
        for index in range(RECENT):
            if ipcsync_get_pair(&self.lists[index], &found, &place) and found == stream and stream != 0:
                key[0] = <int64_t>(stream if <int64_t>place >= 0 else place)
                ordinal[0] = <int>(place if <int64_t>place >= 0 else -1 - <int64_t>place)
                return True
        return False

    cdef int64_t key_of(self, Handle handle, uint64_t stream, int ordinal) except? -1:
        """The key of the list of a stream of device `ordinal`: of the process's blocking streams, which wait for each
        other, one for each device."""
        cdef int64_t key = 0
        cdef unsigned int flags = 0
        cdef int result
        cdef int known = 0
        if self.find_list(stream, &key, &known):
            return key
        with nogil:
            step(GET_FLAGS)
            result = cuStreamGetFlags(handle, &flags)
        if result != 0:
            self.raise_driver(result, "cuStreamGetFlags")
        key = <int64_t>stream if flags & NON_BLOCKING else -1 - ordinal
        self.enter_state()
        self.next_list = (self.next_list + 1) % RECENT
        ipcsync_put_pair(&self.lists[self.next_list], stream, <uint64_t>(ordinal if key >= 0 else key))
        self.state.give()
        return key

    cdef inline bint is_usable(self, Handle handle) noexcept nogil:
        cdef int status = 0
        step(CAPTURING)
        return cuStreamIsCapturing(handle, &status) == 0 and status == 0

    cdef bint check_usable(self, Handle handle, str what) except -1:
        """Raise StreamCapturing if `what` on this stream would go into a graph, or break a capture."""
        if not self.is_usable(handle):
            self.refuse_capturing(<uintptr_t>handle, what)
        return True

    cdef uint64_t id_of(self, Handle handle) except 0:
        cdef unsigned long long stream = 0
        cdef int result
        with nogil:
            step(GET_ID)
            result = cuStreamGetId(handle, &stream)
        if result != 0:
            self.raise_driver(result, "cuStreamGetId")
        return stream

    # --- for Python ---------------------------------------------------------------------------------------------------

    @property
    def known_complete(self):
        """The highest generation that this process knows to be complete."""
        return self.known()

    @property
    def generation(self):
        """The last generation recorded, by whichever session."""
        return max(self.last(), 0)

    @property
    def recorder(self):
        """The serial of the session that records, 0 while there is none."""
        return self.load(LOAD_RECORDER, RECORDER)

    @property
    def recorded_here(self):
        """The last generation that this session recorded, published or about to be; 0 for none."""
        return self._recorded

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

    def open_first(self, int64_t generation=1):
        """Open the first handle, or register the word's page, to test that this works here. Raises DriverError."""
        self.open_import(generation, -1)

    def check(self):
        """Raise if this use is over: by a fork, the session, the coordinator, a close, or a later use of the slot."""
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

    def fate(self, int64_t generation):
        """The fate of `generation`, by the board and this process's memory: True (good), a Loss, or None (open).

        Raises nothing; this use may be closed already, since records that stand behind it ask.
        """
        cdef uint64_t state
        if generation <= self.known() or self.is_on_board(generation):
            return True
        state = self.load(LOAD_STATE, STATE)
        if (
            state == BROKEN
            or (state == CLOSED and generation > max(self.last(), 0))
            or self._lost_from <= generation
            or not self.recorder_lives()
            or self.behind.is_lost(generation)
        ):
            return self.is_on_board(generation) or self.loss_of(generation)
        if self.is_orphaned():  # no later answer about it counts, so it would stay open for ever
            return self.is_on_board(generation) or self.loss_of(generation)._replace(cause="orphaned")
        return None


cdef inline int query_relaxed(Handle event) noexcept nogil:
    """The driver's answer about an event, in relaxed capture mode, since another thread may capture: 0 if complete."""
    cdef int mode = 2
    cdef int result
    if cuThreadExchangeStreamCaptureMode(&mode) != 0:
        return cuEventQuery(event)
    result = cuEventQuery(event)
    cuThreadExchangeStreamCaptureMode(&mode)
    return result
