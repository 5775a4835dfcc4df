# The steps of a bracket: what is queued around the launch of a graph, so that its constant operations wait and record
# once each.
#
# A lane belongs to one launch stream L. It has two streams of its own, F that feeds and D that drains, four words, and
# counts its brackets. Bracket r, in the host's order:
#
#     prepare   on L   wait over >= r-1 · wait drained >= r-1 · all taps = 0 · armed = r
#     feed      on F   wait over >= r-1 · (wait for the point · gate = 1) for each · fed = r
#     the launch, on L: none, one, several, any graph; a graph holds only `wait gate >= 1` and `tap = 1`
#     end       on L   all taps = 1 · wait fed >= r · all gates = 0 · over = r
#     drain     on D   wait armed >= r · (wait tap >= 1 · record) for each · drained = r
#
# tests/models/graph_model.py is its model, and tests/graphs/test_order.py compares the two. Nobody needs to know what a
# call of the driver that was refused has done: each step may be repeated, but for a feed, whose place `fed = r` alone
# takes, and an end, which is repeated under the next number.

cdef enum:  # CUstreamBatchMemOpType
    WRITE_32 = 2
    WAIT_32 = 1
    WAIT_64 = 4
    WRITE_64 = 5

cdef enum:
    MOST_OPERATIONS = 255  # of one call
    DEFAULT_STREAMS = 2  # up to this handle: they belong to the current context

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


cdef class Steps:
    """A lane's streams and words, and the operations on them. A step raises nothing, and gives the driver's error."""

    cdef Handle launch, feeding, draining, context
    cdef Word over, drained, armed, fed
    cdef Stage stage  # of the open bracket: what is done or under way
    cdef int64_t number  # of the newest bracket
    cdef int64_t prepared  # the number under which the open one was prepared, and is fed
    cdef Operation *operations
    cdef int count, room

    cdef inline int64_t now_over(self) noexcept nogil:
        return <int64_t>ipcsync_load(<const uint64_t *>self.over.host)

    cdef inline int64_t now_drained(self) noexcept nogil:
        return <int64_t>ipcsync_load(<const uint64_t *>self.drained.host)

    cdef bint make_room(self, Bracket bracket) except -1:
        cdef int most = bracket.most()
        cdef Operation *grown
        if most > self.room:
            grown = <Operation *>realloc(self.operations, most * sizeof(Operation))
            if grown == NULL:
                raise MemoryError
            self.operations, self.room = grown, most
        return True

    cdef inline void put(self, uint64_t kind, uint64_t address, uint64_t value) noexcept nogil:
        cdef Operation *operation = self.operations + self.count
        operation.kind, operation.address, operation.value, operation.flags = kind, address, value, 0
        self.count += 1

    cdef inline void put_wait(self, const Use *use, int64_t generation) noexcept nogil:
        """Wait for a point of a timeline."""
        self.put(WAIT_64, use.address, use.base + <uint64_t>generation)
        self.operations[self.count - 1].flags = use.flags

    cdef inline void put_all(self, const Item *items, int count, uint64_t value) noexcept nogil:
        """Write all of these words."""
        cdef int index = 0
        while index < count:
            if items[index].address % 8 == 0 and index + 1 < count and items[index + 1].address == items[index].address + 4:
                self.put(WRITE_64, items[index].address, value << 32 | value)
                index += 2
            else:
                self.put(WRITE_32, items[index].address, value)
                index += 1

    cdef int give(self, Handle stream) noexcept nogil:
        """Have a stream do what was put, by as few calls as possible; the driver's error. Between two calls anything may
        happen: there is no promise that they are taken in as a whole."""
        cdef int at = 0, result = 0
        while at < self.count and result == 0:
            step(BATCH)
            result = cuStreamBatchMemOp(stream, min(<int>MOST_OPERATIONS, self.count - at), self.operations + at, 0)
            at += MOST_OPERATIONS
        self.count = 0
        return result

    cdef int give_launch(self) noexcept nogil:
        """On L; the legacy stream is that of its context."""
        cdef Handle before = NULL
        cdef int result
        if <uintptr_t>self.launch > DEFAULT_STREAMS:
            return self.give(self.launch)
        cuCtxGetCurrent(&before)
        cuCtxSetCurrent(self.context)
        result = self.give(self.launch)
        cuCtxSetCurrent(before)
        return result

    cdef inline void await_others(self, Bracket bracket) noexcept nogil:
        cdef Other *other
        cdef int index
        for index in range(bracket.other_count):
            other = &bracket.others[index]
            self.put(WAIT_64, (<Steps>other.lane).over.address, other.number)
            self.put(WAIT_64, (<Steps>other.lane).drained.address, other.number)

    cdef int prepare(self, Bracket bracket) noexcept nogil:
        self.stage = PREPARING
        self.await_others(bracket)
        self.put(WAIT_64, self.over.address, self.prepared - 1)
        self.put(WAIT_64, self.drained.address, self.prepared - 1)
        self.put_all(bracket.items + bracket.gates, bracket.taps, 0)
        self.put(WRITE_64, self.armed.address, self.prepared)
        return self.give_launch()

    cdef int feed(self, Bracket bracket) noexcept nogil:
        cdef int index, first = 0
        cdef Item *gate
        self.stage = FEEDING
        self.await_others(bracket)
        self.put(WAIT_64, self.over.address, self.prepared - 1)
        for index in range(bracket.gates):
            gate = &bracket.items[index]
            if is_due(gate) and gate.generation > gate.use.fed:
                self.put_all(bracket.items + first, index - first, 1)  # those that wait for no more than is waited for
                self.put_wait(gate.use, gate.generation)
                gate.use.fed, first = gate.generation, index
        self.put_all(bracket.items + first, bracket.gates - first, 1)
        self.put(WRITE_64, self.fed.address, self.prepared)
        return self.give(self.feeding)

    cdef int end(self, Bracket bracket) noexcept nogil:
        self.stage = ENDING
        self.put_all(bracket.items + bracket.gates, bracket.taps, 1)
        self.put(WAIT_64, self.fed.address, self.prepared)
        self.put_all(bracket.items, bracket.gates, 0)
        self.put(WRITE_64, self.over.address, self.number)
        return self.give_launch()

    cdef int drain(self, Bracket bracket, bint records) noexcept nogil:
        """Wait for the taps; with `records`, make behind them those that have generations."""
        cdef int index
        cdef Item *tap
        cdef Use *use
        self.stage = DRAINING
        self.put(WAIT_64, self.armed.address, self.prepared)
        for index in range(bracket.fed, bracket.fed + bracket.recorded):
            use = &bracket.uses[index]
            if records and use.follows:
                self.put_wait(use, use.follows)
        for index in range(bracket.gates, bracket.gates + bracket.taps):
            tap = &bracket.items[index]
            self.put(WAIT_32, tap.address, 1)
            if records and tap.generation:
                self.put(WRITE_64, tap.use.address, tap.use.base + <uint64_t>tap.generation)
        self.put(WRITE_64, self.drained.address, self.number)
        return self.give(self.draining)


cdef int mark_all(Use *uses, int count, Handle stream, uint64_t id) noexcept nogil:
    """Record these events' markers behind what a stream was given, refused or not: it may have some of it."""
    cdef int index, marked, result = 0
    for index in range(count):
        if uses[index].is_in:
            marked = (<Core>uses[index].core).mark(stream, id)
            result = result or marked
    return result


cdef int raise_refused(int result) except -1:
    raise describe(result, "cuStreamBatchMemOp")
