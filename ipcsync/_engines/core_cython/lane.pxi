# Lanes: the brackets of each launch stream, as they are opened and ended. A bracket has gates with the points that they
# wait for, and taps with the events that are recorded behind them.

from libc.stdlib cimport malloc, qsort

cdef extern from "Python.h":
    bint PyDict_Next(object mapping, Py_ssize_t *at, PyObject **key, PyObject **value)
    void *Py_TYPE(PyObject *)
    void Py_INCREF(PyObject *)

cdef int64_t captures = 0  # of gates and taps, so far

cdef struct Spot:  # what is known of a gate or a tap: never freed, as its word
    int64_t order  # of its newest capture among all; 0: never captured
    PyObject *lane  # that of the last bracket that it was in, or of the open one; lanes live for ever
    int64_t number  # of that
    PyObject *place  # gone perhaps
    int index  # of its device
    bint is_gate

cdef struct Use:  # an event whose points are fed, or that is recorded on
    PyObject *core
    int64_t highest  # of its points, or of its records
    int64_t known  # the last one that was found complete, or need not be waited for
    int64_t fed  # the last one that is waited for, or `known`
    int64_t follows  # a record on another stream, which its records wait for; 0: none
    int count  # of its records
    bint is_in  # it is waited for, or recorded on
    uint64_t address, base  # of its word
    unsigned int flags  # of the waits for that

cdef struct Item:  # a gate or a tap of a bracket
    Spot *spot
    uint64_t address
    PyObject *value  # its point, which may be gone once it has a use, or its event
    Use *use  # of its event; null: that is over, and the point complete, or is asked for at the beginning
    int64_t generation  # of the point; of the record, 0 while it is not made
    PyObject *lane  # of the last bracket before that it was in
    int64_t number

cdef struct Other:  # a bracket of another lane with the same words
    PyObject *lane
    int64_t number

cdef int by_order(const void *one, const void *other) noexcept nogil:
    return 1 if (<const Item *>one).spot.order > (<const Item *>other).spot.order else -1

cdef class Place:
    """What graphs have: the 32-bit word at `_address`, which no other has; of a gate, which they wait for, or a tap."""

    cdef Spot *spot
    cdef readonly uint64_t _address
    cdef readonly int _index  # of its device

    def __cinit__(self, *_, **__):
        self.spot = <Spot *>calloc(1, sizeof(Spot))
        if self.spot == NULL:
            raise MemoryError
        self.spot.place = <PyObject *>self

    def __init__(self, int index, uint64_t address, *, bint is_gate):
        self._index, self._address = index, address
        self.spot.index, self.spot.is_gate = index, is_gate

    def __repr__(self):
        return text_of(self.spot)

    def _note_capture(self):
        """It is in a further capture."""
        global captures
        captures += 1
        self.spot.order = captures

cdef str text_of(const Spot *spot):
    return f"<ipcsync.{'GraphWait' if spot.is_gate else 'GraphRecord'} device=cuda:{spot.index}>"

cdef class Bracket:
    """The gates with their points, and the taps with their events; then the generations of the records."""

    cdef list kept  # what the items refer to, which the garbage collector sees here
    cdef Item *items  # gates, then taps
    cdef Use *uses  # fed, then recorded
    cdef int gates, taps, fed, recorded
    cdef bint has_unbound  # gates whose points are to be asked for at the beginning
    cdef Other *others
    cdef int other_count
    cdef bint is_slow  # its records are made one by one
    cdef list before  # what L waited for when it was fed ahead of records
    cdef public bint _is_used, _is_over, _is_ahead

    def __dealloc__(self):
        free(self.items)

    cdef int fill(self, dict waits, dict records, replaying) except -1:
        """Take in what a replay is to have; of the right types, else TypeError."""
        self.kept = [*waits, *records] if self._is_ahead else []
        with cython.critical_section(waits, records):
            most = len(waits) + len(records)
            self.items = <Item *>malloc(max(most, 1) * (sizeof(Item) + sizeof(Use) + sizeof(Other)))
            if self.items == NULL:
                raise MemoryError
            self.uses = <Use *>(self.items + most)
            self.others = <Other *>(self.uses + most)
            self.gates = self.fill_from(self.items, waits, True, replaying)
            self.taps = self.fill_from(self.items + self.gates, records, False, replaying)

    cdef int fill_from(self, Item *items, dict mapping, bint is_gate, replaying) except -1:
        """Take in gates or taps; how many. A point is looked at here if its client has used it, and else not yet."""
        cdef PyObject *key = NULL
        cdef PyObject *value = NULL
        cdef void *key_type = NULL  # of the last ones: most are of the same types as those
        cdef void *value_type = NULL
        cdef Use *use = NULL
        cdef Item *item = items
        cdef Py_ssize_t at = 0
        while PyDict_Next(mapping, &at, &key, &value):
            if Py_TYPE(key) != key_type or Py_TYPE(value) != value_type:
                if not isinstance(<object>key, Place) or (<Place>key).spot.is_gate != is_gate or not (
                    isinstance(<object>value, PointBase) if is_gate else isinstance(<object>value, EventBase)
                ):
                    replaying._raise_type(<object>key, <object>value)
                key_type, value_type = Py_TYPE(key), Py_TYPE(value)
            item.spot, item.address, item.value = (<Place>key).spot, (<Place>key)._address, value
            item.use, item.generation = NULL, 0
            if is_gate and (<PointBase>value).core is not None:
                use = self.wait_for(item, <PyObject *>(<PointBase>value).core, use)
            else:
                self.kept.append(<object>value)
                self.has_unbound = self.has_unbound or is_gate
            item += 1
        return <int>(item - items)

    cdef inline Use *wait_for(self, Item *gate, PyObject *core, Use *last) except NULL:
        """Have a gate wait for its point, which has this core; its use, perhaps the `last` one."""
        cdef Use *use = last
        if use == NULL or use.core != core:
            self.kept.append(<object>gate.value)
            use = self.use_of(<Core>core, 0, &self.fed)
        gate.use, gate.generation = use, (<PointBase>gate.value)._generation
        use.highest = max(use.highest, gate.generation)
        return use

    cdef Use *use_of(self, Core core, int first, int *count) noexcept nogil:
        """That of an event, among the uses from `first` on, of which there are `count`."""
        cdef Use *use = self.uses + first
        for index in range(count[0] - 1, -1, -1):
            if use[index].core == <PyObject *>core:
                return &use[index]
        use += count[0]
        count[0] += 1
        memset(use, 0, sizeof(Use))
        use.core = <PyObject *>core
        return use

    cdef int most(self) noexcept nogil:
        """How many operations one of its streams gets at most, markers included: L, F or D."""
        cdef int drained = 3 * self.taps + self.recorded if self.is_slow else 2 * (self.taps + self.recorded)
        cdef int others = 2 * self.other_count
        return max(2 * self.taps + self.gates + 4 + others, 2 * self.gates + self.fed + 2 + others, drained + 2)

    cdef Spot *claim(self, PyObject *lane, int64_t number) noexcept nogil:
        """Have all gates and taps be of bracket `number` of a lane; or none, and the first that an open bracket has."""
        self.other_count = 0
        for index in range(self.gates + self.taps):
            item = &self.items[index]
            spot = item.spot
            if spot.lane != lane and spot.lane != NULL:
                if (<Lane>spot.lane).claimed == spot.number:
                    self.unclaim(index)
                    return spot
                if not (<Lane>spot.lane).is_past(spot.number):
                    self.add_other(spot.lane, spot.number)
            item.lane, item.number = spot.lane, spot.number
            spot.lane, spot.number = lane, number
        return NULL

    cdef void unclaim(self, int count) noexcept nogil:
        """Have the first of them be of the brackets that they were of before."""
        for index in range(count):
            self.items[index].spot.lane = self.items[index].lane
            self.items[index].spot.number = self.items[index].number

    cdef void add_other(self, PyObject *lane, int64_t number) noexcept nogil:
        """Have it depend on a bracket of another lane, which had some of its words last."""
        for index in range(self.other_count):
            if self.others[index].lane == lane:
                self.others[index].number = max(self.others[index].number, number)
                return
        self.others[self.other_count] = Other(lane, number)
        self.other_count += 1

    def _record_of(self, record):
        """The event of that record, and its generation, 0 if it was not made."""
        for index in range(self.gates, self.gates + self.taps if isinstance(record, Place) else 0):
            if self.items[index].spot == (<Place>record).spot:
                return <object>self.items[index].value, self.items[index].generation
        raise KeyError(record)

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

cdef str ANEW = "a new stream, and waits and records that are captured anew"
cdef dict lanes = {}  # of the process, by the ids of their launch streams
lanes_of_process = lanes

@cython.final
cdef class Lane:
    """The brackets of one launch stream, one open at a time; what changes it is called with `lock`. Lives for ever."""

    cdef readonly int ordinal
    cdef readonly uint64_t stream_id, feeder_id, drainer_id
    cdef readonly int64_t key  # of the launch stream's list of waits
    cdef Handle launch, feeding, draining, context
    cdef uint64_t over, drained, armed, fed  # the addresses of its words
    cdef uintptr_t over_host, drained_host  # of these for the host
    cdef Stage stage  # of the open bracket: what is done or under way
    cdef int64_t number  # of the newest bracket
    cdef int64_t claimed  # the one that the open one's gates and taps have; 0: none is open
    cdef int64_t prepared  # the number under which the open one was prepared, and is fed
    cdef Operation *operations
    cdef int room

    cdef readonly object words  # host and device addresses, by their names
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
        (self.over_host, self.over), (self.drained_host, self.drained) = words["over"], words["drained"]
        self.armed, self.fed, self.words = words["armed"][1], words["fed"][1], words
        self.lock = Lock()

    def serve(self, launch, uint64_t stream_id, int64_t key):
        """Be the lane of this launch stream, whose list of waits is `key`, if all brackets are over; whether it is."""
        cdef Handle handle = <Handle><uintptr_t>int(launch)
        if self.lock.mine() or not self.lock.take():
            return False
        try:
            if not self.is_free or lanes.setdefault(stream_id, self) is not self:
                return False
            before = self.stream_id
            self.launch, self.key, self.stream_id = handle, key, stream_id
            lanes.pop(before, None)
            drop(of(self.feeder_id) + of(self.drainer_id))  # at last: that may raise
        finally:
            self.lock.give()
        return True

    @property
    def is_free(self):
        """Whether all brackets are over, and nothing lost stands in the way of its own streams."""
        if self.bracket is not None or not self.is_past(self.number):
            return False
        waits = of(self.feeder_id) + of(self.drainer_id)
        return all([wait.known_outcome() is not None and wait.has_passed() for wait in waits])

    cdef bint is_past(self, int64_t number) noexcept nogil:
        """Whether its streams are past a bracket."""
        return <int64_t>ipcsync_load(<const uint64_t *>self.over_host) >= number and now_drained(self) >= number

    cdef int open(self, Bracket bracket, int64_t deadline, timeout) except -1:
        """Prepare and feed a bracket that has been claimed."""
        cdef int most = bracket.most()
        if most > self.room:
            grown = <Operation *>realloc(self.operations, most * sizeof(Operation))
            if grown == NULL:
                raise MemoryError
            self.operations, self.room = grown, most
        sweep()
        if bracket._is_ahead and bracket.taps:
            bracket.before = latest(self.key)
        behind = latest(self.key) + latest(self.feeder_id) + latest(self.drainer_id)
        for index in range(bracket.other_count):
            behind += latest((<Lane>bracket.others[index].lane).key)
            behind += latest((<Lane>bracket.others[index].lane).drainer_id)
        behind = [wait for wait in behind if wait.view.kind == "event" and not wait.has_passed()]
        for wait in behind:  # as L is about to be, perhaps for ever
            if isinstance(wait.known_outcome(), Loss):
                raise wait.outcome.error_behind(wait.label, "the replay", wait.view.name, wait.generation, ANEW)
        for index in range(bracket.fed):
            core = <Core>bracket.uses[index].core
            if core.has_ring and bracket.uses[index].highest > known_of(core):
                queue_wait(core, self.feeding, self.ordinal, bracket.uses[index].highest, deadline, timeout, False)
        take_turns(self, bracket.uses, bracket.fed, self.feeder_id, deadline, timeout)
        try:
            self.check_launch("replay")  # another thread may have begun a capture meanwhile
            for index in range(bracket.fed):
                if bracket.uses[index].is_in:
                    check_open(<Core>bracket.uses[index].core)  # while it is open, its word stays
            for wait in behind:
                add(self.key, wait.view, wait.generation, wait.stream, wait.ordinal)
            # The next records of L depend on the pending points, which F waits for. Of an event only on the last: if that
            # is good, all are, and what loses one of them has lost the replay as a whole. The end of no record proves that
            # a lane's own stream waits for nothing more, so none is marked as queued.
            for index in range(bracket.fed):
                core = <Core>bracket.uses[index].core
                if bracket.uses[index].highest:
                    add(self.key, core, bracket.uses[index].highest, self.feeder_id, self.ordinal)
                if bracket.uses[index].is_in:
                    marker = marker_of(core, self.feeder_id)
                    # If somebody asks before L is past this bracket, it is recorded behind all that F has then.
                    marker.handle, marker.over, marker.number = self.feeding, self.over_host, self.number + 1
            bracket._is_used = True
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

    cdef object close(self, Bracket bracket, bint is_whole, replaying):
        """End and drain the open bracket; what a record raised, once all is queued, or None."""
        if not (is_whole and bracket.taps):
            self.finish()
            return None
        if not bracket.is_slow and take_records(self, bracket, replaying._timeout):
            error = record_all(self, bracket)
        else:
            with nogil:
                result = end_launch(self, bracket)
            check_taken(result)
            self.stage = DRAINING
            error = record_each(self, bracket, replaying)
        self.forget()
        return error

    cdef int check_launch(self, str what) except -1:
        """Raise StreamCapturing if `what` would go into a graph, or break a capture; the bracket stays as it is."""
        cdef int status = 0
        if <uintptr_t>self.launch <= DEFAULT_STREAMS or cuStreamIsCapturing(self.launch, &status) != 0 or status != 0:
            with OnDevice(self.ordinal, self.home) as inside, inside:
                refuse_capturing(<uintptr_t>self.launch, what)

    cdef int finish(self) except -1:
        """End the open bracket, whatever a refused call or an exception left of it, without records."""
        cdef Bracket bracket = self.bracket
        cdef int result = 0
        if bracket is None:
            return 0
        bracket._is_over = True
        if self.stage != IDLE:
            self.check_launch("end a replay")
            with nogil:
                result = self.finish_steps(bracket)
        check_taken(result)
        self.forget()

    cdef int finish_steps(self, Bracket bracket) noexcept nogil:
        cdef Stage stage = self.stage
        cdef int result = 0
        if stage == PREPARING:
            result = prepare(self, bracket)  # perhaps again
        if result == 0 and stage <= FEEDING:  # this takes the place of a feed, of which F may have a part, or all
            at = put_one(self.operations, WRITE_64, self.fed, self.prepared)
            result = give_operations(self, self.feeding, at)
        if result == 0 and stage != DRAINING:
            result = end_launch(self, bracket)
        if result == 0:  # D may have it in part, or all, and be past it: then the taps are the next bracket's
            self.stage = DRAINING
            at = put_one(self.operations, WAIT_64, self.over, self.number)
            at = put_one(at, WRITE_64, self.drained, self.number)
            result = give_operations(self, self.draining, at)
        return result

    cdef void forget(self):
        """The open bracket is over for the host."""
        cdef Bracket bracket = self.bracket
        cdef bint collects = begin(claims)
        if self.stage == IDLE:
            bracket.unclaim(bracket.gates + bracket.taps)
        elif self.number != self.claimed:
            for index in range(bracket.gates + bracket.taps):
                bracket.items[index].spot.number = self.number
        self.stage, self.claimed = IDLE, 0
        end(claims, collects)
        self.owner = NULL
        self.session = self.stream = self.bracket = None

    def end_from_outside(self, of_whom):
        """End the open bracket without records if it is of this session, or of this replay; within a second, if at all."""
        if self.lock.mine() or not self.lock.await_turn(ipcsync_now() + PATIENCE_NS):
            return
        try:
            if self.session is of_whom or self.owner == <PyObject *>of_whom:
                self.finish()
        finally:
            self.lock.give()
