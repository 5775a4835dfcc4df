# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
# cython: freethreading_compatible=True, binding=False
"""The compiled core: what `core_python` does, and the shortcuts of record, wait, query and synchronize.

A shortcut takes the steps of the Python engine, in its order and over the same words and attributes; or it changes
nothing and says "not me", and the Python engine begins anew. So it leaves all that is rare to that one: errors, full
rings, captures, default streams, other kernels, interrupted records. Each access to a word of the board, each lock,
wake, sleep and driver call goes through a function that first looks at `hook`, which is null but in tests.
"""

from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

cdef extern from "Python.h":
    void *PyCapsule_GetPointer(object capsule, const char *name) except NULL
    int PyErr_CheckSignals() except -1
    int PyIndex_Check(object value)
    int PyLong_CheckExact(object value)
    void *PyType_GetSlot(object kind, int slot)
    const int Py_tp_new

ctypedef object (*NewFunction)(object kind, object arguments, PyObject *keywords)

cdef extern from * nogil:
    """
    #include <errno.h>
    #include <linux/futex.h>
    #include <pthread.h>
    #include <stdint.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>
    #ifndef MISTAKE
    #define MISTAKE 0 /* the tests plant some, to see that they are found */
    #endif
    static inline uint64_t ipcsync_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    static inline void ipcsync_store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
    static inline void ipcsync_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    static inline int ipcsync_swap(uint32_t *word, uint32_t old, uint32_t new) {
        return __atomic_compare_exchange_n(word, &old, new, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
    }
    static inline uint32_t ipcsync_exchange(uint32_t *word, uint32_t value) {
        return __atomic_exchange_n(word, value, __ATOMIC_ACQ_REL);
    }
    static inline void ipcsync_raise_to(int64_t *word, int64_t value) {
        int64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
        while (old < value && !__atomic_compare_exchange_n(word, &old, value, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
    }
    static inline int64_t ipcsync_now(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000000000LL + now.tv_nsec;
    }
    static inline void ipcsync_futex_wake(void *word, int private, int count) {
        syscall(SYS_futex, word, private ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE, count, 0, 0, 0);
    }
    static inline void ipcsync_futex_wait(void *word, int private, uint32_t seen, int64_t ns) {
        struct timespec limit = {ns / 1000000000LL, ns % 1000000000LL};
        syscall(SYS_futex, word, private ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT, seen, &limit, 0, 0);
    }
    static inline void ipcsync_add(int *count, int value) { __atomic_add_fetch(count, value, __ATOMIC_ACQ_REL); }
    static inline uint64_t ipcsync_thread(void) { return (uint64_t)(uintptr_t)pthread_self(); }
    """
    const int MISTAKE
    uint64_t ipcsync_load(const uint64_t *word)
    void ipcsync_store(uint64_t *word, uint64_t value)
    void ipcsync_fence()
    bint ipcsync_swap(uint32_t *word, uint32_t old, uint32_t new)
    uint32_t ipcsync_exchange(uint32_t *word, uint32_t value)
    void ipcsync_raise_to(int64_t *word, int64_t value)
    int64_t ipcsync_now()
    void ipcsync_futex_wake(void *word, bint private, int count)
    void ipcsync_futex_wait(void *word, bint private, uint32_t seen, int64_t ns)
    void ipcsync_add(int *count, int value)
    uint64_t ipcsync_thread()

cdef extern from "parking.h" nogil:
    const int64_t LOOK_LATEST_NS
    const int MOST_EVENTS
    struct patience:
        int64_t look
        int64_t nudged
        int64_t gap
    int await_work(void *event, const uint64_t *word, uint64_t wanted, int64_t until, const void *nudge, patience *last)
    bint park_for "park"(void **events, int count, const void *word)
    bint is_in_berth "is_parked"(void *event)
    int64_t rings()
    int berths_taken()
    void bind_parking(void *query, void *synchronize, void *get_context, void *set_context, void *exchange_mode)

INTERFACE = 3

cdef enum:  # of the board: `layout.py` is held against these by a test
    HEADER = 9
    INCARNATION = 0
    STATE = 1
    RECORDER = 2
    RECORDED = 8
    COMPLETED = 9
    BEHIND = 10
    LOST = 12
    S_SERIAL = 1
    S_OWNER = 9
    S_NUDGE = 10
    FIRST_SESSION = 512  # words
    LINE = 16
    OPEN = 1
    BROKEN = 2
    OWNER_DIED = 0x40000000
    MANY_MARKERS = 16
    RECENT = 8
    SLICE_NS = 50000000
    NOT_READY = 600
    MANY_LISTS = 64

LAYOUT = (HEADER, INCARNATION, STATE, RECORDER, RECORDED, COMPLETED, BEHIND, LOST, S_SERIAL, S_OWNER, S_NUDGE,
          FIRST_SESSION, LINE, OPEN, BROKEN, OWNER_DIED, MANY_MARKERS)

# --- steps ------------------------------------------------------------------------------------------------------------

cdef enum Step:
    GUARD, OWN_CLOSED, LOAD_INCARNATION, LOAD_STATE, LOAD_RECORDER, LOAD_RECORDED, LOAD_COMPLETED, ALIVE, COORDINATOR
    CAPTURING, GET_ID, LOCK, UNLOCK, EVENT_RECORD, MARK, STREAM_WAIT, WRITE_VALUE, WAIT_VALUE, EVENT_QUERY
    STORE_RECORDED, FENCE, STORE_COMPLETED, WAKE, SLEEP, LOAD_BEHIND, LOAD_LOST, AWAIT_WORK

STEPS = (
    "guard.check", "own is_closed", "load incarnation", "load state", "load recorder", "load recorded",
    "load completed", "recorder alive?", "coordinator?", "cuStreamIsCapturing", "cuStreamGetId", "lock", "unlock",
    "cuEventRecord", "mark", "cuStreamWaitEvent", "cuStreamWriteValue64", "cuStreamWaitValue64", "cuEventQuery",
    "store recorded", "fence", "store completed", "wake", "sleep", "load behind", "load lost", "await work",
)

ctypedef void (*Hook)(int) noexcept nogil
cdef Hook hook = NULL


def set_hook(uintptr_t address):
    """Have the C function there called with the number of each step, before it is taken; 0: none."""
    global hook
    hook = <Hook>address


cdef inline void step(Step name) noexcept nogil:
    if hook != NULL:
        hook(name)

# --- the driver -------------------------------------------------------------------------------------------------------

ctypedef void *Handle
ctypedef int (*Call1)(Handle) noexcept nogil
ctypedef int (*Call2)(Handle, Handle) noexcept nogil
ctypedef int (*CallWait)(Handle, Handle, unsigned int) noexcept nogil
ctypedef int (*CallStatus)(Handle, int *) noexcept nogil
ctypedef int (*CallId)(Handle, unsigned long long *) noexcept nogil
ctypedef int (*CallMode)(int *) noexcept nogil
ctypedef int (*CallValue)(Handle, unsigned long long, uint64_t, unsigned int) noexcept nogil
cdef Call2 cuEventRecord
cdef Call1 cuEventQuery
cdef CallWait cuStreamWaitEvent
cdef CallStatus cuStreamIsCapturing
cdef CallId cuStreamGetId
cdef CallMode cuThreadExchangeStreamCaptureMode
cdef CallValue cuStreamWriteValue64, cuStreamWaitValue64
cdef bint is_bound = False

FUNCTIONS = {
    "cuEventRecord": b"CUresult (CUevent, CUstream)",
    "cuEventQuery": b"CUresult (CUevent)",
    "cuStreamWaitEvent": b"CUresult (CUstream, CUevent, unsigned int)",
    "cuStreamIsCapturing": b"CUresult (CUstream, CUstreamCaptureStatus *)",
    "cuStreamGetId": b"CUresult (CUstream, unsigned PY_LONG_LONG *)",
    "cuThreadExchangeStreamCaptureMode": b"CUresult (CUstreamCaptureMode *)",
    "cuStreamWriteValue64": b"CUresult (CUstream, CUdeviceptr, cuuint64_t, unsigned int)",
    "cuStreamWaitValue64": b"CUresult (CUstream, CUdeviceptr, cuuint64_t, unsigned int)",
    "cuEventSynchronize": b"CUresult (CUevent)",
    "cuCtxGetCurrent": b"CUresult (CUcontext *)",
    "cuCtxSetCurrent": b"CUresult (CUcontext)",
}


def bind_functions(dict addresses):
    """Have the shortcuts call the C functions at these addresses; an empty dict: there are none, and no shortcuts."""
    global cuEventRecord, cuEventQuery, cuStreamWaitEvent, cuStreamIsCapturing, cuStreamGetId, is_bound
    global cuThreadExchangeStreamCaptureMode, cuStreamWriteValue64, cuStreamWaitValue64
    is_bound = False
    if not addresses:
        return
    cuEventRecord = <Call2><uintptr_t>addresses["cuEventRecord"]
    cuEventQuery = <Call1><uintptr_t>addresses["cuEventQuery"]
    cuStreamWaitEvent = <CallWait><uintptr_t>addresses["cuStreamWaitEvent"]
    cuStreamIsCapturing = <CallStatus><uintptr_t>addresses["cuStreamIsCapturing"]
    cuStreamGetId = <CallId><uintptr_t>addresses["cuStreamGetId"]
    cuThreadExchangeStreamCaptureMode = <CallMode><uintptr_t>addresses["cuThreadExchangeStreamCaptureMode"]
    cuStreamWriteValue64 = <CallValue><uintptr_t>addresses["cuStreamWriteValue64"]
    cuStreamWaitValue64 = <CallValue><uintptr_t>addresses["cuStreamWaitValue64"]
    bind_parking(
        cuEventQuery,
        <void *><uintptr_t>addresses["cuEventSynchronize"],
        <void *><uintptr_t>addresses["cuCtxGetCurrent"],
        <void *><uintptr_t>addresses["cuCtxSetCurrent"],
        cuThreadExchangeStreamCaptureMode,
    )
    is_bound = True


def bind_driver():
    """Take the driver's functions from the binding, as it chose them; why not, or an empty text."""
    try:
        from cuda.bindings import cydriver
        exported = cydriver.__pyx_capi__
        bind_functions(
            {name: <uintptr_t>PyCapsule_GetPointer(exported[name], kind) for name, kind in FUNCTIONS.items()}
        )
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

# --- waits of the host ------------------------------------------------------------------------------------------------


def park(events, uintptr_t word):
    """As in `core_python`."""
    cdef Handle handles[MOST_EVENTS]
    cdef int count = 0
    for event in events[:MOST_EVENTS] if is_bound else ():
        handles[count] = <Handle><uintptr_t>int(event)
        count += 1
    return bool(park_for(handles, count, <const void *>word))


def is_parked(event):
    """As in `core_python`."""
    return bool(is_in_berth(<Handle><uintptr_t>int(event)))


def parked():
    """As in `core_python`."""
    return berths_taken(), rings()

# --- locks ------------------------------------------------------------------------------------------------------------


cdef class Lock:
    """As `_thread.RLock`; a shortcut takes it without the GIL, and only if nobody has it."""

    cdef uint32_t word  # 0: free, 1: held, 2: held, and somebody sleeps
    cdef uint64_t owner
    cdef int64_t depth

    cdef inline bint take(self) noexcept nogil:
        if not ipcsync_swap(&self.word, 0, 1):
            return False
        self.owner = ipcsync_thread()
        self.depth = 1
        return True

    cdef inline void give(self) noexcept nogil:
        self.depth = 0
        self.owner = 0
        if ipcsync_exchange(&self.word, 0) == 2:
            ipcsync_futex_wake(&self.word, True, 1)

    def acquire(self, bint blocking=True, double timeout=-1):
        if self.owner == ipcsync_thread():
            self.depth += 1
            return True
        if self.take():
            return True
        if not blocking:
            return False
        cdef int64_t deadline = INT64_MAX if timeout < 0 or timeout > 1e9 else ipcsync_now() + <int64_t>(timeout * 1e9)
        cdef int64_t now
        while ipcsync_exchange(&self.word, 2) != 0:
            now = ipcsync_now()
            if now >= deadline:
                return False
            with nogil:
                ipcsync_futex_wait(&self.word, True, 2, min(deadline - now, <int64_t>SLICE_NS))
            PyErr_CheckSignals()
        self.owner = ipcsync_thread()
        self.depth = 1
        return True

    def release(self):
        if self.owner != ipcsync_thread():
            raise RuntimeError("cannot release un-acquired lock")
        if self.depth > 1:
            self.depth -= 1
        else:
            self.give()

    def is_mine(self):
        return self.owner == ipcsync_thread()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, kind, error, traceback):
        self.release()

# --- looks ------------------------------------------------------------------------------------------------------------


cdef class Look:
    """As in `core_python`."""

    cdef const uint8_t *fork_mark
    cdef const uint64_t *header
    cdef const uint64_t *standing
    cdef const uint64_t *running
    cdef uint64_t live[2]
    cdef object owners, slowly
    cdef bint has_mark
    cdef uint64_t sessions
    cdef public int64_t good_until, shortcuts, slow_calls

    def __init__(self, fork_mark, board, line, serial, live, slowly):
        self.owners = (fork_mark, board)
        self.fork_mark = <const uint8_t *><uintptr_t>fork_mark.address
        self.header = <const uint64_t *><uintptr_t>board.address
        self.standing = <const uint64_t *><uintptr_t>line.standing_address
        self.running = <const uint64_t *><uintptr_t>board.running_header_address
        self.live[0], self.live[1] = live, serial
        self.has_mark = board.has_mark
        self.sessions = board.sessions
        self.slowly = slowly
        self.good_until = -1

    cdef inline bint header_is_good(self) noexcept nogil:
        cdef int index
        for index in range(HEADER):
            if ipcsync_load(self.header + index) != self.running[index]:
                return False
        return True

    cdef inline bint is_good(self) noexcept nogil:
        step(GUARD)
        return (
            self.fork_mark[0]
            and ipcsync_load(self.standing) == self.live[0]
            and ipcsync_load(self.standing + 1) == self.live[1]
            and self.header_is_good()
            and ipcsync_now() <= self.good_until
        )

    cdef inline bint coordinator_is_good(self) noexcept nogil:
        step(COORDINATOR)
        return self.has_mark and self.header_is_good()

    cdef inline bint lives(self, uint64_t serial) noexcept nogil:
        """Whether the session `serial` is known to live, by its line; False too if the kernel is to be asked."""
        step(ALIVE)
        if (serial & 0xFFFF) >= self.sessions:
            return False
        cdef const uint64_t *line = self.header + FIRST_SESSION + (serial & 0xFFFF) * LINE
        cdef uint64_t owner = ipcsync_load(line + S_OWNER)  # before the serial
        return ipcsync_load(line + S_SERIAL) == serial and owner != 0 and not owner & OWNER_DIED

    def check(self):
        if not self.is_good():
            self.slowly()

# --- engines ----------------------------------------------------------------------------------------------------------


cdef struct Marker:
    uint64_t stream
    Handle event


cdef class Core:
    """As in `core_python`: what an engine is made over. Its attributes are the engine's own; no state is held twice."""

    cdef public int64_t known_complete, _lost_from, _recorded, _begun, _room, _completed
    cdef public uint64_t incarnation, base, _address
    cdef public bint is_closed, is_recorder, _is_interrupted
    cdef public int depth
    cdef public int _sleepers
    cdef patience patience
    cdef public object _lock, _record_lock
    cdef Lock lock, record_lock
    cdef uint64_t _stream, recent[RECENT]
    cdef int next_recent
    cdef Look look
    cdef public bint has_chain
    cdef uint64_t keyed  # the id of a stream, and the number of its list of waits
    cdef int64_t key
    cdef dict waits
    cdef Lock table_lock
    cdef object make_wait
    cdef bint behind_all
    cdef uint64_t *place  # of the slot's line
    cdef Handle *ring
    cdef Marker markers[MANY_MARKERS]
    cdef bint is_timeline

    def __dealloc__(self):
        free(self.ring)

    def shorten(self, look, bint is_timeline, dict waits, Lock table_lock, make_wait, bint behind_all):
        """As in `core_python`. Until then, each call is the Python engine's."""
        if is_bound and isinstance(look, Look):
            self.ring = <Handle *>calloc(self.depth, sizeof(Handle))
            self.place = <uint64_t *><uintptr_t>getattr(self, "line").address
            self.lock, self.record_lock = self._lock, self._record_lock
            self.is_timeline = is_timeline
            self.waits, self.table_lock, self.make_wait, self.behind_all = waits, table_lock, make_wait, behind_all
            self.patience.look = LOOK_LATEST_NS
            self.look = look if self.ring != NULL else None

    @property
    def _last_stream(self):
        return self._stream

    @_last_stream.setter
    def _last_stream(self, uint64_t stream):
        self._stream = self.recent[self.next_recent] = stream
        self.next_recent = (self.next_recent + 1) % RECENT

    @property
    def _last_key(self):
        return self.keyed, self.key

    @_last_key.setter
    def _last_key(self, value):
        self.keyed, self.key = value

    def _keep_event(self, int index, address):
        if self.look is not None:
            self.ring[index] = <Handle><uintptr_t>int(address)

    def _keep_marker(self, uint64_t stream, address):
        """Know the event that is recorded behind the waits on a stream; 0: it is about to be destroyed."""
        cdef int index
        cdef Handle event
        if self.look is None:
            return
        event = <Handle><uintptr_t>int(address)
        for index in range(MANY_MARKERS):
            if self.markers[index].event != NULL and self.markers[index].stream == stream:
                self.markers[index].event = event
                return
        for index in range(MANY_MARKERS):
            if self.markers[index].event == NULL:
                self.markers[index].stream = stream
                self.markers[index].event = event
                return

    def _await_work(self, event, uintptr_t word, uint64_t wanted, int64_t until, uintptr_t nudge):
        """As in `core_python`."""
        cdef Handle handle
        if self.look is None:
            return None
        handle = <Handle><uintptr_t>int(event)
        with nogil:
            await_work(handle, <const uint64_t *>word, wanted, until, <const void *>nudge, &self.patience)
        PyErr_CheckSignals()
        return True

    def _knows_complete(self, int64_t generation):
        return generation <= self.known_complete

    def _note_complete(self, int64_t generation):
        ipcsync_raise_to(&self.known_complete, generation)

    # Steps.

    cdef inline uint64_t load(self, Step name, int word) noexcept nogil:
        step(name)
        return ipcsync_load(self.place + word)

    cdef inline bint is_open(self) noexcept nogil:
        return self.load(LOAD_STATE, STATE) == OPEN

    cdef inline bint stands(self, int64_t generation) noexcept nogil:
        """Whether the generation stands behind something unsettled: then it is for the Python engine to judge."""
        cdef int64_t first = <int64_t>(self.load(LOAD_BEHIND, BEHIND) - self.base)
        return 0 < first <= generation

    cdef inline bint is_lost(self, int64_t generation) noexcept nogil:
        cdef int64_t first = <int64_t>(self.load(LOAD_LOST, LOST) - self.base)
        return 0 < first <= generation

    cdef inline bint goes_on(self, int64_t generation) noexcept nogil:
        """Whether a wait for a generation that is not complete may go on; False: not me."""
        return self.is_open() and not self.closed() and not self.stands(generation)

    cdef inline bint closed(self) noexcept nogil:
        step(OWN_CLOSED)
        return self.is_closed

    cdef inline bint take(self) noexcept nogil:
        if MISTAKE == 5:
            return True
        step(LOCK)
        return self.lock.take()

    cdef inline void give(self) noexcept nogil:
        if MISTAKE == 5:
            return
        step(UNLOCK)
        self.lock.give()

    cdef inline bint good(self) noexcept nogil:
        return self.look.is_good() and not self.closed() and self.load(LOAD_INCARNATION, INCARNATION) == self.incarnation

    cdef inline Handle event(self, int64_t generation) noexcept nogil:
        return self.ring[(generation - 1) % self.depth]

    cdef inline bint is_usable(self, Handle stream) noexcept nogil:
        cdef int status = 0
        step(CAPTURING)
        return <uintptr_t>stream > 2 and cuStreamIsCapturing(stream, &status) == 0 and status == 0

    cdef inline int done(self, int64_t generation) noexcept nogil:
        """The driver's answer, in relaxed capture mode: 0 if complete."""
        cdef int mode = 2
        cdef int result
        step(EVENT_QUERY)
        if self.event(generation) == NULL or cuThreadExchangeStreamCaptureMode(&mode) != 0:
            return -1
        result = cuEventQuery(self.event(generation))
        cuThreadExchangeStreamCaptureMode(&mode)
        return result

    cdef inline Handle marker(self, uint64_t stream) noexcept nogil:
        cdef int index
        for index in range(MANY_MARKERS):
            if self.markers[index].stream == stream and self.markers[index].event != NULL:
                return self.markers[index].event
        return NULL

    cdef inline int queue(self, Handle stream, int64_t generation) noexcept nogil:
        if self.is_timeline:
            step(WAIT_VALUE)
            return cuStreamWaitValue64(stream, self._address, self.base + generation, 0)
        step(STREAM_WAIT)
        return cuStreamWaitEvent(stream, self.event(generation), 0)

    cdef inline bint is_known(self, uint64_t stream) noexcept nogil:
        """Whether this event was recorded on the stream lately, which then is of its device."""
        cdef int index
        for index in range(RECENT):
            if self.recent[index] == stream and stream != 0:
                return True
        return False

    # record

    cdef int64_t record_on(self, Handle stream, bint only_last) noexcept nogil:
        """The generation; 0: not me; -1: recorded, but the event is not open any more. Holds the record lock.

        `only_last`: only on the stream recorded on last, which is known to have no list of waits.
        """
        cdef unsigned long long stream_id = 0
        cdef int64_t generation
        if not self.is_usable(stream) or self._begun != self._recorded or self._is_interrupted:
            return 0
        generation = self._recorded + 1
        if not self.is_timeline and generation > self._room and not self.has_room(generation):
            return 0
        step(GET_ID)
        if cuStreamGetId(stream, &stream_id) != 0 or not self.is_known(stream_id) or not self.take():
            return 0
        if (
            self.closed()
            or not self.is_open()
            or (only_last and stream_id != self._stream)
            or not self.record_and_publish(stream, stream_id, generation)
        ):
            self.give()
            return 0
        self.give()
        if MISTAKE != 2:
            self.wake()
        if MISTAKE != 3 and not self.is_open():
            return -1
        return generation

    cdef inline bint record_and_publish(self, Handle stream, uint64_t stream_id, int64_t generation) noexcept nogil:
        cdef Handle marker = NULL
        if self.is_timeline:
            marker = self.marker(stream_id)
            if marker == NULL or self._address == 0:
                return False
        elif self.event(generation) == NULL:
            return False
        if stream_id != self._stream and generation > 1:
            if not self.is_timeline and self.event(generation - 1) == NULL:
                return False
            if self.queue(stream, generation - 1) != 0:
                return False
        self._stream = stream_id
        self._begun = generation
        if MISTAKE == 1:
            self.publish(generation)
        if self.is_timeline:
            step(WRITE_VALUE)
            self._is_interrupted = cuStreamWriteValue64(stream, self._address, self.base + generation, 0) != 0
            if not self._is_interrupted:
                step(MARK)
                self._is_interrupted = cuEventRecord(marker, stream) != 0
        else:
            step(EVENT_RECORD)
            self._is_interrupted = cuEventRecord(self.event(generation), stream) != 0
        if self._is_interrupted:  # the driver's error: the next call, which is this one's slow half, makes it again
            return False
        self._recorded = generation
        if MISTAKE == 2:
            self.wake()
        if MISTAKE != 1:
            self.publish(generation)
        return True

    cdef inline void publish(self, int64_t generation) noexcept nogil:
        step(STORE_RECORDED)
        ipcsync_store(self.place + RECORDED, self.base + generation)
        if MISTAKE != 6:
            step(FENCE)
            ipcsync_fence()  # before the look at `state`: the coordinator stores that, then looks who sleeps

    cdef inline void wake(self) noexcept nogil:
        step(WAKE)
        ipcsync_futex_wake(self.place + RECORDED, False, 0x7FFFFFFF)

    cdef bint has_room(self, int64_t generation) noexcept nogil:
        cdef int64_t done
        if not self.take():
            return False
        done = self._completed
        if not self.closed() and done != self._recorded:
            if self.done(self._recorded) == 0:
                done = self._recorded
            else:
                while done + 1 < self._recorded and self.done(done + 1) == 0:
                    done += 1
            self.store(done)
        self.give()
        return generation <= self._room

    cdef inline void store(self, int64_t done) noexcept nogil:
        if done <= self._completed or not self.look.coordinator_is_good():
            return
        if self.load(LOAD_STATE, STATE) != BROKEN:
            step(STORE_COMPLETED)
            ipcsync_store(self.place + COMPLETED, self.base + done)
        self._completed = done
        self._room = done + self.depth
        ipcsync_raise_to(&self.known_complete, done)

    cdef int64_t try_record(self, stream) except -9:
        cdef int64_t generation
        cdef uintptr_t address
        cdef bint only_last
        if self.look is None or not self.is_recorder or not self.good() or self.is_chained():
            return 0
        only_last = bool(self.waits)
        if only_last and (self.keyed != self._stream or self.behind_all or self.key in self.waits):
            return 0  # also where it is not known what the stream recorded on last stands behind
        address = address_of(stream)
        if address == 0:
            return 0
        if not self.record_lock.take():
            return 0
        with nogil:
            generation = self.record_on(<Handle>address, only_last)
        self.record_lock.give()
        if generation > 0:
            self.look.shortcuts += 1
        elif generation < 0:
            self._raise_no_record()
        return generation

    # wait, query, synchronize

    cdef inline bint is_chained(self) noexcept nogil:
        """Whether something that was recorded here stands behind others, of which the Python engine judges first."""
        return self.is_recorder and self.has_chain

    cdef inline int on_board(self, int64_t generation) noexcept nogil:
        """1: complete by the board or by memory; 0: not so; -1: not me."""
        cdef uint64_t count
        cdef int64_t complete, recorded
        if generation <= self.known_complete:
            return 1
        if generation >= self._lost_from:
            return -1
        count = self.load(LOAD_COMPLETED, COMPLETED)
        if self.load(LOAD_STATE, STATE) == BROKEN or count == INT64_MAX:
            return -1
        complete = <int64_t>(count - self.base)
        if self.is_timeline and self.stands(complete):
            return -1
        if complete < generation:
            return -1 if self.is_lost(generation) or self.closed() else 0
        recorded = <int64_t>(self.load(LOAD_RECORDED, RECORDED) - self.base)
        if self.closed():
            return -1
        complete = min(complete, recorded)
        if generation > complete:
            return 0
        ipcsync_raise_to(&self.known_complete, min(complete, self._lost_from - 1))
        return 1

    cdef inline bint recorder_lives(self) noexcept nogil:
        cdef uint64_t serial = self.load(LOAD_RECORDER, RECORDER)
        return serial == 0 or self.is_recorder or self.look.lives(serial)

    cdef int ask(self, int64_t generation) noexcept nogil:
        """As `query`, behind its first looks: 1: complete; 0: not so; -1: not me."""
        cdef int result
        if <int64_t>(self.load(LOAD_RECORDED, RECORDED) - self.base) < generation:
            return 0 if self.goes_on(generation) else -1
        if self.is_timeline:
            return -1
        if MISTAKE == 7 and not self.recorder_lives():
            return -1
        if not self.take():
            return -1
        result = -1 if self.closed() else self.done(generation)
        self.give()
        if result == 0:
            if self.stands(generation) or (MISTAKE != 7 and not self.recorder_lives()):
                return -1
            if self.load(LOAD_STATE, STATE) == BROKEN or self.closed() or not self.look.coordinator_is_good():
                return -1
            ipcsync_raise_to(&self.known_complete, generation)
            if self.is_recorder and self.take():
                if not self.closed():
                    self.store(generation)
                self.give()
            return 1
        return 0 if result == NOT_READY and self.goes_on(generation) else -1

    cdef int try_query(self, int64_t generation) except -9:
        cdef int result = -1
        if self.look is None or not self.good() or self.is_chained():
            return -1
        if generation <= self.known_complete:
            result = 1
        else:
            with nogil:
                result = self.on_board(generation)
                if result == 0:
                    result = self.ask(generation)
        if result >= 0:
            self.look.shortcuts += 1
        return result

    cdef bint await_record(self, int64_t generation, int64_t slice_ns) noexcept nogil:
        """Sleep for one slice at most, until the generation is recorded; False: not me."""
        cdef uint64_t recorded
        while True:
            recorded = self.load(LOAD_RECORDED, RECORDED)
            if <int64_t>(recorded - self.base) >= generation:
                return not self.closed()
            if not self.goes_on(generation):
                return False
            if slice_ns <= 0:
                return False
            step(SLEEP)
            ipcsync_futex_wait(self.place + RECORDED, False, <uint32_t>recorded, slice_ns)
            if self.load(LOAD_RECORDED, RECORDED) == recorded:
                return False

    cdef int await_done(self, int64_t generation, int64_t until) noexcept nogil:
        """Sleep until the driver says that a recorded generation is complete; then as `query`."""
        cdef Handle event = NULL
        if not self.is_timeline:
            if not self.take():
                return -1
            event = NULL if self.closed() else self.event(generation)
            if event != NULL:
                ipcsync_add(&self._sleepers, 1)  # whoever would destroy the import looks for them under the lock
            self.give()
            if event == NULL:
                return -1
        step(AWAIT_WORK)
        if not await_work(
            event, self.place + COMPLETED, self.base + generation, until, self.nudge_of_recorder(), &self.patience
        ):
            generation = 0
        if event != NULL:
            ipcsync_add(&self._sleepers, -1)
        return self.ask_anew(generation) if generation and self.good() else -1

    cdef inline const void *nudge_of_recorder(self) noexcept nogil:
        cdef uint64_t line = self.load(LOAD_RECORDER, RECORDER) & 0xFFFF
        return self.look.header + FIRST_SESSION + line * LINE + S_NUDGE if line < self.look.sessions else NULL

    cdef inline int ask_anew(self, int64_t generation) noexcept nogil:
        cdef int result = self.on_board(generation)
        return self.ask(generation) if result == 0 and not self.is_timeline else result

    cdef bint try_synchronize(self, int64_t generation, int64_t slice_ns) except -1:
        cdef int result = -1
        cdef int64_t until
        if self.look is None or not self.good() or self.is_chained():
            return False
        with nogil:
            until = ipcsync_now() + slice_ns
            result = self.on_board(generation)
            if result == 0:
                result = -1
                if self.await_record(generation, slice_ns) and self.good():
                    result = self.ask_anew(generation)
                    if result == 0 and slice_ns > 0:
                        result = self.await_done(generation, until)
        if result == 1:
            self.look.shortcuts += 1
        return result == 1

    cdef int look_before(self, Handle stream, int64_t generation, int64_t slice_ns, uint64_t *id) noexcept nogil:
        """1: complete; 2: to be queued on the stream with that id; 0: not me."""
        cdef unsigned long long stream_id = 0
        cdef int result
        if not self.is_usable(stream):
            return 0
        result = self.on_board(generation)
        if result != 0:
            return 1 if result == 1 else 0
        if <int64_t>(self.load(LOAD_RECORDED, RECORDED) - self.base) < generation or self.closed():
            if not self.await_record(generation, slice_ns):
                return 0
        if not self.is_open():
            return 0
        step(GET_ID)
        if cuStreamGetId(stream, &stream_id) != 0:
            return 0
        id[0] = stream_id
        return 2

    cdef int queue_behind(self, Handle stream, uint64_t stream_id, int64_t generation) noexcept nogil:
        """1: queued; 0: not me; -1: queued, and something is wrong."""
        cdef Handle marker
        cdef bint is_queued = False
        if not self.take():
            return 0
        marker = self.marker(stream_id)
        if not self.closed() and marker != NULL and (
            self._address != 0 if self.is_timeline else self.event(generation) != NULL
        ):
            if MISTAKE == 4:
                step(MARK)
                cuEventRecord(marker, stream)
            is_queued = self.queue(stream, generation) == 0
            if is_queued and MISTAKE != 4:
                step(MARK)
                is_queued = cuEventRecord(marker, stream) == 0
        self.give()
        if not is_queued:
            return 0
        if MISTAKE != 8 and (not self.is_open() or self.stands(generation)):
            return -1
        return 1 if self.recorder_lives() and not self.closed() and self.look.coordinator_is_good() else -1

    cdef bint tell_of_wait(self, uint64_t stream_id, int64_t generation) except -1:
        """Before a wait is queued: have the stream's next record stand behind it, as `queued.add`; False: not me."""
        cdef dict held
        if stream_id != self.keyed or self.behind_all:
            return self._tell_of_wait(stream_id, generation)
        me = <uintptr_t><PyObject *>self
        held = self.waits.get(self.key)
        last = None if held is None else held.get(me)
        if last is not None and last.generation >= generation and last.verdict is not True:
            return True
        if len(self.waits) >= MANY_LISTS:
            return self._tell_of_wait(stream_id, generation)
        wait = self.make_wait(self, generation, self.key, stream_id)
        if not self.table_lock.take():
            return self._tell_of_wait(stream_id, generation)
        try:
            held = self.waits.get(self.key)
            if held is None:
                self.waits[self.key] = {me: wait}
            else:
                held[me] = wait
        finally:
            self.table_lock.give()
        return True

    cdef bint try_wait(self, stream, int64_t generation, int64_t slice_ns) except -1:
        cdef uintptr_t address
        cdef uint64_t stream_id = 0
        cdef int result
        if self.look is None or not self.good():
            return False
        address = address_of(stream)
        if address == 0:
            return False
        with nogil:
            result = self.look_before(<Handle>address, generation, slice_ns, &stream_id)
        if result == 2:
            if not self.tell_of_wait(stream_id, generation):
                return False
            with nogil:
                result = self.queue_behind(<Handle>address, stream_id, generation)
            if result < 0:
                self._look_after_wait(generation)
        if result != 0:
            self.look.shortcuts += 1
        return result != 0


cdef object our_stream = None  # the class Stream


cdef uintptr_t address_of(stream) except? 0:
    """The CUstream address of anybody's stream; 0 if that is for the Python engine to find, as of None."""
    if stream is None:
        return 0
    if type(stream) is our_stream:
        return <uintptr_t>stream._pointer
    if PyLong_CheckExact(stream):
        return <uintptr_t>stream if 4096 <= stream < 1 << 64 else 0  # a small number may be meant for another argument
    if PyIndex_Check(stream) or isinstance(stream, type):
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        if not isinstance(answer, tuple) or len(answer) != 2 or answer[0] != 0:
            return 0
        address = answer[1]
    else:
        address = getattr(stream, "cuda_stream", None)
    return <uintptr_t>address if PyLong_CheckExact(address) and 0 <= address < 1 << 64 else 0


# --- what users hold --------------------------------------------------------------------------------------------------


cdef object NOTHING = ()


cdef inline Core core_of(attached):
    engine = None if attached is None else attached.engine
    return <Core>engine if isinstance(engine, Core) else None


cdef inline void left(Core core):
    """Count a call that is left to the Python engine."""
    if core is not None and core.look is not None:
        core.look.slow_calls += 1


cdef class PointBase:
    cdef object attached
    cdef Core core
    cdef public int64_t _generation

    def __init__(self, attached, int64_t generation):
        self._attached = attached
        self._generation = generation

    @property
    def _attached(self):
        return self.attached

    @_attached.setter
    def _attached(self, attached):
        self.core = core_of(attached)  # which one has for life
        self.attached = attached

    def wait(self, stream=None, *, timeout=None, ahead=False):
        cdef Core core = self.core
        # With a timeout only what is recorded: how long it may sleep is for the Python engine to count.
        if core is not None and ahead is False and (timeout is None or timeout >= 0) and core.try_wait(
            stream, self._generation, SLICE_NS if timeout is None else 0
        ):
            return
        left(core)
        self._slow_wait(stream, timeout=timeout, ahead=ahead)

    def query(self):
        cdef Core core = self.core
        cdef int result = -1 if core is None else core.try_query(self._generation)
        if result >= 0:
            return result == 1
        left(core)
        return self._slow_query()

    def synchronize(self, timeout=None):
        cdef Core core = self.core
        cdef double seconds = 0.05 if timeout is None else timeout
        cdef int64_t began = ipcsync_now()
        if core is None or not seconds >= 0:
            self._slow_synchronize(timeout)
        elif not core.try_synchronize(self._generation, <int64_t>(min(seconds, 0.05) * 1e9)):
            left(core)
            core.synchronize(self._generation, timeout, began)


cdef class EventBase:
    cdef public object _attached, _point_type
    cdef object engine
    cdef Core core
    cdef public bint _is_recorder, _is_open

    @property
    def _engine(self):
        return self.engine

    @_engine.setter
    def _engine(self, engine):
        self.core = <Core>engine if isinstance(engine, Core) else None
        self.engine = engine

    def record(self, stream=None, *, timeout=None, after=NOTHING):
        cdef PointBase point
        cdef int64_t generation
        if self._is_open and self._is_recorder and timeout is None and after is NOTHING and self.core is not None:
            generation = self.core.try_record(stream)
            if generation > 0:
                point = (<NewFunction>PyType_GetSlot(self._point_type, Py_tp_new))(self._point_type, NOTHING, NULL)
                point.attached = self._attached
                point.core = self.core
                point._generation = generation
                return point
            left(self.core)
        return self._slow_record(stream, timeout=timeout, after=after)


def shortened(names, stream_class=None):
    """As in `core_python`."""
    def shorten(cls):
        for name in names.split():
            slow = cls.__dict__[name]
            if name != "__init__":
                setattr(cls, f"_slow_{name}", slow)
            delattr(cls, name)
        return cls
    return shorten


def know_streams(cls):
    """Which class has the address of its stream in `_pointer`."""
    global our_stream
    our_stream = cls
