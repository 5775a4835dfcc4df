# What a bracket has: gates with the points that they wait for, taps with the events that are recorded behind them.

from libc.stdlib cimport malloc, qsort

cdef extern from "Python.h":
    bint PyDict_Next(object mapping, Py_ssize_t *at, PyObject **key, PyObject **value)
    void *Py_TYPE(PyObject *)
    void Py_INCREF(PyObject *)


cdef struct Use:  # an event whose points are fed, or that is recorded on
    PyObject *core
    int64_t highest  # of its points, or of its records
    int64_t known  # the last one that was found complete
    int64_t fed  # the last one that is waited for
    int64_t follows  # a record on another stream, which its records wait for; 0: none
    int count  # of its records
    bint is_in  # it is waited for, or recorded on
    uint64_t address, base  # of its word
    unsigned int flags  # of the waits for that


cdef struct Item:  # a gate or a tap of a bracket
    PyObject *place
    PyObject *value  # its point, or its event
    Use *use  # of its event; null: that is over, and the point complete
    int64_t order  # of the captures
    int64_t generation  # of the point; of the record, 0 while it is not made
    uint64_t address


cdef inline bint is_due(const Item *gate) noexcept nogil:
    """Whether a stream is to wait for its point."""
    return gate.use != NULL and gate.use.is_in and gate.generation > gate.use.known


cdef struct Other:  # a bracket of another lane with the same words
    PyObject *lane
    int64_t number


cdef int by_order(const void *one, const void *other) noexcept nogil:
    return 1 if (<const Item *>one).order > (<const Item *>other).order else -1


cdef class Place:
    """What graphs have: the 32-bit word at `_address`, which no other has; of a gate, which they wait for, or a tap."""

    cdef readonly uint64_t _address
    cdef readonly int _index  # of its device
    cdef public int64_t _order  # of its newest capture among all; 0: never captured
    cdef PyObject *lane  # that of the last bracket that it was in
    cdef PyObject *holder  # and of the open one; lanes live for ever
    cdef int64_t number  # of the last one
    cdef bint is_gate

    def __init__(self, int index, uint64_t address, *, bint is_gate):
        self._index, self._address, self.is_gate = index, address, is_gate


cdef bint check_types(key, value, bint is_gate, replaying) except -1:
    """Raise TypeError unless these are a gate and its point, or a tap and its event."""
    if not isinstance(key, Place) or (<Place>key).is_gate != is_gate or not (
        isinstance(value, PointBase) if is_gate else isinstance(value, EventBase)
    ):
        replaying._raise_type(key, value)
    return True


cdef class Bracket:
    """The gates with their points, and the taps with their events; then the generations of the records."""

    cdef dict waits, records  # what the items refer to: the garbage collector sees it here
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
        cdef int most
        self.waits, self.records = waits.copy(), records.copy()
        most = len(self.waits) + len(self.records)
        self.items = <Item *>malloc(max(most, 1) * (sizeof(Item) + sizeof(Use)))
        if self.items == NULL:
            raise MemoryError
        self.uses = <Use *>(self.items + most)
        self.fill_from(self.waits, &self.gates, replaying)
        return self.fill_from(self.records, &self.taps, replaying)

    cdef bint fill_from(self, dict mapping, int *count, replaying) except -1:
        """Take in gates or taps, and count them."""
        cdef PyObject *key = NULL
        cdef PyObject *value = NULL
        cdef void *key_type = NULL  # of the last ones
        cdef void *value_type = NULL
        cdef Item *items = self.items + self.gates
        cdef Py_ssize_t at = 0
        while PyDict_Next(mapping, &at, &key, &value):
            if Py_TYPE(key) != key_type or Py_TYPE(value) != value_type:
                check_types(<object>key, <object>value, count == &self.gates, replaying)
                key_type, value_type = Py_TYPE(key), Py_TYPE(value)
            items[count[0]].place, items[count[0]].value, items[count[0]].generation = key, value, 0
            count[0] += 1
        return True

    cdef void sort(self) noexcept nogil:
        """Have gates and taps in the order of their captures."""
        qsort(self.items, self.gates, sizeof(Item), by_order)
        qsort(self.items + self.gates, self.taps, sizeof(Item), by_order)

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
        """How many operations one of its streams gets at most."""
        return 2 * max(self.gates, self.taps) + self.recorded + 6 + 2 * self.other_count

    cdef bint add_other(self, PyObject *lane, int64_t number) except -1:
        """Have it depend on a bracket of another lane, which had some of its words last."""
        cdef int index
        cdef Other *grown
        for index in range(self.other_count):
            if self.others[index].lane == lane:
                self.others[index].number = max(self.others[index].number, number)
                return True
        grown = <Other *>realloc(self.others, (self.other_count + 1) * sizeof(Other))
        if grown == NULL:
            raise MemoryError
        self.others = grown
        grown[self.other_count] = Other(lane, number)
        self.other_count += 1
        return True

    def _record_of(self, record):
        """The event of that record, and its generation, 0 if it was not made."""
        cdef int index
        for index in range(self.gates, self.gates + self.taps):
            if self.items[index].place == <PyObject *>record:
                return <object>self.items[index].value, self.items[index].generation
        raise KeyError(record)
