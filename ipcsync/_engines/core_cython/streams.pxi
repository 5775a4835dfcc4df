# Streams: anybody's, by its address; the markers that this process records there, and which list its waits are in.

cdef extern from "Python.h":
    int PyIndex_Check(object value)
    int PyLong_CheckExact(object value)
    unsigned long PyLong_AsUnsignedLong(object value)
    void PyErr_Clear()

cdef enum:
    MANY_MARKERS = 16

cdef object plain_stream = None  # the first class that was seen without `__cuda_stream__`: to look for that again is slow

cdef inline uintptr_t unsigned(value) noexcept:
    """An address in an int; 0 if it is anything else: a small number is a default stream's, which belongs to a context,
    or may be meant for another argument."""
    if not PyLong_CheckExact(value):
        return 0
    result = PyLong_AsUnsignedLong(value)
    if result == <unsigned long>-1:  # no address either
        PyErr_Clear()
        return 0
    return <uintptr_t>result if result >= 4096 else 0

cdef uintptr_t address_of(stream) except? 0:
    """The CUstream address of anybody's stream; 0 if that is for the Python engine to find, as of None."""
    global plain_stream
    if stream is None:
        return 0
    if type(stream) is Stream:
        return unsigned(stream._pointer)
    if PyLong_CheckExact(stream):
        return unsigned(stream)
    if PyIndex_Check(stream) or isinstance(stream, type):
        return 0
    protocol = None if type(stream) is plain_stream else getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        address = unsigned(getattr(stream, "cuda_stream", None))
        if plain_stream is None and address != 0:
            plain_stream = type(stream)
        return address
    answer = protocol() if callable(protocol) else protocol
    if not isinstance(answer, tuple) or len(<tuple>answer) != 2:
        return 0
    version = (<tuple>answer)[0]
    return unsigned((<tuple>answer)[1]) if PyLong_CheckExact(version) and not version else 0

# --- the turns of a use's calls ---------------------------------------------------------------------------------------

cdef int enter_calls(Core self, int64_t deadline, int64_t generation, timeout, str what, bint waits=False) except -1:
    """Take the turn of calls that queue work, which `leave_calls` gives; 1 if another thread had it; 2, and it is not
    taken, once what the call `waits` for is complete. WaitTimeout once `deadline` is over. A call within another one of
    its thread, which has a turn too, waits half a second: two may wait for each other. On the thread that beats, this beats."""
    cdef bint is_within = ipcsync_turns(0) > 0
    step(b"lock")
    cdef bint is_taken = not self.calls.take()
    if is_taken:
        if self.calls.mine():
            self.raise_reentered()
        if is_within:
            deadline = min(deadline, ipcsync_now() + WITHIN_NS)
        while not self.calls.await_turn(min(deadline, ipcsync_now() + <int64_t>SLICE_NS), self.guard):
            check_queued(self, generation)  # that thread may stand in the driver for ever
            if waits and is_complete(self, generation):
                return 2
            if ipcsync_now() >= deadline:
                if is_within:
                    self.raise_reentered()
                self.raise_timeout(generation, timeout, what)
    ipcsync_turns(1)
    return is_taken

cdef inline void leave_calls(Core self) noexcept:
    step(b"unlock")
    ipcsync_turns(-1)
    self.calls.give()

cdef bint enter_state(Core self) except -1:
    if not self.state.take():
        if self.state.mine():
            self.raise_reentered()
        self.state.await_turn(INT64_MAX)
    return True

cdef bint try_state(Core self) noexcept nogil:
    """As `enter_state`, without the GIL, which its holder may need; False if this thread has it, or one for long."""
    return self.state.take() or (not self.state.mine() and self.state.take_within(LONGEST_NS))

# --- what differs between the engines ---------------------------------------------------------------------------------
#
# event: a ring of CUDA events, of which generation g is a record of number (g - 1) mod depth. It may be full, and has
# hazards; the recorder stores what is complete.
# timeline: a word of the board, of which generation g is the value base + g. The recorder's stream writes it.

cdef struct Refusal:  # the driver's first error, 0: none, from calls of which the stream may have work all the same
    int error
    const char *call

cdef inline int tell(Refusal *refusal, int result, const char *call) noexcept nogil:
    if refusal.error == 0:
        refusal.error, refusal.call = result, call
    return result

cdef inline Handle event_of(Core self, int64_t generation) noexcept nogil:
    return self.ring[(generation - 1) % self.depth]

cdef inline bint has_import(Core self, int64_t generation) noexcept nogil:
    """Whether what a driver's call for `generation` needs is there."""
    return event_of(self, generation) != NULL if self.has_ring else self._address != 0

cdef int open_imports = 0  # of all uses
cdef int openings = 0  # threads within the driver's call for one

def import_count():
    """How many imports this process has: each use opens and destroys its own."""
    return open_imports

cdef int open_import(Core self, int64_t generation) except -1:
    """Have it be there. No lock is held while the driver opens one: of two threads' the first one's stays."""
    cdef bint is_spare
    if has_import(self, generation):
        return 0
    enter_state(self)
    is_unused = self.is_unused
    if not is_unused:
        ipcsync_add(&self.sleepers, 1)  # a release waits for it
    self.state.give()
    if is_unused:
        self.raise_closed()
    ipcsync_add(&openings, 1)
    try:
        if not self.has_ring:
            self._address = self.open_word()
            return 0
        index = (generation - 1) % self.depth
        event = <Handle><uintptr_t>int(self.open_event(index))
        with nogil:
            self.state.take_within(FOREVER)
            is_spare = self.ring[index] != NULL
            if not is_spare:
                self.ring[index] = event
                ipcsync_add(&open_imports, 1)
            self.state.give()
            if is_spare:
                cuEventDestroy(event)
    finally:
        ipcsync_add(&openings, -1)
        ipcsync_add(&self.sleepers, -1)

cdef int close_imports(Core self) except -1:
    """Destroy those of a use that is unused: none is opened any more. If the driver refuses, the next try goes on."""
    for index in range(self.depth if self.has_ring else 0):
        event, self.ring[index] = self.ring[index], NULL
        if event != NULL:
            ipcsync_add(&open_imports, -1)
            with nogil:
                result = cuEventDestroy(event)
            if result != 0:
                self.raise_driver(result, "cuEventDestroy")

cdef inline int give_wait(Core self, Handle stream, int64_t generation, Refusal *refusal) noexcept nogil:
    """Have the stream wait for `generation`; the driver's result."""
    if self.has_ring:
        step(b"cuStreamWaitEvent")
        return tell(refusal, cuStreamWaitEvent(stream, event_of(self, generation), 0), b"cuStreamWaitEvent")
    step(b"cuStreamWaitValue64")
    result = cuStreamWaitValue64(stream, self._address, self.base + generation, self._flags)
    return tell(refusal, result, b"cuStreamWaitValue64")

# --- markers ----------------------------------------------------------------------------------------------------------

cdef uint64_t nothing = 0  # the word `over` of a marker behind which nothing was queued yet: its stream is past all

cdef inline Marker *marker_of(Core self, uint64_t stream) noexcept nogil:
    """The stream's marker; null if it has none, or if that was found complete."""
    for index in range(self.marker_count):
        if self.markers[index].stream == stream:
            return &self.markers[index]
    return NULL

cdef int make_marker(Core self, Handle handle, uint64_t stream, int ordinal) except -1:
    """Have a marker for the stream. If that is of another device than it was said to be, the driver refuses the marker
    here, before anything is given to the stream. Called with the turn. A use that is closed gets none: it may be released,
    and then nobody would destroy it."""
    if marker_of(self, stream) != NULL or self.is_closed:
        return 0
    if self.marker_count >= MANY_MARKERS:
        drop_markers(self, False)  # a program may make a stream for each piece of work
    event = <Handle><uintptr_t>int(self.create_event(<uintptr_t>handle, ordinal))
    try:
        with nogil:
            step(b"try marker")
            result = cuEventRecord(event, handle)
        if result != 0:
            forget_stream(stream)
            self.raise_driver(result, "cuEventRecord")
        enter_state(self)
    except BaseException:
        cuEventDestroy(event)
        raise
    if self.marker_count % MANY_MARKERS == 0:
        grown = <Marker *>realloc(self.markers, (self.marker_count + MANY_MARKERS) * sizeof(Marker))
        if grown == NULL:
            self.state.give()
            cuEventDestroy(event)
            raise MemoryError
        self.markers = grown
    self.markers[self.marker_count] = Marker(stream, event, NULL, <uintptr_t>&nothing, 0)
    self.marker_count += 1
    self.state.give()

cdef inline int mark(Core self, Handle handle, uint64_t stream) noexcept nogil:
    """Record the stream's marker behind the work just queued; the driver's result."""
    cdef Marker *marker = marker_of(self, stream)
    step(b"mark")
    result = cuEventRecord(marker.event, handle)
    if marker.over == <uintptr_t>&nothing or <uintptr_t>marker.handle == 1:
        marker.over = 0
    marker.handle = NULL if result == 0 else <Handle>(<uintptr_t>handle or 1)  # 0 is a default stream's too
    return result

cdef bint renew_markers(Core self) noexcept:
    """Record the markers that are owed, or were refused; whether every stream has its marker now. With the turn."""
    cdef bint is_settled = True
    with nogil:  # the driver may need the GIL for another's call
        for index in range(self.marker_count):
            marker = &self.markers[index]
            if marker.handle != NULL and not is_fed(marker):  # up to 2 it may mean another stream on this thread
                if <uintptr_t>marker.handle <= 2 or mark(self, marker.handle, marker.stream) != 0:
                    is_settled = False
    return is_settled

cdef bint drop_markers(Core self, bint all) except -1:
    """Destroy complete ones (`all`: any), unless their streams may have later work; whether none is left. With the turn."""
    cdef int index = 0
    enter_state(self)
    with nogil:
        while index < self.marker_count:
            marker = &self.markers[index]
            if all or is_past(marker):
                cuEventDestroy(marker.event)
                self.marker_count -= 1
                self.markers[index] = self.markers[self.marker_count]
            else:
                index += 1
    self.state.give()
    return self.marker_count == 0

cdef Marker take_unpassed(Core self, uint64_t stream) noexcept nogil:
    """The marker of a stream that is not past all waits for this slot, to be destroyed. With the turn and `state`."""
    cdef Marker taken = Marker(0, NULL, NULL, 0, 0)
    cdef Marker *marker = marker_of(self, stream)
    if marker != NULL and not is_past(marker):
        taken = marker[0]
        self.marker_count -= 1
        marker[0] = self.markers[self.marker_count]
    return taken

# --- what is known of streams, and which list a stream's waits are in -------------------------------------------------

cdef enum:
    SEEN = 1024

cdef uint64_t seen[SEEN]  # of streams: each has an id that no other one of this process ever has

cdef inline uint64_t known_stream(uint64_t stream) noexcept nogil:
    """What was seen of a stream, 0: nothing; its id << 9 | its device << 2 | 2 once its kind is known | 1 if it blocks."""
    known = ipcsync_load(&seen[stream % SEEN])
    return known if known >> 9 == stream else 0

cdef inline void note_stream(uint64_t stream, int ordinal, uint64_t kind) noexcept nogil:
    known = stream << 9 | <uint64_t>ordinal << 2 | kind
    if known >> 9 == stream and ordinal < 128:  # of a larger number the driver is asked each time
        ipcsync_store(&seen[stream % SEEN], known)

cdef inline void forget_stream(uint64_t stream) noexcept nogil:
    ipcsync_store(&seen[stream % SEEN], 0)

cdef inline int device_of(uint64_t stream) noexcept nogil:
    """The device of a stream; -1 if that is not known."""
    known = known_stream(stream)
    return <int>(known & 0x1FF) >> 2 if known != 0 else -1

cdef int64_t key_of(Core self, Handle handle, uint64_t stream, int ordinal) except? -1:
    """The key of a stream's list: of the blocking streams of device `ordinal`, which wait for each other, it is one."""
    cdef uint64_t known = known_stream(stream)
    cdef unsigned int flags = 0
    if not known & 2:
        with nogil:
            step(b"cuStreamGetFlags")
            result = cuStreamGetFlags(handle, &flags)
        if result != 0:
            self.raise_driver(result, "cuStreamGetFlags")
        kind = 2 | (not flags & NON_BLOCKING)
        note_stream(stream, ordinal if known == 0 else device_of(stream), kind)
        known = kind
    return -1 - ordinal if known & 1 else <int64_t>stream

cdef inline bint is_usable(Core self, Handle handle) noexcept nogil:
    cdef int status = 0
    step(b"cuStreamIsCapturing")
    return cuStreamIsCapturing(handle, &status) == 0 and status == 0

cdef int check_usable(Core self, Handle handle, str what) except -1:
    """Raise StreamCapturing if `what` on this stream would go into a graph, or break a capture."""
    if not is_usable(self, handle):
        self.refuse_capturing(<uintptr_t>handle, what)

cdef uint64_t id_of(Core self, Handle handle) except 0 nogil:
    cdef unsigned long long stream = 0
    step(b"cuStreamGetId")
    result = cuStreamGetId(handle, &stream)
    if result != 0:
        with gil:
            self.raise_driver(result, "cuStreamGetId")
    return stream

cdef inline bint is_fed(const Marker *marker) noexcept nogil:
    """Whether a lane's stream is past what was queued there, by the lane's word: other work may stand before a marker."""
    return marker.over != 0 and <int64_t>ipcsync_load(<const uint64_t *>marker.over) >= marker.number

cdef inline bint is_past(const Marker *marker) noexcept nogil:
    """Whether the stream is past what was queued there, as far as is known; asks the driver."""
    return is_fed(marker) or (marker.handle == NULL and query_relaxed(marker.event) in (0, CONTEXT_GONE))
