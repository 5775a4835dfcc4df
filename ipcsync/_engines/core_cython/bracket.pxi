# What a bracket has: gates with the points that they wait for, taps with the events that are recorded behind them.

from libc.stdlib cimport malloc, qsort

cdef extern from "Python.h":
    bint PyDict_Next(object mapping, Py_ssize_t *at, PyObject **key, PyObject **value)
    void *Py_TYPE(PyObject *)
    void Py_INCREF(PyObject *)


cdef int64_t captures = 0  # of gates and taps, so far


cdef struct Spot:  # what is known of a gate or a tap: never freed, as its word
    uint64_t address
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
        self.spot.index, self.spot.address, self.spot.is_gate = index, address, is_gate

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
        cdef int most
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
        cdef int index
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
        cdef Item *item
        cdef Spot *spot
        cdef int index
        self.other_count = 0
        for index in range(self.gates + self.taps):
            item = &self.items[index]
            spot = item.spot
            if spot.lane != lane and spot.lane != NULL:
                if (<Lane>spot.lane).claimed == spot.number:
                    self.unclaim(index)
                    return spot
                self.add_other(spot.lane, spot.number)
            item.lane, item.number = spot.lane, spot.number
            spot.lane, spot.number = lane, number
        return NULL

    cdef void unclaim(self, int count) noexcept nogil:
        """Have the first of them be of the brackets that they were of before."""
        cdef int index
        for index in range(count):
            self.items[index].spot.lane = self.items[index].lane
            self.items[index].spot.number = self.items[index].number

    cdef void add_other(self, PyObject *lane, int64_t number) noexcept nogil:
        """Have it depend on a bracket of another lane, which had some of its words last."""
        cdef int index
        for index in range(self.other_count):
            if self.others[index].lane == lane:
                self.others[index].number = max(self.others[index].number, number)
                return
        self.others[self.other_count] = Other(lane, number)
        self.other_count += 1

    def _record_of(self, record):
        """The event of that record, and its generation, 0 if it was not made."""
        cdef int index
        for index in range(self.gates, self.gates + self.taps if isinstance(record, Place) else 0):
            if self.items[index].spot == (<Place>record).spot:
                return <object>self.items[index].value, self.items[index].generation
        raise KeyError(record)
