# The waits that this process has queued: for each stream, those that its next record depends on.
#
# All clients of the process share these lists. A wait leaves its list once it is known good. A lost one stays until
# `drop`, and no record on the stream is possible meanwhile. So what is listed no more has its outcome, and may be asked
# for it once its use is released. Each change is one section under `table`.

cdef enum:
    MANY_ROWS = 64
    CONTEXT_GONE = 400  # CUDA_ERROR_INVALID_HANDLE, which the driver gives of a marker then

cdef struct Marker:  # an event of this process on a stream, recorded behind the last work that this use queued there
    uint64_t stream
    Handle event
    Handle handle  # of the stream, if the marker may not be behind all: the driver refused one, or it is owed
    uintptr_t over  # a word of a lane, if it is owed there: once this has `number`, the stream is past what was queued
    int64_t number

cdef dict NO_ROWS = {}
cdef list NO_ROW = []
cdef dict lists = {}  # by stream, or of the blocking ones together: rows by use and stream, each by generation
cdef Lock table = Lock()
cdef int64_t sweep_at = MANY_ROWS
cdef int row_count = 0  # of all lists: while there are none, a record looks no further

@cython.final
cdef class Wait:
    """One wait that was queued, for `generation` of what `view` sees. Its `outcome` is None while open, then True or a Loss.

    `key` is its list, `stream` the id of the stream of device `ordinal` in whose order it was queued, 0 if that is not
    known. It is listed before the driver's call, and `is_queued` after it: what ended before that was never behind it.
    """

    cdef public object view, outcome
    cdef object left  # of a lost one: what is to be asked too, since the view is released, or about to be
    cdef public int64_t generation, key
    cdef public uint64_t stream
    cdef public int ordinal
    cdef public bint is_queued

    @property
    def label(self):
        """What it waits for, in a text."""
        return f"generation {self.generation} of {self.view.label}"

    cpdef object known_outcome(self):
        """The outcome by the board and this process's memory."""
        cdef Core view
        if self.outcome is None:
            view = self.view
            outcome = find_outcome(view, self.generation)
            # If the use was released meanwhile, the words just read may be the slot's next use's. The wait has its
            # outcome then, unless it was listed later: for such a one nothing was queued.
            self.settle(view.is_released or outcome)
        return self.outcome

    cdef int settle(self, outcome) except -1:
        """Give it its outcome, if it has none. Only None is ever replaced, and that is never freed: readers take no lock."""
        with cython.critical_section(self):
            if self.outcome is None:
                self.outcome = outcome

    def resolved(self):
        """The outcome that a waiter would get now; asks the driver."""
        if self.known_outcome() is None and self.view.accepts(self.generation):
            self.settle(True)
        return self.outcome

    def has_passed(self):
        """Whether its stream is past it, as `Core.has_passed`."""
        return self.view.has_passed(self.stream) and (self.left is None or self.left.has_passed(None))  # in this order

@cython.internal
cdef class Released:
    """What the lost waits for a use on one stream need of it once it is released: texts, and whether that is past them.

    If the coordinator is lost, a use is released although some streams are not.
    """

    cdef readonly object name, label, kind, chain  # the last: None
    cdef readonly bint is_recorder
    cdef Lock asking  # held while the driver is asked about the marker
    cdef Marker marker  # without an event: the stream is past them

    def __init__(self, view):
        self.name, self.label, self.kind, self.is_recorder = view.name, view.label, view.kind, view.is_recorder
        self.asking = Lock()

    def has_passed(self, _):
        cdef bint has_passed
        with nogil:
            self.asking.take_within(FOREVER)
            has_passed = self.marker.event == NULL or query_relaxed(self.marker.event) in (0, CONTEXT_GONE)
            self.asking.give()
        return has_passed

    cdef void forget(self) noexcept nogil:
        """Destroy the marker, complete or not."""
        self.asking.take_within(FOREVER)
        event, self.marker.event = self.marker.event, NULL
        self.asking.give()  # from here on nobody asks about it
        if event != NULL:
            cuEventDestroy(event)

# --- changes ----------------------------------------------------------------------------------------------------------

cpdef Wait add(int64_t key, Core view, int64_t generation, uint64_t stream, int ordinal=0):
    """Have the stream's next record depend on `generation`; called before the wait is queued."""
    cdef Wait first, made
    cdef list row
    cdef bint collects = begin(table)
    try:
        row = row_of(key, view, stream)
        made = put(row, view, generation, key, stream)
        made.ordinal = ordinal
        while len(row) > 1:
            first = row[0]
            if not is_on_board(view, first.generation) or view.is_unused:  # then its words may be another use's
                break
            first.settle(True)
            del row[0]
    finally:
        end(table, collects)
    return made

cdef int sweep() except -1:
    """Drop what is known good, of streams without further records too. Before `add`: the looks may run anybody's code."""
    global sweep_at
    if row_count > sweep_at:
        drop([wait for wait in of(None) if wait.known_outcome() is True])
        sweep_at = max(<int64_t>MANY_ROWS, <int64_t>(2 * row_count))

cdef inline object place_of(view, int64_t key, uint64_t stream):
    """Of a row in a list: its use and stream; of the list's own stream, of which most are, the use alone."""
    return view if <int64_t>stream == key else (view, stream)

cdef list row_of(int64_t key, view, uint64_t stream):
    """The waits of a list for a use, on a stream; empty if there are none."""
    cdef dict rows = lists.get(key, NO_ROWS)
    return rows.get(place_of(view, key, stream), NO_ROW)

cdef Wait put(list row, view, int64_t generation, int64_t key, uint64_t stream):
    """List a wait, or find the one that is."""
    global row_count
    cdef Wait made
    cdef Py_ssize_t place = len(row)
    while place and (<Wait>row[place - 1]).generation > generation:
        place -= 1
    cdef bint is_there = place != 0 and (<Wait>row[place - 1]).generation == generation
    if is_there and (<Wait>row[place - 1]).outcome is not True:
        return row[place - 1]
    made = Wait.__new__(Wait)
    made.view, made.generation, made.key, made.stream = view, generation, key, stream
    if not row:
        lists.setdefault(key, {})[place_of(view, key, stream)] = [made]
        row_count += 1
    elif is_there:
        row[place - 1] = made
    else:
        row.insert(place, made)
    return made

cdef bint take_out(Wait wait):
    """Whether the wait was listed; it is not any more."""
    global row_count
    cdef dict rows = lists.get(wait.key, NO_ROWS)
    place = place_of(wait.view, wait.key, wait.stream)  # before anything is changed: there may be no memory for it
    cdef list row = rows.get(place, NO_ROW)
    if wait not in row:
        return False
    if len(row) > 1:
        row.remove(wait)
        return True
    del rows[place]
    row_count -= 1
    if not rows:
        del lists[wait.key]
    return True

def drop(waits):
    """Remove waits that have their outcomes: known good, or to be forgotten."""
    cdef Wait wait
    cdef list gone = list(waits)
    cdef bint collects = begin(table)
    try:
        gone = [wait for wait in gone if take_out(wait)]
    finally:
        end(table, collects)
    for wait in gone:
        if isinstance(wait.view, Released):
            with nogil:
                (<Released>wait.view).forget()

def release(Core view):
    """Remove the waits for a view, which have their outcomes. Others, without the view, take the place of the lost. If
    memory runs out, another try goes on with what is left."""
    cdef Wait wait, kept
    cdef Released left
    cdef uint64_t stream
    cdef dict released = {}
    waits = waits_on(view)
    for wait in waits:
        if isinstance(wait.outcome, Loss):
            wait.left = released.setdefault(wait.stream, wait.left or Released(view))
    enter_state(view)
    try:
        for stream, left in released.items():
            if left.marker.event == NULL:  # else an earlier try has it
                with nogil:
                    left.marker = take_unpassed(view, stream)
    finally:
        view.state.give()
    collects = begin(table)
    try:
        for wait in waits:
            if wait.left is not None and wait in row_of(wait.key, view, wait.stream):
                left = wait.left  # of one without an outcome there is none: that is not queued
                kept = put(row_of(wait.key, left, wait.stream), left, wait.generation, wait.key, wait.stream)
                kept.outcome, kept.ordinal, kept.is_queued = wait.outcome, wait.ordinal, wait.is_queued
            take_out(wait)  # only now: what cannot be listed for want of memory is not forgotten
    finally:
        end(table, collects)

# --- looks ------------------------------------------------------------------------------------------------------------

cpdef list of(key, bint only_last=False):
    """The waits of a list (None: of all lists); of each use and stream all, or only the last one."""
    cdef list row, found = []
    cdef dict rows
    cdef bint collects = begin(table)
    try:
        for rows in lists.values() if key is None else (lists.get(key, NO_ROWS),):
            for row in rows.values():
                if only_last:
                    found.append(row[len(row) - 1])
                else:
                    found.extend(row)
    finally:
        end(table, collects)
    return found

cpdef list latest(key):
    """Those that the stream's next record depends on: if the last of a use is good, so are those before it."""
    return of(key, True)

cdef list waits_on(view):
    """All waits of this process for a slot."""
    cdef Wait wait
    return [wait for wait in of(None) if wait.view is view]
