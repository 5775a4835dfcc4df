# The steps of a bracket, queued around the launch of a graph so that its constant operations wait and record once each.
#
# A lane belongs to one launch stream L. It has two streams of its own, F that feeds and D that drains, four words, and
# counts its brackets. Bracket r, in the host's order:
#
#     prepare   on L   wait drained >= r-1 · all taps = 0 · armed = r
#     feed      on F   wait over >= r-1 · (wait for the point · gate = 1) for each · fed = r
#     the launch, on L: none, one, several, any graph; a graph holds only `wait gate >= 1` and `tap = 1`
#     end       on L   all taps = 1 · wait fed >= r · all gates = 0 · over = r
#     drain     on D   wait armed >= r · (wait tap >= 1 · record) for each · drained = r
#                      without records: wait over >= r · drained = r
#
# A bracket with words of another lane's first waits on L and F for that one's `over` and `drained`.
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

cdef inline int64_t now_drained(Lane self) noexcept nogil:
    return <int64_t>ipcsync_load(<const uint64_t *>self.drained_host)

cdef int give_operations(Lane self, Handle stream, const Operation *end) noexcept nogil:
    """Have a stream do the operations before `end`, by as few calls as possible; the driver's error. Between two
    calls anything may happen: there is no promise that they are taken in as a whole."""
    cdef Operation *at = self.operations
    cdef int result = 0
    while at < end and result == 0:
        step(b"cuStreamBatchMemOp")
        result = cuStreamBatchMemOp(stream, min(<int>MOST_OPERATIONS, <int>(end - at)), at, 0)
        at += MOST_OPERATIONS
    return result

cdef int give_launch(Lane self, const Operation *end) noexcept nogil:
    """On L; the legacy stream is that of its context."""
    cdef Handle before = NULL
    if <uintptr_t>self.launch > DEFAULT_STREAMS:
        return give_operations(self, self.launch, end)
    cuCtxGetCurrent(&before)
    cuCtxSetCurrent(self.context)
    result = give_operations(self, self.launch, end)
    cuCtxSetCurrent(before)
    return result

cdef int prepare(Lane self, Bracket bracket) noexcept nogil:
    cdef Operation *at = put_others(self.operations, bracket)
    self.stage = PREPARING
    at = put_one(at, WAIT_64, self.drained, self.prepared - 1)
    at = put_all(at, bracket.items + bracket.gates, bracket.taps, 0)
    at = put_one(at, WRITE_64, self.armed, self.prepared)
    return give_launch(self, at)

cdef int feed(Lane self, Bracket bracket) noexcept nogil:
    cdef Operation *at = put_others(self.operations, bracket)
    cdef int first = 0
    self.stage = FEEDING
    at = put_one(at, WAIT_64, self.over, self.prepared - 1)
    for index in range(bracket.gates):
        gate = &bracket.items[index]
        if gate.use != NULL and gate.generation > gate.use.fed:
            at = put_all(at, bracket.items + first, index - first, 1)  # which wait for no more than is waited for
            at = put_wait(at, gate.use, gate.generation)
            gate.use.fed, first = gate.generation, index
    at = put_all(at, bracket.items + first, bracket.gates - first, 1)
    at = put_one(at, WRITE_64, self.fed, self.prepared)
    return give_operations(self, self.feeding, at)

cdef int end_launch(Lane self, Bracket bracket) noexcept nogil:
    cdef Operation *at = put_all(self.operations, bracket.items + bracket.gates, bracket.taps, 1)
    if self.stage >= ENDING:  # perhaps it is over by now, and once more under its number would spoil the next one
        self.number += 1
    self.stage = ENDING
    at = put_one(at, WAIT_64, self.fed, self.prepared)
    at = put_all(at, bracket.items, bracket.gates, 0)
    at = put_one(at, WRITE_64, self.over, self.number)
    return give_launch(self, at)

cdef int drain(Lane self, Bracket bracket) noexcept nogil:
    """Wait for the taps, and make behind them the records of all events that are in."""
    cdef Operation *at = put_one(self.operations, WAIT_64, self.armed, self.prepared)
    self.stage = DRAINING
    for index in range(bracket.fed, bracket.fed + bracket.recorded):
        use = &bracket.uses[index]
        if use.follows:
            at = put_wait(at, use, use.follows)
    for index in range(bracket.gates, bracket.gates + bracket.taps):
        tap = &bracket.items[index]
        at = put_one(at, WAIT_32, tap.address, 1)
        if tap.use.is_in:
            tap.use.highest += 1
            tap.generation = tap.use.highest
            at = put_one(at, WRITE_64, tap.use.address, tap.use.base + <uint64_t>tap.generation)
    at = put_one(at, WRITE_64, self.drained, self.number)
    return give_operations(self, self.draining, at)

cdef inline Operation *put_one(Operation *at, uint64_t kind, uint64_t address, uint64_t value) noexcept nogil:
    """Have this be the next operation; where the one behind it goes."""
    at.kind, at.address, at.value, at.flags = kind, address, value, 0
    return at + 1

cdef inline Operation *put_wait(Operation *at, const Use *use, int64_t generation) noexcept nogil:
    """Wait for a point of a timeline."""
    cdef Operation *behind = put_one(at, WAIT_64, use.address, use.base + <uint64_t>generation)
    at.flags = use.flags
    return behind

cdef inline Operation *put_all(Operation *at, const Item *items, int count, uint64_t value) noexcept nogil:
    """Write all of these words, two at once where they lie together."""
    cdef const Item *end = items + count
    while items < end:
        if items + 1 < end and items.address % 8 == 0 and (items + 1).address == items.address + 4:
            at = put_one(at, WRITE_64, items.address, value << 32 | value)
            items += 2
        else:
            at = put_one(at, WRITE_32, items.address, value)
            items += 1
    return at

cdef Operation *put_others(Operation *at, Bracket bracket) noexcept nogil:
    """Wait for the brackets of other lanes that had some of its words."""
    for index in range(bracket.other_count):
        other = &bracket.others[index]
        at = put_one(at, WAIT_64, (<Lane>other.lane).over, other.number)
        at = put_one(at, WAIT_64, (<Lane>other.lane).drained, other.number)
    return at

cdef inline int check_taken(int result, str call="cuStreamBatchMemOp") except -1:
    if result:
        raise describe(result, call)

# --- the end of a bracket: D waits for its taps, and records ----------------------------------------------------------

cdef int take_turns(Lane self, Use *uses, int count, uint64_t stream, int64_t deadline, timeout) except -1:
    """Take the turns of the calls on these events, all or none, each with a marker for `stream`."""
    cdef Handle handle = self.feeding if stream == self.feeder_id else self.draining
    cdef int index = 0
    while index < count:
        core = <Core>uses[index].core
        if uses[index].is_in:
            step(b"lock")
            if not core.calls.take():
                give_turns(uses, index)
                index = 0
                deadline = deadline or <int64_t>deadline_of(timeout)  # if 0, from the first that another thread has
                enter_calls(core, deadline, uses[index].highest or core._recorded + 1, timeout, "reached (another thread's call)")
                leave_calls(core)
                continue
            ipcsync_turns(1)
            try:
                make_marker(core, handle, stream, self.ordinal)
            except BaseException:
                give_turns(uses, index + 1)
                raise
        index += 1

cdef void give_turns(Use *uses, int count) noexcept:
    for index in range(count):
        if uses[index].is_in:
            leave_calls(<Core>uses[index].core)

cdef bint take_records(Lane self, Bracket bracket, timeout) except -1:
    """Take the turns for all records; False, and none taken, if an event's last one was refused: each call makes it again first."""
    cdef Use *uses = bracket.uses + bracket.fed
    take_turns(self, uses, bracket.recorded, self.drainer_id, 0, timeout)
    for index in range(bracket.recorded):
        if (<Core>uses[index].core)._begun != (<Core>uses[index].core)._recorded:
            give_turns(uses, bracket.recorded)
            return False
    return True

cdef object record_all(Lane self, Bracket bracket):
    """End, and drain with all records, which are of timelines and have their turns; the first error of an event. What
    may raise comes before the driver's calls, and these are made in one go."""
    cdef Use *uses = bracket.uses + bracket.fed
    cdef object error = None
    try:
        for index in range(bracket.recorded):
            try:
                begin_records(self, &uses[index])
            except IpcSyncError as refusal:
                leave_calls(<Core>uses[index].core)
                uses[index].is_in = False
                error = error or refusal
        for index in range(bracket.recorded):
            if uses[index].is_in:
                core = <Core>uses[index].core
                core.last_stream = self.drainer_id
                core._begun = uses[index].highest + uses[index].count
        with nogil:
            result = end_launch(self, bracket)
            if result == 0:
                result = drain(self, bracket)
            batched = result
            ended = self.finish_steps(bracket) if result else 0
            for index in range(bracket.recorded):  # behind refused ones too: the stream may have some of it
                if uses[index].is_in:
                    marked = mark(<Core>uses[index].core, self.draining, self.drainer_id)
                    result = result or marked
                    if ended != 0:  # D is still to be given what ends the bracket, and is past it by its word alone
                        marker = marker_of(<Core>uses[index].core, self.drainer_id)
                        marker.handle, marker.over, marker.number = <Handle>1, self.drained_host, self.number
        for index in range(bracket.recorded):
            if uses[index].is_in and result == 0:
                core = <Core>uses[index].core
                core._recorded = core._begun
                publish_record(core, core._recorded)
    finally:
        give_turns(uses, bracket.recorded)
    for index in range(0 if result else bracket.recorded):
        core = <Core>uses[index].core
        if uses[index].is_in:
            if is_awaited(core):
                wake(core)
            if not is_open(core):  # its records were made, and do not count
                uses[index].is_in = False
                try:
                    core.raise_no_record()
                except IpcSyncError as refusal:
                    error = error or refusal
    for index in range(bracket.gates, bracket.gates + bracket.taps):
        if result or not bracket.items[index].use.is_in:
            bracket.items[index].generation = 0
    if result != 0 and ended == 0:
        self.forget()
    check_taken(result, "cuStreamBatchMemOp" if batched else "cuEventRecord")
    return error

cdef int begin_records(Lane self, Use *use) except -1:
    """Store what the records will depend on; called with the event's turn."""
    cdef Core core = <Core>use.core
    check_use(core)
    if not is_open(core):
        core.raise_no_record()
    use.highest, use.address, use.base, use.flags = core._recorded, core._address, core.base, core._flags
    if core.chain.is_needed or core.depends_on_all or row_count != 0:
        first = core._recorded + 1  # on all that L waits for:
        depend_on(core, self.key, self.drainer_id, first, core._recorded + use.count, None)
    if must_follow(core, self.drainer_id):  # only now: what was refused waits for nothing of that event
        use.follows = use.highest

cdef object record_each(Lane self, Bracket bracket, replaying):
    """Drain with one record behind each tap, by the calls of events; of an event, none behind one that failed."""
    cdef object error = None
    cdef list waits = latest(self.key)
    at = put_one(self.operations, WAIT_64, self.armed, self.prepared)
    for index in range(bracket.gates, bracket.gates + bracket.taps):
        tap = &bracket.items[index]
        at = put_one(at, WAIT_32, tap.address, 1)
        with nogil:
            result = give_operations(self, self.draining, at)
        at = self.operations
        check_taken(result)
        for other in range(bracket.gates if bracket._is_ahead and tap.use.is_in else 0):
            gate = &bracket.items[other]
            is_due = gate.use != NULL and gate.generation > gate.use.known
            # Unless it came before in each capture that has this one: a graph without it may be launched first.
            if is_due and <object>tap.spot.place not in ((<object>gate.spot.place)._earlier or ()):
                core = <Core>gate.use.core
                add(self.drainer_id, core, gate.generation, self.feeder_id, self.ordinal)
                if core.is_closed:  # a release that is under way may not have seen it: once more behind that
                    if not core.calls.await_turn(deadline_of(replaying._timeout), core.guard):
                        core.raise_timeout(gate.generation, replaying._timeout, "followed (it is being released)")
                    try:
                        add(self.drainer_id, core, gate.generation, self.feeder_id, self.ordinal)
                    finally:
                        core.calls.give()
        # Ahead, a record depends on those points alone that are not surely captured after it, and on what was lost of events
        # that this process has released: the list is read behind `add`, which may come too late for these.
        if bracket._is_ahead:
            waits = bracket.before + [
                each for each in latest(self.key) if each.stream != self.feeder_id or isinstance(each.view, Released)
            ]
        try:
            tap.generation = replaying._record(<object>tap.value, self.drainer, waits) if tap.use.is_in else 0
        except IpcSyncError as refusal:
            tap.use.is_in = False
            error = error or refusal
    at = put_one(at, WRITE_64, self.drained, self.number)
    with nogil:
        result = give_operations(self, self.draining, at)
    check_taken(result)
    return error
