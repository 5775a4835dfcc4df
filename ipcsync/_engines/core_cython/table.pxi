# The waits that this process has queued: for each stream, those that its next record stands behind.
#
# All clients of the process share these lists. A wait leaves its list once it is known good. A lost one stays until
# `drop`, and no record on the stream is possible meanwhile. Each change is one section under `table`.

cdef enum:
    MANY_LISTS = 64

cdef dict lists = {}  # by stream, then by place
cdef Lock table = Lock()
cdef int64_t sweep_at = MANY_LISTS
cdef int list_count = 0  # of `lists`: while there are none, a record looks no further
cdef dict holders = {}  # other holders of waits, by the ids of their references
cdef object NO_STREAMS = frozenset()


cdef class Wait:
    """One wait that was queued, for `generation` of what `view` sees. Its `verdict` is None while open, then True or a
    Loss, for good.

    `key` is its list, `stream` the id of the stream in whose order it was queued, 0 if that is not known. It is listed
    before the driver's call, and `is_queued` after it: what ended before that was never behind it. `others` are further
    streams of its list, for whose waits for this generation or an earlier one it stands too. `since` is the earliest
    generation that it stands for: if that is open when this one is lost, it is still waited for. `place` is its key
    within its list: one for each view.
    """

    cdef public object view, verdict, others, place
    cdef public int64_t generation, key, since
    cdef public uint64_t stream
    cdef public bint is_queued

    def __init__(self, view, int64_t generation, int64_t key, uint64_t stream):
        self.view, self.generation, self.key, self.stream = view, generation, key, stream
        self.since = generation
        self.place = <uintptr_t><PyObject *>view
        self.others = NO_STREAMS

    @property
    def label(self):
        """What it waits for, in a text."""
        return f"generation {self.generation} of {self.view.label}"

    @property
    def name(self):
        """The event's name."""
        return self.view.name

    def is_for(self, view):
        """Whether it waits for a generation of this view."""
        return self.view is view

    def holds_up(self, loss):
        """Whether streams may stand still for ever behind it, lost by `loss`: nobody releases them; asks the driver.

        This session's own record ends, unless it stands behind something lost itself.
        """
        is_own = self.view.is_recorder and loss.cause != "behind"
        return self.view.kind == "event" and self.stream != 0 and not is_own and not self.is_passed(0)

    def is_on(self, int ordinal):
        """Whether its stream is one of the device's, and may not be past it yet."""
        return ordinal == (-1 - self.key if self.key < 0 else self.view.ordinal_of(self.stream))

    def known(self):
        """The verdict by the board and this process's memory."""
        if self.verdict is None:
            fate = self.view.fate(self.generation)
            # If the use was released meanwhile, the words just read may be the slot's next use's. The wait has its
            # verdict then, unless it was listed later: for such a one nothing was queued.
            is_released = self.view.is_released
            if self.verdict is None:
                self.verdict = is_released or fate
        return self.verdict

    def judged(self):
        """The verdict that a waiter would get now; asks the driver."""
        if self.known() is None and self.view.accepts(self.generation) and self.verdict is None:
            self.verdict = True
        return self.verdict

    def behind(self, loss):
        """The loss of a record that stands behind it."""
        return loss.behind(self.label)

    def is_passed(self, mine):
        """Whether all streams that it stands for are past it, `mine` aside; asks the driver."""
        return all([self.view.has_passed(stream) for stream in (self.others | {self.stream}) - {mine, 0}])

    def open_before(self):
        """Of a lost one: the last open generation before, for which it stands; 0 if there is none."""
        return self.view.open_before(self.generation, self.since)

    def end(self):
        """It is not listed any more, for good."""


cdef class Lost(Wait):
    """A lost wait whose use was released: it keeps the verdict and its text, and what shows who is past it.

    If the coordinator is lost, a use is released although some streams are not.
    """

    cdef object text, event
    cdef bint is_releasable, has_ended
    cdef Lock asking  # held while the driver is asked about a marker
    cdef int ordinal
    cdef dict unpassed

    def __init__(self, Wait wait):
        self.asking = Lock()
        self.place = <uintptr_t><PyObject *>self  # a later use may get the id of the released one
        self.generation, self.since, self.key, self.stream = wait.generation, wait.since, wait.key, wait.stream
        self.is_queued, self.others, self.verdict = wait.is_queued, wait.others, wait.verdict
        self.text, self.event = wait.label, wait.name
        self.is_releasable = wait.view.kind == "timeline"
        self.ordinal = wait.view.ordinal_of(wait.stream)
        self.unpassed = wait.view.give_unpassed(wait.others | {wait.stream})

    @property
    def label(self):
        return self.text

    @property
    def name(self):
        return self.event

    def is_for(self, view):
        return False

    def holds_up(self, loss):
        return not self.is_releasable and not self.is_passed(0)

    def is_on(self, int ordinal):
        return ordinal == (-1 - self.key if self.key < 0 else self.ordinal)

    def known(self):
        return self.verdict

    def is_passed(self, mine):
        return all([self.is_complete(<uintptr_t>marker) for stream, marker in self.unpassed.items() if stream != mine])

    cdef bint is_complete(self, uintptr_t marker):
        cdef bint is_complete
        with nogil:
            self.asking.take_soon()
            is_complete = self.has_ended or query_relaxed(<Handle>marker) == 0
            self.asking.give()
        return is_complete

    def open_before(self):
        """0: a use is released once its earlier generations are judged, or by a lost coordinator, which loses all."""
        return 0

    def end(self):
        """Destroy the markers, complete or not."""
        cdef uintptr_t marker
        with nogil:
            self.asking.take_soon()
            self.has_ended = True  # from here on nobody asks
            self.asking.give()
        for marker in self.unpassed.values():
            with nogil:
                cuEventDestroy(<Handle>marker)


# --- changes ----------------------------------------------------------------------------------------------------------


cdef inline Wait listed_at(int64_t key, object place):
    held = lists.get(key)
    return None if held is None else (<dict>held).get(place)


cdef inline bint stands_for(Wait wait, int64_t generation, uint64_t stream):
    """Whether a listed wait stands for one for `generation` on `stream` too."""
    if wait.verdict is True or wait.generation < generation:
        return False
    # Blocking streams share a list: a wait that one of them did not get is not called queued when another gets it.
    return wait.generation > generation or wait.is_queued or wait.stream == stream


cdef Wait add_wait(int64_t key, object view, int64_t generation, uint64_t stream):
    """Have the stream's next record stand behind `generation`; called before the wait is queued.

    The listed wait, which may be an earlier one, and for a later generation.
    """
    cdef object place = <uintptr_t><PyObject *>view
    cdef Wait made = listed_at(key, place)
    cdef bint collects
    if made is not None and made.stream == stream and stands_for(made, generation, stream) and made.since <= generation:
        return made  # nothing changes, so nothing is locked
    made = Wait(view, generation, key, stream)
    collects = begin(table)
    try:
        made = put(made)
    finally:
        end(table, collects)
    if list_count > sweep_at:  # including streams without further records
        sweep()
    return made


cdef Wait put(Wait made):
    """List a wait in place of the one of its view; or have that one stand for it too."""
    global list_count
    cdef Wait listed = listed_at(made.key, made.place)
    if listed is not None and stands_for(listed, made.generation, made.stream):
        listed.since = min(listed.since, made.since)
        streams = made.others | {made.stream}
        if not streams <= listed.others | {listed.stream}:
            listed.others |= streams - {listed.stream}
        return listed
    if listed is not None and listed.verdict is not True:
        made.since = min(made.since, listed.since)
        if listed.others or listed.stream != made.stream:
            made.others = (made.others | listed.others | {listed.stream}) - {made.stream}
    lists.setdefault(made.key, {})[made.place] = made
    list_count = len(lists)
    return made


cdef bint take_out(Wait wait):
    """Whether the wait was listed; it is not any more."""
    global list_count
    cdef dict held = lists.get(wait.key)
    if held is None or held.get(wait.place) is not wait:
        return False
    del held[wait.place]
    if not held:
        del lists[wait.key]
    list_count = len(lists)
    return True


cdef void sweep():
    """Forget the waits that are known good."""
    global sweep_at
    drop([wait for wait in everything() if wait.known() is True])
    sweep_at = max(<int64_t>MANY_LISTS, <int64_t>(2 * list_count))


def add(int64_t key, view, int64_t generation, uint64_t stream):
    """Have the stream's next record stand behind `generation`; called before the wait is queued."""
    return add_wait(key, view, generation, stream)


def drop(waits):
    """Remove waits that are known good, or to be forgotten."""
    cdef list gone = list(waits)
    cdef bint collects = begin(table)
    try:
        gone = [wait for wait in gone if take_out(wait)]
    finally:
        end(table, collects)
    for wait in gone:
        wait.end()


def set_aside(waits):
    """Have these lost waits stand for no other one, earlier or later, so that `drop` forgets them alone."""
    cdef Wait wait, kept
    cdef bint collects
    for wait in list(waits):
        earlier = wait.open_before()
        kept = Wait(wait.view, earlier, wait.key, wait.stream) if earlier else None
        if kept is not None:
            kept.since, kept.others, kept.is_queued = min(wait.since, kept.since), wait.others, wait.is_queued
        collects = begin(table)
        try:
            if take_out(wait):  # else it was forgotten meanwhile
                wait.place = <uintptr_t><PyObject *>wait
                put(wait)
                if kept is not None:
                    put(kept)
        finally:
            end(table, collects)


def release(view):
    """Remove the waits for a view, which have their verdicts; of the lost ones a `Lost` stays."""
    cdef Wait wait
    cdef bint collects
    for wait in everything():
        if not wait.is_for(view):
            continue
        lost = Lost(wait) if isinstance(wait.verdict, Loss) else None  # one without a verdict is not queued
        collects = begin(table)
        try:
            if take_out(wait) and lost is not None:
                put(lost)
        finally:
            end(table, collects)


# --- looks ------------------------------------------------------------------------------------------------------------


def fill(list found, key):
    """Add the waits of a list (None: of all) to `found`."""
    cdef bint collects = begin(table)
    try:
        for held in list(lists.values()) if key is None else [lists.get(key, {})]:
            found.extend((<dict>held).values())
    finally:
        end(table, collects)


def of(key):
    """The waits that the stream's next record stands behind."""
    found = []
    fill(found, key)
    return found


def everything():
    """The waits of all streams of this process."""
    return of(None)


def hold(holder):
    """Have the waits of `holder` found as long as it lives. Another thread may look meanwhile."""
    reference = weakref.ref(holder, lambda gone: holders.pop(id(gone), None))
    holders[id(reference)] = reference


def waits_on(view):
    """All waits of this process for a slot."""
    waits = everything()  # first: waits go from lists to holders
    for reference in list(holders.values()):
        holder = reference()
        if holder is not None:
            waits.extend(holder.waits())
    return [wait for wait in waits if wait.is_for(view)]


def has_any():
    """Whether any wait is listed."""
    return list_count != 0


cdef class Gathered:
    """Waits that a record is about to stand behind, or the host waits for.

    They get their verdicts before the uses they are for are released. So one that another takes the place of in its list
    is not forgotten meanwhile.
    """

    cdef list found
    cdef object __weakref__

    def __init__(self):
        self.found = []
        hold(self)

    def add(self, key):
        """Add the waits of a list; None: of all."""
        fill(self.found, key)

    def keep(self, is_kept):
        """Forget the others."""
        self.found = [wait for wait in self.found if is_kept(wait)]

    def waits(self):
        """All of them."""
        return self.found
