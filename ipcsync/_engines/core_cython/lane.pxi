# Brackets: what is queued around the launch of a graph, so that its constant operations wait and record once each.
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
# tests/faults/graph_model.py is its model, and tests/graphs/test_order.py compares the two. Nobody needs to know what a
# call of the driver that was refused has done: each step may be repeated, but for a feed, whose place `fed = r` alone
# takes, and an end, which is repeated under the next number. Gates and taps have 32 bits: two that lie together are
# reset by one operation.

from libc.stdlib cimport qsort

cdef extern from "Python.h":
    void Py_INCREF(object)
    bint PyDict_Next(object mapping, Py_ssize_t *at, PyObject **key, PyObject **value)

cdef enum:  # CUstreamBatchMemOpType
    WRITE_32 = 2
    WAIT_32 = 1
    WAIT_64 = 4
    WRITE_64 = 5

cdef enum:
    MOST_OPERATIONS = 255  # of one call
    STREAM_ROOM = 900  # of a stream's queue, which takes in some 1,024 operations
    MOST_IN_FLIGHT = 32
    DEFAULT_STREAMS = 2  # up to this handle: they belong to the current context

cdef enum Stage:
    IDLE, PREPARING, FEEDING, LAUNCHING, ENDING, DRAINING


cdef struct Operation:  # CUstreamBatchMemOpParams
    uint64_t kind
    uint64_t address
    uint64_t value
    uint64_t flags
    uint64_t alias, unused


cdef struct Item:  # a gate or a tap of a bracket
    PyObject *place
    PyObject *value  # its point, or its event
    int64_t order  # of the captures
    int64_t generation  # of the point; of the record, 0 while it is not made
    int use  # of its event
    uint64_t address
    uint64_t due, value_due, flags  # the word that the gate waits for; 0: none


cdef struct Use:  # an event whose points are fed, or that is recorded on
    PyObject *core
    int64_t lowest, highest  # of its points, or of its records
    int count  # of its records
    bint is_in  # it is waited for, or recorded on
    uint64_t due, value_due, flags  # a record on another stream, behind which its records come; 0: none


cdef struct Word:
    uintptr_t host
    uint64_t address


cdef struct Other:  # a bracket of another lane with the same words
    PyObject *lane
    uint64_t over, drained
    int64_t number


cdef int by_order(const void *one, const void *other) noexcept nogil:
    return 1 if (<const Item *>one).order > (<const Item *>other).order else -1


cdef class Place:
    """What graphs have: the 32-bit word at `address`, which no other has; of a gate, which they wait for, or a tap."""

    cdef uint64_t address
    cdef readonly int _index  # of its device
    cdef public int64_t _order  # of its newest capture among all; 0: never captured
    cdef Lane lane, holder  # that of the last bracket that it was in, and of the open one
    cdef int64_t number  # of the last one
    cdef bint is_gate

    def __init__(self, int index, uint64_t address, *, bint is_gate):
        self._index, self.address, self.is_gate = index, address, is_gate

    @property
    def _address(self):
        return self.address


cdef class Bracket:
    """The gates with their points, and the taps with their events; then the generations of the records."""

    cdef dict waits, records
    cdef Item *items  # gates, then taps
    cdef Use *uses  # fed, then recorded
    cdef int gates, taps, fed, recorded
    cdef Other *others
    cdef int other_count
    cdef bint is_slow  # its records are made one by one
    cdef list before  # what L waited for when it was fed ahead of records
    cdef public bint _is_used, _is_over, _is_ahead

    def __dealloc__(self):
        free(self.items)
        free(self.others)

    cdef bint fill(self, dict waits, dict records, replaying) except -1:
        """Take in what a replay is to have; of the right types, else TypeError."""
        cdef int count = len(waits) + len(records), size = sizeof(Item) + sizeof(Use)
        self.waits, self.records = waits, records
        self.gates, self.taps = len(waits), len(records)
        self.items = <Item *>calloc(max(count, 1), size)
        if self.items == NULL:
            raise MemoryError
        self.uses = <Use *>(self.items + count)
        self.fill_from(waits, self.items, True, replaying)
        return self.fill_from(records, self.items + self.gates, False, replaying)

    cdef bint fill_from(self, dict mapping, Item *item, bint is_gate, replaying) except -1:
        cdef PyObject *key = NULL
        cdef PyObject *value = NULL
        cdef Py_ssize_t at = 0
        while PyDict_Next(mapping, &at, &key, &value):
            if not isinstance(<object>key, Place) or (<Place>key).is_gate != is_gate or not (
                isinstance(<object>value, PointBase) if is_gate else isinstance(<object>value, EventBase)
            ):
                replaying._raise_type(<object>key, <object>value)
            item.place, item.value = key, value
            item += 1
        return True

    cdef void sort(self) noexcept nogil:
        """Have gates and taps in the order of their captures."""
        cdef int index, count = self.gates + self.taps
        cdef bint are_sorted = True
        for index in range(1, count):
            if index != self.gates and self.items[index].order < self.items[index - 1].order:
                are_sorted = False
        if not are_sorted:
            qsort(self.items, self.gates, sizeof(Item), by_order)
            qsort(self.items + self.gates, self.taps, sizeof(Item), by_order)

    cdef int use_of(self, Core core, int first, int *count):
        """The number of an event among the uses from `first` on, of which there are `count`."""
        cdef int index
        for index in range(first + count[0] - 1, first - 1, -1):
            if self.uses[index].core == <PyObject *>core:
                return index
        index = first + count[0]
        count[0] += 1
        memset(&self.uses[index], 0, sizeof(Use))
        self.uses[index].core = <PyObject *>core
        self.uses[index].lowest = INT64_MAX
        return index

    cdef bint feeds(self, Wait wait):
        """Whether it feeds a point of that event."""
        cdef int index
        for index in range(self.fed):
            if self.uses[index].core == <PyObject *>wait.view:
                return True
        return False

    cdef int most(self) noexcept nogil:
        """How many operations one of its streams gets at most."""
        return 2 * max(self.gates, self.taps) + self.recorded + 6 + 2 * self.other_count

    cdef bint add_other(self, Lane lane, int64_t number) except -1:
        """Have it depend on a bracket of another lane, which had some of its words last."""
        cdef int index
        cdef Other *grown
        for index in range(self.other_count):
            if self.others[index].lane == <PyObject *>lane:
                self.others[index].number = max(self.others[index].number, number)
                return True
        grown = <Other *>realloc(self.others, (self.other_count + 1) * sizeof(Other))
        if grown == NULL:
            raise MemoryError
        self.others = grown
        grown[self.other_count] = Other(<PyObject *>lane, lane.over.address, lane.drained.address, number)
        self.other_count += 1
        return True

    def _generation_of(self, record):
        """The generation of that record, 0 if it was not made."""
        cdef int index
        for index in range(self.gates, self.gates + self.taps):
            if self.items[index].place == <PyObject *>record:
                return self.items[index].generation
        raise KeyError(record)

    @property
    def _records(self):
        return self.records


lanes_of_process = {}  # by the ids of their launch streams


cdef class Lane:
    """The brackets of one launch stream, one open at a time; what changes it is called with `lock`. Lives for ever."""

    cdef readonly int ordinal
    cdef readonly object home, feeder, drainer  # the launch stream's context, and its own streams
    cdef Handle launch, feeding, draining, context
    cdef readonly uint64_t stream_id, feeder_id, drainer_id
    cdef readonly int64_t key
    cdef Word over, drained, armed, fed
    cdef Lock lock
    cdef Stage stage  # of the open bracket: what is done or under way
    cdef int64_t number  # of the newest bracket
    cdef int64_t prepared  # the number under which the open one was prepared, and is fed
    cdef Bracket bracket  # the open one
    cdef PyObject *owner  # of that; null once it is gone
    cdef readonly object session  # of that
    cdef object stream  # what the launch stream was taken from: it lives as long as a bracket is open
    cdef Operation *operations
    cdef int count, room

    def __cinit__(self):
        Py_INCREF(self)

    def __init__(self, int ordinal, home, feeder, drainer, ids, words):
        self.ordinal, self.home, self.feeder, self.drainer = ordinal, home, feeder, drainer
        self.context = <Handle><uintptr_t>int(home)
        self.feeding, self.draining = <Handle><uintptr_t>feeder._pointer, <Handle><uintptr_t>drainer._pointer
        self.feeder_id, self.drainer_id = ids
        (self.over.host, self.over.address), (self.drained.host, self.drained.address), *others = words
        (_, self.armed.address), (_, self.fed.address) = others
        self.lock = Lock()

    def serve(self, launch, uint64_t stream_id, int64_t key):
        """Be the lane of this launch stream, whose list of waits is `key`."""
        self.launch, self.key, self.stream_id = <Handle><uintptr_t>int(launch), key, stream_id

    def leave(self):
        """Serve no stream from now on, if all brackets are over; whether they are."""
        if self.lock.mine() or not self.lock.take():
            return False
        is_free = self.is_free
        if is_free:
            self.stream_id = 0
        self.lock.give()
        return is_free

    @property
    def is_free(self):
        """Whether all brackets are over, and nothing lost stands in the way of its own streams."""
        if self.bracket is not None or self.number != self.now_over() or self.number != self.now_drained():
            return False
        return not any([wait.known_outcome() is not True for wait in of(self.feeder_id) + of(self.drainer_id)])

    cdef inline int64_t now_over(self) noexcept nogil:
        return <int64_t>ipcsync_load(<const uint64_t *>self.over.host)

    cdef inline int64_t now_drained(self) noexcept nogil:
        return <int64_t>ipcsync_load(<const uint64_t *>self.drained.host)

    @property
    def words(self):
        """The addresses of its words, by their names."""
        return {"over": self.over.address, "drained": self.drained.address, "armed": self.armed.address,
                "fed": self.fed.address}

    # --- operations ---------------------------------------------------------------------------------------------------

    cdef bint make_room(self, Bracket bracket) except -1:
        cdef int most = bracket.most()
        cdef Operation *grown
        if most > self.room:
            grown = <Operation *>realloc(self.operations, most * sizeof(Operation))
            if grown == NULL:
                raise MemoryError
            self.operations, self.room = grown, most
        return True

    cdef inline void put(self, uint64_t kind, uint64_t address, uint64_t value, uint64_t flags=0) noexcept nogil:
        self.operations[self.count] = Operation(kind, address, value, flags, 0, 0)
        self.count += 1

    cdef void put_all(self, const Item *items, int count, uint64_t value) noexcept nogil:
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
        cdef int index
        for index in range(bracket.other_count):
            self.put(WAIT_64, bracket.others[index].over, bracket.others[index].number)
            self.put(WAIT_64, bracket.others[index].drained, bracket.others[index].number)

    # --- the steps: they raise nothing, and give the driver's error ---------------------------------------------------

    cdef int prepare(self, Bracket bracket) noexcept nogil:
        self.stage = PREPARING
        self.await_others(bracket)
        self.put(WAIT_64, self.over.address, self.prepared - 1)
        self.put(WAIT_64, self.drained.address, self.prepared - 1)
        self.put_all(bracket.items + bracket.gates, bracket.taps, 0)
        self.put(WRITE_64, self.armed.address, self.prepared)
        return self.give_launch()

    cdef int feed(self, Bracket bracket) noexcept nogil:
        cdef int index
        cdef Item *gate
        self.stage = FEEDING
        self.await_others(bracket)
        self.put(WAIT_64, self.over.address, self.prepared - 1)
        for index in range(bracket.gates):
            gate = &bracket.items[index]
            if gate.due:
                self.put(WAIT_64, gate.due, gate.value_due, gate.flags)
            self.put(WRITE_32, gate.address, 1)
        self.put(WRITE_64, self.fed.address, self.prepared)
        return self.give(self.feeding)

    cdef int feed_nothing(self) noexcept nogil:
        """What takes the place of a feed, of which F may have a part, or all."""
        self.put(WRITE_64, self.fed.address, self.prepared)
        return self.give(self.feeding)

    cdef int end(self, Bracket bracket) noexcept nogil:
        self.stage = ENDING
        self.put_all(bracket.items + bracket.gates, bracket.taps, 1)
        self.put(WAIT_64, self.fed.address, self.prepared)
        self.put_all(bracket.items, bracket.gates, 0)
        self.put(WRITE_64, self.over.address, self.number)
        return self.give_launch()

    cdef int drain(self, Bracket bracket) noexcept nogil:
        """Make the records that have generations behind their taps."""
        cdef int index
        cdef Item *tap
        cdef Use *use
        self.stage = DRAINING
        self.put(WAIT_64, self.armed.address, self.prepared)
        for index in range(bracket.fed, bracket.fed + bracket.recorded):
            use = &bracket.uses[index]
            if use.due:
                self.put(WAIT_64, use.due, use.value_due, use.flags)
        for index in range(bracket.gates, bracket.gates + bracket.taps):
            tap = &bracket.items[index]
            self.put(WAIT_32, tap.address, 1)
            if tap.due:
                self.put(WRITE_64, tap.due, tap.value_due)
        self.put(WRITE_64, self.drained.address, self.number)
        return self.give(self.draining)

    # --- the whole ----------------------------------------------------------------------------------------------------

    cdef bint take_turns(self, Use *uses, int count, uint64_t stream, int64_t deadline, timeout) except -1:
        """Take the turns of the calls on these events, all or none, each with a marker for `stream`."""
        cdef Core core
        cdef int index = 0
        while index < count:
            core = <Core>uses[index].core
            if uses[index].is_in:
                step(LOCK)
                if not core.calls.take():
                    self.give_turns(uses, index)
                    index = 0
                    if not core.enter_calls(deadline):
                        core.raise_timeout(core._recorded + 1, timeout, "reached (another thread's call blocks)")
                    core.leave_calls()
                    continue
                ipcsync_turns(1)
                try:
                    if core.marker(stream) == NULL:
                        core.make_marker(stream, self.ordinal)
                except BaseException:
                    self.give_turns(uses, index + 1)
                    raise
            index += 1
        return True

    cdef void give_turns(self, Use *uses, int count) noexcept:
        cdef int index
        for index in range(count):
            if uses[index].is_in:
                (<Core>uses[index].core).leave_calls()

    cdef list list_points(self, Bracket bracket):
        """Have the next records of L depend on the pending points, which F waits for.

        Of an event only the last: if that is good, all are, and what loses one of them has lost the replay as a whole.
        """
        cdef int index
        return [
            add_wait(self.key, <Core>bracket.uses[index].core, bracket.uses[index].highest, self.feeder_id)
            for index in range(bracket.fed)
            if bracket.uses[index].highest
        ]

    cdef bint open(self, Bracket bracket, int64_t deadline, timeout) except -1:
        """Prepare and feed a bracket that has been claimed."""
        cdef Core core
        cdef Wait wait
        cdef Item *gate
        cdef int index, marked, result
        cdef list listed
        self.make_room(bracket)
        if bracket._is_ahead and bracket.taps:
            bracket.before = latest(self.key)
        listed = self.list_points(bracket)
        for index in range(bracket.gates):
            gate = &bracket.items[index]
            core = <Core>bracket.uses[gate.use].core
            if core.engine.has_ring and gate.generation > core.known():
                core.queue_wait(self.feeding, self.feeder_id, self.ordinal, gate.generation, deadline, timeout, False)
        self.take_turns(bracket.uses, bracket.fed, self.feeder_id, deadline, timeout)
        try:
            for index in range(bracket.fed):
                if bracket.uses[index].is_in:
                    (<Core>bracket.uses[index].core).check_open()  # while it is open, its word stays
            self.number += 1
            self.prepared = self.number
            with nogil:
                result = self.prepare(bracket)
                if result == 0:
                    result = self.feed(bracket)
            for index in range(bracket.fed):  # behind a refused call too, of which the stream may have work
                core = <Core>bracket.uses[index].core
                if bracket.uses[index].is_in:
                    with nogil:
                        marked = core.mark(self.feeding, self.feeder_id)
                    result = result or marked
        finally:
            self.give_turns(bracket.uses, bracket.fed)
        if result:
            raise_refused(result)
        self.stage = LAUNCHING
        for wait in listed:
            wait.is_queued = True
        for index in range(bracket.fed):
            if bracket.uses[index].is_in:
                (<Core>bracket.uses[index].core).check_queued(bracket.uses[index].highest)
        return True

    cdef object close(self, Bracket bracket, bint is_whole, replaying):
        """End and drain the open bracket; what a record raised, once all is queued, or None."""
        cdef int result
        cdef object error = None
        with nogil:
            result = self.end(bracket)
        if result:
            raise_refused(result)
        self.stage = DRAINING
        if not is_whole or not bracket.taps:
            self.finish()
            return None
        if bracket.is_slow:
            error = self.record_each(bracket, replaying)
        else:
            error = self.record_all(bracket, replaying)
        self.forget()
        return error

    cdef bint finish(self) except -1:
        """End the open bracket, whatever a refused call or an exception left of it, without records."""
        cdef Bracket bracket = self.bracket
        cdef int result = 0
        cdef int index
        if bracket is None:
            return False
        bracket._is_over = True
        self.count = 0
        if self.stage != IDLE:
            for index in range(bracket.gates, bracket.gates + bracket.taps):
                bracket.items[index].due = 0
            for index in range(bracket.fed, bracket.fed + bracket.recorded):
                bracket.uses[index].due = 0
            with nogil:
                result = self.finish_steps(bracket)
        if result:
            raise_refused(result)
        self.forget()
        return True

    cdef int finish_steps(self, Bracket bracket) noexcept nogil:
        cdef Stage stage = self.stage
        cdef int result = 0
        if stage == PREPARING:
            result = self.prepare(bracket)  # perhaps again
        if result == 0 and stage <= FEEDING:
            result = self.feed_nothing()
        if result == 0 and stage != DRAINING:
            if stage == ENDING:  # perhaps it is over by now, and once more under its number would spoil the next one
                self.number += 1
            result = self.end(bracket)
        return result or self.drain(bracket)

    cdef void forget(self):
        """The open bracket is over for the host."""
        cdef Bracket bracket = self.bracket
        cdef Place place
        cdef int index
        for index in range(bracket.gates + bracket.taps):
            place = <Place>bracket.items[index].place
            place.holder = None
            if self.stage != IDLE:
                place.lane, place.number = self, self.number
        self.stage = IDLE
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

    # --- records ------------------------------------------------------------------------------------------------------

    cdef object record_all(self, Bracket bracket, replaying):
        """Drain with all records, which are of timelines, by as few calls as possible; the first error of an event."""
        cdef Use *uses = bracket.uses + bracket.fed
        cdef Core core
        cdef Wait wait
        cdef Item *tap
        cdef int index, result, marked
        cdef object error = None
        cdef list followed = []
        self.take_turns(uses, bracket.recorded, self.drainer_id, FOREVER, None)
        for index in range(bracket.recorded):
            core = <Core>uses[index].core
            if core._begun != core._recorded:  # the driver refused the last record: each call first makes that again
                self.give_turns(uses, bracket.recorded)
                return self.record_each(bracket, replaying)
        try:
            for index in range(bracket.recorded):
                try:
                    self.begin_records(<Core>uses[index].core, &uses[index], followed)
                except IpcSyncError as refusal:
                    (<Core>uses[index].core).leave_calls()
                    uses[index].is_in = False
                    error = error or refusal
            for index in range(bracket.gates, bracket.gates + bracket.taps):
                tap = &bracket.items[index]
                core = <Core>bracket.uses[tap.use].core
                if bracket.uses[tap.use].is_in:
                    bracket.uses[tap.use].highest += 1
                    tap.generation = bracket.uses[tap.use].highest
                    tap.due, tap.value_due = core._address, core.base + <uint64_t>tap.generation
            for index in range(bracket.recorded):
                if uses[index].is_in:
                    core = <Core>uses[index].core
                    core.set_stream(self.drainer_id)
                    core._begun = uses[index].highest
            with nogil:
                result = self.drain(bracket)
            for index in range(bracket.recorded):
                if uses[index].is_in:
                    core = <Core>uses[index].core
                    with nogil:
                        marked = core.mark(self.draining, self.drainer_id)
                    result = result or marked
                    if result == 0:
                        core._recorded = core._begun
                        core.publish_record(core._recorded)
                    elif core.enter_state():  # the next record repeats these; it may be on another stream
                        core.chain.unprove(uses[index].highest)
                        core.state.give()
        finally:
            self.give_turns(uses, bracket.recorded)
        if result:
            for index in range(bracket.gates, bracket.gates + bracket.taps):
                bracket.items[index].generation = 0
            raise_refused(result)
        for wait in followed:
            wait.is_queued = True
        for index in range(bracket.recorded):
            core = <Core>uses[index].core
            if uses[index].is_in:
                if core.is_awaited():
                    core.wake()
                if not core.is_open():
                    error = error or self.end_records(bracket, core, bracket.fed + index)
        return error

    cdef bint begin_records(self, Core core, Use *use, list followed) except -1:
        """Store what the records will depend on; called with the event's turn."""
        cdef Entry entry = None
        cdef Wait wait
        if core.closed() or not core.is_open():
            core.raise_no_record()
        use.lowest = core._recorded + 1
        use.highest = core._recorded
        if core.follows(self.drainer_id, use.lowest):
            use.due, use.value_due, use.flags = core._address, core.base + <uint64_t>use.highest, core._flags
        if not (core.chain.is_needed or core.depends_on_all or (list_count != 0 and self.key in lists)):
            return True
        entry = core.depend_on(self.key, self.drainer_id, use.lowest, None)  # behind all that L waits for
        if entry is not None:
            entry.last = use.highest + use.count
        if use.due and (entry is not None or core.chain.entries_):
            followed.append(add_wait(self.key, core, use.highest, self.drainer_id))
        core.chain.commit(use.lowest, self.drainer_id, entry)
        return True

    cdef object end_records(self, Bracket bracket, Core core, int use):
        """The error of an event that is not open any more: its records were made, and do not count."""
        cdef int index
        for index in range(bracket.gates, bracket.gates + bracket.taps):
            if bracket.items[index].use == use:
                bracket.items[index].generation = 0
        try:
            core.raise_no_record()
        except IpcSyncError as error:
            return error

    cdef object record_each(self, Bracket bracket, replaying):
        """Drain with one record behind each tap, by the calls of events; of an event, none behind one that failed."""
        cdef object error = None
        cdef Item *tap
        cdef Item *gate
        cdef Use *use
        cdef Wait wait
        cdef int index, other, result
        cdef list waits = latest(self.key)
        if bracket._is_ahead:  # a record depends on those points alone that are not surely captured after it
            waits = bracket.before + [wait for wait in waits if not bracket.feeds(wait)]
        self.put(WAIT_64, self.armed.address, self.prepared)
        for index in range(bracket.gates, bracket.gates + bracket.taps):
            tap, use = &bracket.items[index], &bracket.uses[bracket.items[index].use]
            self.put(WAIT_32, tap.address, 1)
            with nogil:
                result = self.give(self.draining)
            if result:
                raise_refused(result)
            for other in range(bracket.gates if bracket._is_ahead and use.is_in else 0):
                gate = &bracket.items[other]
                if gate.due and not (<object>tap.place).is_surely_before(<object>gate.place):
                    wait = add_wait(
                        self.drainer_id, <Core>bracket.uses[gate.use].core, gate.generation, self.feeder_id
                    )
                    wait.is_queued = True
            try:
                tap.generation = replaying._record(<object>tap.value, waits) if use.is_in else 0
            except IpcSyncError as refusal:
                use.is_in = False
                error = error or refusal
        self.put(WRITE_64, self.drained.address, self.number)
        with nogil:
            result = self.give(self.draining)
        if result:
            raise_refused(result)
        return error


cdef int raise_refused(int result) except -1:
    raise describe(result, "cuStreamBatchMemOp")
