# What a slot's generations depend on: the words on the board, as recorder and waiters read them.
#
# B's stream waited for A's point, then B recorded n: n counts only if A's point counts. Only the recorder knows what it
# queued, so it alone resolves its event. Waiters read here whether all is well. If they cannot see that, they decide
# nothing, and wake the recorder to resolve.
#
# The slot's bits name the sessions that it depends on, directly or through others; the recorder's own bit says that
# only the recorder can resolve. The kernel marks a session, or its state is not LIVE any more, before a driver reports
# its work wrongly and before its words are released. So bits that are found good *after* n was found complete prove that no
# wait before n ended wrongly. The model is tests/models/chain_model.py.

from libc.string cimport memcpy

cdef extern from "Python.h":
    unsigned long long PyLong_AsUnsignedLongLongMask(object number)

cdef enum:
    MOST_BITS = 1024  # words: as many sessions as a board has at most
    FIRST_PAUSE_NS = 50000
    LONGEST_PAUSE_NS = 50000000
    SHORTEST_SLICE_NS = 1000000


@cython.final
cdef class Dependencies:
    """One slot's words of dependencies; generations are counted from `base`. Thread-safe."""

    cdef Sessions sessions
    cdef uint64_t *place  # of the slot's line
    cdef uint64_t *bits
    cdef int bit_words
    cdef uint64_t base
    cdef int64_t next_ns, pause_ns
    cdef public int64_t slice_ns  # how long a wait may sleep without a look: shorter while a resolution is awaited

    def __init__(self, board, line, uint64_t base):
        self.sessions = Sessions(board)
        self.place = <uint64_t *><uintptr_t>line.address
        self.bits = <uint64_t *><uintptr_t>line.bits_address
        self.bit_words = line.bits_length
        self.base = base
        self.pause_ns = FIRST_PAUSE_NS
        self.slice_ns = LONGEST_PAUSE_NS

    cpdef int64_t first_unsettled(self) noexcept nogil:
        """The first generation that depends on something that its recorder has not settled, 0 for none."""
        return max(<int64_t>(load(self.place, FIRST_DEPENDENT) - self.base), 0)

    cpdef bint depends(self, int64_t generation) noexcept nogil:
        return 0 < self.first_unsettled() <= generation

    cpdef int64_t first_lost(self) noexcept nogil:
        """The first generation that the recorder has said to be lost, 0 for none."""
        return max(<int64_t>(load(self.place, LOST) - self.base), 0)

    cpdef bint is_lost(self, int64_t generation) noexcept nogil:
        return 0 < self.first_lost() <= generation

    cdef bint are_good(self, uint64_t own, uint64_t *copy) noexcept nogil:
        """Whether the bit of line `own` is not set, and every session that the bits name lives.

        If so, they are in `copy`, unless that is null.
        """
        cdef uint64_t bits[MOST_BITS]
        cdef uint64_t valid_as_of, index, rest
        cdef int word
        valid_as_of = load(self.place, VALID_AS_OF)
        step(b"load bits")
        for word in range(self.bit_words):
            bits[word] = ipcsync_load(self.bits + word)
        for word in range(self.bit_words):
            rest = bits[word]
            while rest:
                index = <uint64_t>word * 64 + ipcsync_lowest(rest)
                if index == own or not self.sessions.session_is_good(index, valid_as_of):
                    return False
                rest &= rest - 1
        if copy != NULL:
            memcpy(copy, bits, self.bit_words * sizeof(uint64_t))
        return True

    cpdef bint is_clear(self, uint64_t recorder) noexcept nogil:
        """Whether all is well with what the slot depends on; `recorder` is the recorder's serial."""
        if not self.are_good(recorder & 0xFFFF, NULL):
            return False
        self.calm()
        return True

    cdef inline void calm(self) noexcept nogil:
        """A resolution came: the next one is asked for at once again."""
        self.pause_ns = FIRST_PAUSE_NS
        self.slice_ns = LONGEST_PAUSE_NS

    cpdef void ring(self, uint64_t recorder) noexcept nogil:
        """Wake the recorder to resolve: at once, then at growing intervals until it has."""
        cdef int64_t now = ipcsync_now()
        if now < self.next_ns:
            return
        if now - self.next_ns > LONGEST_PAUSE_NS:  # for another resolution than the last time
            self.pause_ns = FIRST_PAUSE_NS
        self.next_ns = now + self.pause_ns
        self.slice_ns = max(self.pause_ns, <int64_t>SHORTEST_SLICE_NS)
        self.pause_ns = min(2 * self.pause_ns, <int64_t>LONGEST_PAUSE_NS)
        if (recorder & 0xFFFF) < self.sessions.sessions:
            ipcsync_futex_wake(<void *>(self.sessions.line(recorder) + S_DOORBELL), False, 0x7FFFFFFF)

    cdef void pause(self, int64_t deadline) noexcept nogil:
        """Sleep until the next look is due; a loss wakes at once."""
        cdef uint64_t recorded = ipcsync_load(self.place + RECORDED)
        cdef int64_t left = min(self.next_ns, deadline) - ipcsync_now()
        if left > 0:
            sleep_on(self.place, recorded, left)

    # --- for the recorder ---------------------------------------------------------------------------------------------

    cdef void store_bits(self, number, bint adds=False):
        cdef uint64_t before, after
        cdef int word
        for word in range(self.bit_words):
            if adds and not number:
                break
            before = ipcsync_load(self.bits + word)
            after = PyLong_AsUnsignedLongLongMask(number) | (before if adds else 0)
            number = number >> 64 if number else 0
            if after != before:
                step(b"store bits")
                ipcsync_store(self.bits + word, after)

    cdef void store_first(self, int64_t generation) noexcept nogil:
        """Store the first generation that depends on something, 0 for none; after the bits, before its record."""
        store(self.place, FIRST_DEPENDENT, self.base + generation if generation else 0)
        fence()  # before the driver's call: a GPU may show the record without this thread


cdef inline bint sleep_on(uint64_t *place, uint64_t recorded, int64_t ns) noexcept nogil:
    """Sleep while the line's `recorded` is that; whether a signal ended it. From then on each record wakes waiters."""
    # It stays 1: each store takes the line from the recorder's cache.
    if load(place, AWAITED) == 0:
        store(place, AWAITED, 1)
    step(b"sleep")
    return ipcsync_futex_wait(place + RECORDED, False, <uint32_t>recorded, ns)
