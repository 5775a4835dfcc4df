# One use of a slot: what it has, and what Python calls. The functions of the parts behind this one do the rest.

from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

cdef class Core(Line):
    """One attachment's use of one slot. Thread-safe: `calls` is held across a driver's call that queues work, `state`
    never across one that may block.

    A generation counts as complete here only in these cases: this process saw it complete before; the board's
    `completed` reached it while the slot was not broken; the driver called it complete, and the recorder and the
    coordinator were found alive *afterwards*; the slot is broken, and the watermark that the coordinator took at the
    break covers it. What the records depend on must be good too.

    The methods that it does not have are in Python (`engine`): what is opened once, errors and their texts.
    """

    cdef public object name, node, kind, origin, line, guard
    cdef public int slot, ordinal, depth
    cdef public uint64_t incarnation
    cdef public bint is_recorder, is_closed, is_traced
    cdef bint has_ring  # of CUDA events, else a timeline's word
    cdef bint depends_on_all
    cdef public Chain chain
    cdef public bint is_unused  # nothing of it is in use any more: its imports are being destroyed
    cdef public bint has_drained  # a recorder's: all its records were found complete; other work may still be queued
    cdef public bint is_released

    cdef Lock calls, state
    cdef SessionCheck session
    cdef uint64_t own  # the line of this session
    cdef uint8_t *hazards
    cdef patience patience
    cdef uint64_t peer  # the recorder that Python has seen
    cdef int64_t nobody_since

    cdef readonly int64_t known_complete  # the highest generation that this process knows to be complete
    cdef public int64_t _lost_from, _begun, _completed
    cdef public int64_t _recorded  # the last generation that this session recorded, published or about to be; 0: none
    cdef public int64_t _room  # up to this generation a record has nothing to wait for
    cdef int sleepers  # threads that open an import of this use, or ask or wait for one in the driver
    cdef dict watched  # since when, by `awake`, records have waited for each hazard
    cdef int64_t awake, looked  # for how long some record has, in ns, of any thread; the last look

    cdef readonly uint64_t last_stream  # that was recorded on, or that a record was begun on
    cdef Handle *ring
    cdef Marker *markers
    cdef readonly int marker_count
    cdef public uint64_t _address  # of the timeline's word, for the process's devices
    cdef public unsigned int _flags  # of the waits for it
    cdef public uintptr_t _home  # the context that the ring's CUDA events are opened in; 0: none is yet

    def __init__(self, board, guard, attachment, int ordinal):
        origin = attachment.origin or Origin(board.epoch, attachment.slot, attachment.incarnation, "")
        self.line = board.slot(attachment.slot)
        Line.__init__(self, board, self.line, attachment.base)
        self.guard, self.ordinal = guard, ordinal
        self.name, self.kind = attachment.name, attachment.engine
        self.has_ring = self.kind == "event"
        self.slot, self.incarnation = attachment.slot, attachment.incarnation
        self.depth, self.is_recorder = attachment.depth, attachment.recorder
        self.node, self.origin = origin.node, (origin.epoch, origin.slot, origin.incarnation)
        self.hazards = <uint8_t *><uintptr_t>self.line.hazards_address
        self.session, self.own, self.depends_on_all = guard.session_check, guard.line_index, guard.depends_on_all
        self.calls, self.state, self.chain, self.watched = Lock(), Lock(), Chain(), {}
        self._lost_from, self._flags = FOREVER, WAIT_GEQ
        if self.is_recorder:  # an earlier use of the same event included
            self._recorded = self._begun = max(last_of(self), 0)
        self._completed = min(max(<int64_t>(ipcsync_load(self.place + COMPLETED) - self.base), 0), self._recorded)
        self._room = 0 if self.has_ring else FOREVER
        self.ring = <Handle *>calloc(max(self.depth, 1), sizeof(Handle))
        if self.ring == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.ring)
        free(self.markers)

    @property
    def generation(self):
        """The last generation recorded, by whichever session."""
        return max(last_of(self), 0)

    @property
    def completed(self):
        """Everything up to this generation is complete."""
        self.publish_completed()
        return max(known_of(self), counted(self))

    @property
    def oldest_in_the_way(self):
        """The generation that has to be complete before there is room for a further record; 0 if none has to be."""
        oldest = self._recorded + 1 - self.depth
        return oldest if self._recorded >= self._room and oldest > self._completed else 0

    def continue_from(self, Core earlier):
        """Share the chain of an earlier use here, and the lock that it is changed with; before anybody has this one."""
        self.chain, self.state = earlier.chain, earlier.state

    def check(self):
        check_use(self)

    def check_liveness(self, int64_t generation):
        """Check this session, the coordinator and the recorder; called in every slice of a wait."""
        self.guard.check_liveness()
        check_use(self)
        check_recorder(self, generation)

    def outcome_of(self, int64_t generation):
        return find_outcome(self, generation)

    def open_first(self, int64_t generation=1):
        """Open the first handle, or register the word's page, to test that this works here. Raises DriverError."""
        open_import(self, generation)

    def query(self, int64_t generation, bint may_block=True):
        """Whether `generation` is complete. Unless it `may_block`, False where its import is to be opened and another
        thread opens one, in a driver's call that may take long."""
        return ask(self, generation, may_block)

    def accepts(self, int64_t generation):
        """Whether a waiter would accept `generation` now, which was waited for, so its import is there. Asks the driver,
        raises nothing. False also while another thread has the lock, and for own events, which the process resolves."""
        cdef bint is_accepted = False
        if self.is_recorder or last_of(self) < generation or not self.state.take():
            return False
        try:
            with nogil:
                is_accepted = (
                    not self.is_unused
                    and (says_complete(self, generation) if self.has_ring else is_on_board(self, generation))
                    and is_clear(self, generation)
                    and recorder_lives(self)
                    and not is_broken(self)
                    and not is_orphaned(self)
                )
        except IpcSyncError:
            pass  # calls of this event raise it
        finally:
            self.state.give()
        if is_accepted:
            note(self, generation)
        return is_accepted

    def await_recorded(self, int64_t generation, int64_t deadline_ns, timeout, check=None):
        """Block until `generation` is recorded; else WaitTimeout, or an error of `check_liveness` or `check`."""
        cdef int64_t until
        while True:
            until = deadline_ns if check is None else min(deadline_ns, ipcsync_now() + LONGEST_NS)
            with nogil:
                is_recorded = sleep_until_recorded(self, generation, until)
            if check is not None:
                check()
            if is_recorded:
                return
            if until >= deadline_ns:
                self.raise_timeout(generation, timeout, "recorded")

    def await_complete(self, int64_t generation, timeout, int64_t began=0, int64_t since=0):
        """As `synchronize`, and for the client's own threads, of which a trace does not show it. One that has waited
        for it, once it was recorded, since `since` in ns looks as seldom as after so long."""
        cdef int64_t deadline = deadline_of(timeout, began)
        check_use(self)
        if is_complete(self, generation):
            return
        with nogil:
            found = sleep_until_complete(self, generation, deadline, since)
        if found != 1:
            self.raise_timeout(generation, timeout, "recorded" if found == 2 else "complete")

    def synchronize(self, int64_t generation, timeout=None, int64_t began=0):
        """Block until `generation` is complete, at most `timeout` seconds from now, or from `began` in ns."""
        self.await_complete(generation, timeout, began)

    def publish_completed(self):
        """Publish what is complete (recorder). Does nothing while another thread does."""
        if self.is_recorder:
            publish(self)

    def queue(self, handle, int ordinal, int64_t generation, timeout, bint ahead, int64_t began, str what="wait"):
        """Have the CUstream `handle` of device `ordinal` wait for `generation`; the stream's id, or 0: it was complete.
        `timeout` counts from `began` in ns; the context of a default stream is current."""
        cdef Handle stream = <Handle><uintptr_t>int(handle)
        check_usable(self, stream, what)
        return queue_wait(self, stream, ordinal, generation, deadline_of(timeout, began), timeout, ahead)

    def record_next(self, handle, int64_t deadline_ns, timeout, further):
        """Record the next generation on the CUstream `handle`, of the event's device and with its context if it is a
        default one; its number. `further`: more waits that it depends on, or None."""
        return record_on(self, <Handle><uintptr_t>int(handle), True, deadline_ns, timeout, further)

    def await_calls(self, double seconds):
        """Wait until no other thread is in a record's or a wait's driver call; whether none is, within `seconds`."""
        if self.calls.mine():
            return True
        if not self.calls.await_turn(ipcsync_now() + <int64_t>(seconds * 1e9)):
            return False
        self.calls.give()
        return True

    def close(self):
        """End this use: later calls raise EventClosed, and those that wait now do within 50 ms. A record that is under
        way is published when this returns, unless the driver keeps it for longer. Wait by `await_calls` before, with no
        lock held that the heartbeat's thread needs."""
        cdef bint has_turn = False
        try:
            has_turn = not self.calls.mine() and self.calls.await_turn(ipcsync_now() + <int64_t>SLICE_NS)
        finally:
            self.is_closed = True
            if has_turn:
                self.calls.give()
            wake(self)

    def try_release(self):
        """Release everything if no thread is inside the driver, no queued wait pending and no record unfinished. A
        thread that waits on the host for a record only reads the board, and checks that this use is open after each
        read, so it does not count. Does not wait for a thread that has the turn."""
        if self.is_released or not self.calls.take():
            return self.is_released
        ipcsync_turns(1)
        try:
            if self.is_unused or end_waits(self):
                enter_state(self)
                self.is_unused = self.sleepers == 0  # from here on none is opened; to destroy them may take several tries
                self.state.give()
                if self.is_unused:
                    close_imports(self)
                    self.is_released = True
        finally:
            ipcsync_turns(-1)
            self.calls.give()
        return self.is_released

    def free_streams(self):
        """If the coordinator is lost and streams of this process wait, release the timeline's word as it does at a
        break. The board is void, so nobody reads more from the word than that. Only a kernel's word that the
        coordinator has ended, or its own, counts: one that is silent may release it with a watermark yet. A dead
        process's late write may lower the word, so this is repeated."""
        if self.has_ring or load(self.place, COMPLETED) == INT64_MAX:
            return
        if self.guard.coordinator_is_alive():
            return
        if any([wait.stream and wait.known_outcome() is not True for wait in waits_on(self)]):
            ipcsync_store(self.place + COMPLETED, INT64_MAX)

    def has_passed(self, uint64_t stream):
        """Whether the stream with that id is past all that this use queued there; asks the driver. False also while
        another thread has the lock for long. Raises Reentered within a call of this thread that has it."""
        cdef bint has = True
        cdef bint needs_marker = False
        if self.is_unused:
            return True
        if self.state.mine():
            self.raise_reentered()
        if not self.state.await_turn(ipcsync_now() + <int64_t>LONGEST_NS):
            return False
        marker = marker_of(self, stream)
        if marker != NULL:
            with nogil:
                has = is_past(marker)
            needs_marker = not has and marker.handle != NULL
        self.state.give()
        if needs_marker and self.calls.take():  # else nobody would learn of it before the next record
            renew_markers(self)
            self.calls.give()
        return has
