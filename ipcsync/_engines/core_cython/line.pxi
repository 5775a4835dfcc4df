# A slot's line on the board: what its generations depend on, as recorder and waiters read it, and who lives.
#
# Waiters read here whether all is well. If they cannot see that, they decide nothing, and wake the recorder to resolve:
# docs/design/protocol.md says why that is enough. The model is tests/models/chain_model.py.

cdef extern from "Python.h":
    unsigned long long PyLong_AsUnsignedLongLongMask(object number)

cdef enum:
    MOST_BITS = 1024  # words: as many sessions as a board has at most
    FIRST_PAUSE_NS = 50000
    LONGEST_PAUSE_NS = 50000000
    SHORTEST_SLICE_NS = 1000000

cdef inline bint is_unchanged(const uint64_t *header, const uint64_t *running) noexcept nogil:
    """Whether a board's header is that of its running coordinator."""
    for index in range(HEADER):
        if ipcsync_load(header + index) != running[index]:
            return False
    return True

@cython.final
cdef class SessionCheck:
    """Whether a session can be used: no fork, its line `live` and `serial`'s, the header unchanged, the lease in time.

    `good_until` is CLOCK_MONOTONIC in ns; the session's lease writes it, and -1 once there is a problem; `slowly` then
    says which. `shortcuts` counts the calls that came straight here, `slow_calls` those that Python looked at first.
    """

    cdef const uint8_t *fork_mark
    cdef const uint64_t *header
    cdef const uint64_t *running
    cdef const uint64_t *state_and_serial
    cdef uint64_t serial
    cdef object kept, slowly
    cdef public int64_t good_until, shortcuts, slow_calls

    def __init__(self, fork_mark, board, line, serial, slowly):
        self.kept = fork_mark, board
        self.fork_mark = <const uint8_t *><uintptr_t>fork_mark.address
        self.header = <const uint64_t *><uintptr_t>board.address
        self.running = <const uint64_t *><uintptr_t>board.running_header_address
        self.state_and_serial = <const uint64_t *><uintptr_t>line.state_and_serial_address
        self.serial, self.slowly = serial, slowly
        self.good_until = -1

    cdef inline bint is_good(self) noexcept nogil:
        step(b"guard.check")
        return (
            self.fork_mark[0]
            and ipcsync_load(self.state_and_serial) == LIVE
            and ipcsync_load(self.state_and_serial + 1) == self.serial
            and is_unchanged(self.header, self.running)
            and ipcsync_now() <= self.good_until
        )

    def check(self):
        """Call `slowly` unless all is well. Costs about 0.05 µs."""
        if not self.is_good():
            self.slowly()

cdef class Line:
    """One slot's line, whose generations are counted from `base`. Thread-safe. Nothing here asks the kernel."""

    cdef public object board
    cdef const uint64_t *header
    cdef const uint64_t *running
    cdef bint has_mark
    cdef uint64_t sessions  # how many lines of sessions the board has
    cdef uint64_t *place  # of the slot's line
    cdef uint64_t *bits
    cdef int bit_words
    cdef public uint64_t base
    cdef int64_t next_ns, pause_ns
    cdef readonly int64_t slice_ns  # how long a wait may sleep without a look: shorter while a resolution is awaited

    def __init__(self, board, line, uint64_t base):
        self.board, self.base = board, base
        self.header = <const uint64_t *><uintptr_t>board.address
        self.running = <const uint64_t *><uintptr_t>board.running_header_address
        self.has_mark, self.sessions = board.has_mark, board.sessions
        self.place = <uint64_t *><uintptr_t>line.address
        self.bits = <uint64_t *><uintptr_t>line.bits_address
        self.bit_words = board.layout.bit_words
        self.pause_ns, self.slice_ns = FIRST_PAUSE_NS, LONGEST_PAUSE_NS

    def first_unsettled(self):
        return first_unsettled(self)

    def is_lost(self, int64_t generation):
        return is_lost(self, generation)

    def is_clear(self, int64_t generation):
        return is_clear(self, generation)

# --- sessions ---------------------------------------------------------------------------------------------------------

cdef inline bint coordinator_is_good(Line self) noexcept nogil:
    """Whether the coordinator is known to serve; False too if the kernel is to be asked."""
    step(b"coordinator?")
    return self.has_mark and is_unchanged(self.header, self.running)

cdef inline const uint64_t *session_of(Line self, uint64_t serial) noexcept nogil:
    return self.header + FIRST_SESSION + (serial & 0xFFFF) * LINE

cdef inline bint lives(Line self, uint64_t serial) noexcept nogil:
    """Whether the session `serial` is known to live, by its line; False too if the kernel is to be asked."""
    cdef const uint64_t *line = session_of(self, serial)
    step(b"recorder alive?")
    if (serial & 0xFFFF) >= self.sessions:
        return False
    owner = ipcsync_load(line + S_OWNER)  # before the serial
    return ipcsync_load(line + S_SERIAL) == serial and owner != 0 and not owner & OWNER_DIED

cdef inline bint session_is_good(Line self, uint64_t index, uint64_t valid_as_of) noexcept nogil:
    """Whether that line's session lives, and is among the first `valid_as_of` sessions."""
    cdef const uint64_t *line = session_of(self, index)
    step(b"session good?")
    if index >= self.sessions:
        return False
    owner = ipcsync_load(line + S_OWNER)  # in this order: a later session has a larger count
    if owner == 0 or owner & OWNER_DIED or ipcsync_load(line + S_STATE) != LIVE:
        return False
    return ipcsync_load(line + S_SERIAL) >> 16 <= valid_as_of

# --- dependencies -----------------------------------------------------------------------------------------------------

cdef inline int64_t first_unsettled(Line self) noexcept nogil:
    """The first generation that depends on something that its recorder has not settled, 0 for none."""
    return max(<int64_t>(load(self.place, FIRST_DEPENDENT) - self.base), 0)

cdef inline bint depends(Line self, int64_t generation) noexcept nogil:
    return 0 < first_unsettled(self) <= generation

cdef inline bint is_lost(Line self, int64_t generation) noexcept nogil:
    """Whether the recorder has said so, of it or of one before."""
    return 0 < <int64_t>(load(self.place, LOST) - self.base) <= generation

cdef bint is_clear(Line self, int64_t generation) noexcept nogil:
    """Whether all is well with what `generation` depends on; else its recorder is asked to resolve."""
    if not depends(self, generation):
        return True
    recorder = load(self.place, RECORDER)
    if are_good(self, recorder & 0xFFFF, NULL):
        calm(self)
        return True
    ring(self, recorder)
    return False

cdef bint are_good(Line self, uint64_t own, uint64_t *copy) noexcept nogil:
    """Whether the bit of line `own` is not set, and all sessions that the bits name live: then `copy` (or null) has them."""
    valid_as_of = load(self.place, VALID_AS_OF)
    step(b"load bits")
    for word in range(self.bit_words):
        rest = ipcsync_load(self.bits + word)
        if copy != NULL:
            copy[word] = rest
        while rest:
            index = <uint64_t>word * 64 + lowest_of(rest)
            if index == own or not session_is_good(self, index, valid_as_of):
                return False
            rest &= rest - 1
    return True

cdef inline void calm(Line self) noexcept nogil:
    """A resolution came: the next one is asked for at once again."""
    self.pause_ns, self.slice_ns = FIRST_PAUSE_NS, LONGEST_PAUSE_NS

cdef void ring(Line self, uint64_t recorder) noexcept nogil:
    """Wake the recorder to resolve: at once, then at growing intervals until it has."""
    cdef int64_t now = ipcsync_now()
    if now < self.next_ns:
        return
    if now - self.next_ns > LONGEST_PAUSE_NS:  # for another resolution than the last time
        self.pause_ns = FIRST_PAUSE_NS
    self.next_ns = now + self.pause_ns
    self.slice_ns = max(self.pause_ns, <int64_t>SHORTEST_SLICE_NS)
    self.pause_ns = min(2 * self.pause_ns, <int64_t>LONGEST_PAUSE_NS)
    if (recorder & 0xFFFF) < self.sessions:
        ipcsync_futex_wake(<void *>(session_of(self, recorder) + S_DOORBELL), False, 0x7FFFFFFF)

cdef void pause(Line self, int64_t deadline) noexcept nogil:
    """Sleep until the next look is due; a loss wakes at once."""
    cdef uint64_t recorded = ipcsync_load(self.place + RECORDED)
    cdef int64_t left = min(self.next_ns, deadline) - ipcsync_now()
    if left > 0:
        sleep_on(self.place, recorded, left)

cdef inline bint sleep_on(uint64_t *place, uint64_t recorded, int64_t ns) noexcept nogil:
    """Sleep while the line's `recorded` is that; whether a signal ended it. From then on each record wakes waiters."""
    # It stays 1: each store takes the line from the recorder's cache.
    if load(place, AWAITED) == 0:
        store(place, AWAITED, 1)
    step(b"sleep")
    return ipcsync_futex_wait(place + RECORDED, False, <uint32_t>recorded, ns)

# --- for the recorder -------------------------------------------------------------------------------------------------

cdef void store_bits(Line self, number, bint adds):
    for word in range(self.bit_words):
        if adds and not number:
            break
        before = ipcsync_load(self.bits + word)
        after = PyLong_AsUnsignedLongLongMask(number) | (before if adds else 0)
        number = number >> 64 if number else 0
        if after != before:
            step(b"store bits")
            ipcsync_store(self.bits + word, after)

cdef void store_first(Line self, int64_t generation) noexcept nogil:
    """Store the first generation that depends on something, 0 for none; after the bits, before its record."""
    store(self.place, FIRST_DEPENDENT, self.base + generation if generation else 0)
    fence()  # before the driver's call: a GPU may show the record without this thread
