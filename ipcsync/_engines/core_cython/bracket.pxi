# What a bracket has: gates with the points that they wait for, taps with the events that are recorded behind them.

from libc.stdlib cimport qsort

cdef extern from "Python.h":
    bint PyDict_Next(object mapping, Py_ssize_t *at, PyObject **key, PyObject **value)


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
    int64_t highest  # of its points, or of its records
    int count  # of its records
    bint is_in  # it is waited for, or recorded on
    uint64_t due, value_due, flags  # a record on another stream, which its records wait for; 0: none


cdef struct Other:  # a bracket of another lane with the same words
    PyObject *lane
    uint64_t over, drained
    int64_t number


cdef int by_order(const void *one, const void *other) noexcept nogil:
    return 1 if (<const Item *>one).order > (<const Item *>other).order else -1


cdef class Place:
    """What graphs have: the 32-bit word at `_address`, which no other has; of a gate, which they wait for, or a tap."""

    cdef readonly uint64_t _address
    cdef readonly int _index  # of its device
    cdef public int64_t _order  # of its newest capture among all; 0: never captured
    cdef Lane lane, holder  # that of the last bracket that it was in, and of the open one
    cdef int64_t number  # of the last one
    cdef bint is_gate

    def __init__(self, int index, uint64_t address, *, bint is_gate):
        self._index, self._address, self.is_gate = index, address, is_gate


cdef class Bracket:
    """The gates with their points, and the taps with their events; then the generations of the records."""

    cdef dict waits
    cdef readonly dict _records
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
        self.waits, self._records = waits, records
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
        return index

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
