# A lane: the brackets of one launch stream, as they are opened and ended.

cdef enum:
    STREAM_ROOM = 900  # of a stream's queue, which takes in some 1,024 operations
    MOST_IN_FLIGHT = 32

cdef enum Stage:
    IDLE, PREPARING, FEEDING, LAUNCHING, ENDING, DRAINING

cdef struct Operation:  # CUstreamBatchMemOpParams
    uint64_t kind
    uint64_t address
    uint64_t value
    uint64_t flags
    uint64_t alias, unused  # the driver's, whatever they are

cdef struct Word:
    uintptr_t host
    uint64_t address


cdef dict lanes = {}  # of the process, by the ids of their launch streams
lanes_of_process = lanes


@cython.final
cdef class Lane:
    """The brackets of one launch stream, one open at a time; what changes it is called with `lock`. Lives for ever."""

    cdef readonly int ordinal
    cdef readonly uint64_t stream_id, feeder_id, drainer_id
    cdef readonly int64_t key  # of the launch stream's list of waits
    cdef Handle launch, feeding, draining, context
    cdef Word over, drained, armed, fed
    cdef Stage stage  # of the open bracket: what is done or under way
    cdef int64_t number  # of the newest bracket
    cdef int64_t claimed  # the one that the open one's gates and taps have; 0: none is open
    cdef int64_t prepared  # the number under which the open one was prepared, and is fed
    cdef Operation *operations
    cdef int room

    cdef readonly object home, feeder, drainer  # the launch stream's context, and its own streams
    cdef Lock lock
    cdef Bracket bracket  # the open one
    cdef PyObject *owner  # of that; null once it is gone
    cdef readonly object session  # of that
    cdef object stream  # what the launch stream was taken from: it lives as long as a bracket is open

    def __cinit__(self):
        Py_INCREF(<PyObject *>self)

    def __init__(self, int ordinal, home, own, ids, words):
        self.ordinal, self.home = ordinal, home
        self.feeder, self.drainer = feeder, drainer = own
        self.context = <Handle><uintptr_t>int(home)
        self.feeding, self.draining = <Handle><uintptr_t>feeder._pointer, <Handle><uintptr_t>drainer._pointer
        self.feeder_id, self.drainer_id = ids
        (self.over.host, self.over.address), (self.drained.host, self.drained.address), *others = words
        (_, self.armed.address), (_, self.fed.address) = others
        self.lock = Lock()

    def serve(self, launch, uint64_t stream_id, int64_t key):
        """Be the lane of this launch stream, whose list of waits is `key`, if all brackets are over; whether it is."""
        cdef Handle handle = <Handle><uintptr_t>int(launch)
        cdef uint64_t before
        if self.lock.mine() or not self.lock.take():
            return False
        try:
            if not self.is_free or lanes.setdefault(stream_id, self) is not self:
                return False
            before = self.stream_id
            self.launch, self.key, self.stream_id = handle, key, stream_id
            lanes.pop(before, None)
        finally:
            self.lock.give()
        return True

    @property
    def is_free(self):
        """Whether all brackets are over, and nothing lost stands in the way of its own streams."""
        cdef int64_t over = ipcsync_load(<const uint64_t *>self.over.host)
        if self.bracket is not None or self.number != over or self.number != now_drained(self):
            return False
        return not any([wait.known_outcome() is not True for wait in of(self.feeder_id) + of(self.drainer_id)])

    @property
    def words(self):
        """The addresses of its words, by their names."""
        return {"over": self.over.address, "drained": self.drained.address, "armed": self.armed.address,
                "fed": self.fed.address}

    cdef bint open(self, Bracket bracket, int64_t deadline, timeout) except -1:
        """Prepare and feed a bracket that has been claimed."""
        cdef Core core
        cdef Marker *marker
        cdef Operation *grown
        cdef int index, result, most = bracket.most()
        if most > self.room:
            grown = <Operation *>realloc(self.operations, most * sizeof(Operation))
            if grown == NULL:
                raise MemoryError
            self.operations, self.room = grown, most
        if bracket._is_ahead and bracket.taps:
            bracket.before = latest(self.key)
        # The next records of L depend on the pending points, which F waits for. Of an event only on the last: if that is
        # good, all are, and what loses one of them has lost the replay as a whole. The end of no record proves that a
        # lane's own stream waits for nothing more, so none is marked as queued.
        for index in range(bracket.fed):
            if bracket.uses[index].highest:
                add(self.key, <Core>bracket.uses[index].core, bracket.uses[index].highest, self.feeder_id)
        for index in range(bracket.fed):
            core = <Core>bracket.uses[index].core
            if core.has_ring and bracket.uses[index].highest > known_of(core):
                queue_wait(core, self.feeding, self.ordinal, bracket.uses[index].highest, deadline, timeout, False)
        take_turns(self, bracket.uses, bracket.fed, self.feeder_id, deadline, timeout)
        try:
            for index in range(bracket.fed):
                if bracket.uses[index].is_in:
                    check_open(<Core>bracket.uses[index].core)  # while it is open, its word stays
                    marker = marker_of(<Core>bracket.uses[index].core, self.feeder_id)
                    # If somebody asks before L is past this bracket, it is recorded behind all that F has then.
                    marker.handle, marker.over, marker.number = self.feeding, self.over.host, self.number + 1
            self.number += 1
            self.prepared = self.number
            with nogil:
                result = prepare(self, bracket)
                if result == 0:
                    result = feed(self, bracket)
        finally:
            give_turns(bracket.uses, bracket.fed)
        check_taken(result)
        self.stage = LAUNCHING
        for index in range(bracket.fed):
            if bracket.uses[index].is_in:
                check_queued(<Core>bracket.uses[index].core, bracket.uses[index].highest)
        return True

    cdef object close(self, Bracket bracket, bint is_whole, replaying):
        """End and drain the open bracket; what a record raised, once all is queued, or None."""
        cdef int result
        cdef object error = None
        if is_whole and bracket.taps and not bracket.is_slow and take_records(self, bracket):
            error = record_all(self, bracket)
            self.forget()
            return error
        with nogil:
            result = end_launch(self, bracket)
        check_taken(result)
        self.stage = DRAINING
        if is_whole and bracket.taps:
            error = record_each(self, bracket, replaying)
            self.forget()
        else:
            self.finish()
        return error

    cdef bint finish(self) except -1:
        """End the open bracket, whatever a refused call or an exception left of it, without records."""
        cdef Bracket bracket = self.bracket
        cdef int result = 0
        if bracket is None:
            return False
        bracket._is_over = True
        if self.stage != IDLE:
            with nogil:
                result = self.finish_steps(bracket)
        check_taken(result)
        self.forget()
        return True

    cdef int finish_steps(self, Bracket bracket) noexcept nogil:
        cdef Stage stage = self.stage
        cdef Operation *at
        cdef int result = 0
        if stage == PREPARING:
            result = prepare(self, bracket)  # perhaps again
        if result == 0 and stage <= FEEDING:  # this takes the place of a feed, of which F may have a part, or all
            at = put_one(self.operations, WRITE_64, self.fed.address, self.prepared)
            result = give_operations(self, self.feeding, at)
        if result == 0 and stage != DRAINING:
            result = end_launch(self, bracket)
        return result or drain(self, bracket, False)

    cdef void forget(self):
        """The open bracket is over for the host."""
        cdef Bracket bracket = self.bracket
        cdef int index
        if self.stage == IDLE:
            bracket.unclaim(bracket.gates + bracket.taps)
        elif self.number != self.claimed:
            for index in range(bracket.gates + bracket.taps):
                bracket.items[index].spot.number = self.number
        self.stage, self.claimed = IDLE, 0
        self.owner = NULL
        self.session = self.stream = self.bracket = None

    def end_from_outside(self, of_whom):
        """End the open bracket without records if it is of this session, or of this replay; within a second, if at all."""
        if self.lock.mine() or not self.lock.take_within(PATIENCE_NS):
            return
        try:
            if self.session is of_whom or self.owner == <PyObject *>of_whom:
                self.finish()
        finally:
            self.lock.give()
