# The waits that this process has queued: for each stream, those that its next record depends on.
#
# All clients of the process share these lists. A wait leaves its list once it is known good. A lost one stays until
# `drop`, also when its use is released, and no record on the stream is possible meanwhile. So what is listed no more has
# its outcome, and may be asked for it once its use is released. Each change is one section under `table`.

cdef enum:
    MANY_LISTS = 64

cdef dict NO_LISTS = {}
cdef dict lists = {}  # by stream, then by use and stream, since blocking streams share one: in the order of generations
cdef Lock table = Lock()
cdef int64_t sweep_at = MANY_LISTS
cdef int list_count = 0  # of `lists`: while there are none, a record looks no further


cdef class Wait:
    """One wait that was queued, for `generation` of what `view` sees. Its `outcome` is None while open, then True or a
    Loss, for good.

    `key` is its list, `stream` the id of the stream in whose order it was queued, 0 if that is not known. It is listed
    before the driver's call, and `is_queued` after it: what ended before that was never behind it.
    """

    cdef public object view, outcome
    cdef public int64_t generation, key
    cdef public uint64_t stream
    cdef public bint is_queued

    def __init__(self, view, int64_t generation, int64_t key, uint64_t stream):
        self.view, self.generation, self.key, self.stream = view, generation, key, stream

    @property
    def label(self):
        """What it waits for, in a text."""
        return f"generation {self.generation} of {self.view.label}"

    def is_on(self, int ordinal):
        """Whether its stream is one of the device's, and may not be past it yet."""
        return ordinal == (-1 - self.key if self.key < 0 else self.view.ordinal_of(self.stream))

    cdef object look(self):
        cdef object view = self.view
        cdef bint is_use
        if self.outcome is None:
            is_use = isinstance(view, Slot)
            outcome = (<Slot>view).find_outcome(self.generation) if is_use else view.outcome_of(self.generation)
            # If the use was released meanwhile, the words just read may be the slot's next use's. The wait has its
            # outcome then, unless it was listed later: for such a one nothing was queued.
            is_released = (<Slot>view).is_released if is_use else view.is_released
            if self.outcome is None:
                self.outcome = is_released or outcome
        return self.outcome

    def known_outcome(self):
        """The outcome by the board and this process's memory."""
        return self.look()

    def resolved(self):
        """The outcome that a waiter would get now; asks the driver."""
        if self.look() is None and self.view.accepts(self.generation) and self.outcome is None:
            self.outcome = True
        return self.outcome

    def behind(self, loss):
        """The loss of a record that depends on it."""
        return loss.behind(self.label)

    def is_passed(self):
        """Whether its stream is past it; asks the driver."""
        return self.view.has_passed(self.stream)


# --- changes ----------------------------------------------------------------------------------------------------------


cpdef Wait add(int64_t key, Slot view, int64_t generation, uint64_t stream):
    """Have the stream's next record depend on `generation`; called before the wait is queued."""
    cdef Wait first
    cdef Wait made = Wait.__new__(Wait)
    cdef list listed
    cdef bint collects
    made.view, made.generation, made.key, made.stream = view, generation, key, stream
    collects = begin(table)
    try:
        listed = list_for(made)
        made = put(listed, made)
        while len(listed) > 1:
            first = listed[0]
            if not view.is_on_board(first.generation) or view.is_unused:  # then its words may be another use's
                break
            first.outcome = True
            del listed[0]
    finally:
        end(table, collects)
    if list_count > sweep_at:  # including streams without further records
        sweep()
    return made


cdef list list_for(Wait made):
    """The list that a wait goes into."""
    global list_count
    cdef tuple place = (made.view, made.stream)
    cdef dict held = lists.get(made.key)
    cdef list listed
    if held is None:
        held = lists[made.key] = {}
        list_count = len(lists)
    listed = held.get(place)
    if listed is None:
        listed = held[place] = []
    return listed


cdef Wait put(list listed, Wait made):
    """List a wait, or find the one that is."""
    cdef Py_ssize_t place = len(listed)
    while place and (<Wait>listed[place - 1]).generation > made.generation:
        place -= 1
    if place and (<Wait>listed[place - 1]).generation == made.generation:
        if (<Wait>listed[place - 1]).outcome is not True:
            return listed[place - 1]
        place -= 1
        del listed[place]
    listed.insert(place, made)
    return made


cdef bint take_out(Wait wait):
    """Whether the wait was listed; it is not any more."""
    global list_count
    cdef list listed = (<dict>lists.get(wait.key, NO_LISTS)).get((wait.view, wait.stream))
    if listed is None or wait not in listed:
        return False
    listed.remove(wait)
    if not listed:
        del lists[wait.key][wait.view, wait.stream]
    if not lists[wait.key]:
        del lists[wait.key]
    list_count = len(lists)
    return True


cdef void sweep():
    """Forget the waits that are known good."""
    global sweep_at
    drop([wait for wait in of(None) if wait.known_outcome() is True])
    sweep_at = max(<int64_t>MANY_LISTS, <int64_t>(2 * list_count))


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
        if isinstance(wait.view, Streams):
            (<Streams>wait.view).forget(wait.stream)


# --- looks ------------------------------------------------------------------------------------------------------------


cdef list in_lists(key, bint only_last):
    """The waits of a list (None: of all lists); of each use and stream all, or only the last one."""
    cdef bint collects = begin(table)
    found = []
    try:
        for held in list(lists.values()) if key is None else (lists.get(key, NO_LISTS),):
            for listed in (<dict>held).values():
                if not only_last:
                    found.extend(<list>listed)
                elif <list>listed:
                    found.append((<list>listed)[-1])
    finally:
        end(table, collects)
    return found


cpdef list of(key):
    """The waits in a stream's list; None: in all."""
    return in_lists(key, False)


cpdef list latest(key):
    """Those that the stream's next record depends on: if the last of a use is good, so are those before it."""
    return in_lists(key, True)


def waits_on(view):
    """All waits of this process for a slot."""
    cdef Wait wait
    return [wait for wait in of(None) if wait.view is view]


def has_any():
    """Whether any wait is listed."""
    return list_count != 0
