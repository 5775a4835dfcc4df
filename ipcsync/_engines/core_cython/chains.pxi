# What a record stands behind: `chains.py` for the common case, in which nothing is lost and all can be seen.

from libc.string cimport memset

cdef struct Links:
    uint64_t newest  # loaded before all looks
    uint64_t bits[MOST_BITS]


cdef enum Fate:
    NOT_ME = -1, PENDING, GOOD, OWN


cdef class Chained(Waits):

    cdef inline uint64_t own(self) noexcept nogil:
        return self.load(LOAD_RECORDER, RECORDER) & 0xFFFF

    cdef inline void begin(self, Links *links) noexcept nogil:
        memset(links, 0, sizeof(Links))
        step(LOAD_NEWEST)
        links.newest = ipcsync_load(self.session.header + NEWEST)

    cdef Fate look_behind(self, State view, int64_t generation, Links *links) noexcept nogil:
        """The fate of what a wait is for, by the board. If it is pending, the bits of whom it depends on are added."""
        cdef uint64_t serial
        cdef int result
        if view.session is None or view.session.header != self.session.header or view.bit_words > MOST_BITS:
            return NOT_ME
        result = (<Queries>view).on_board(generation)
        if result != 0:
            return GOOD if result == 1 else NOT_ME
        if <int64_t>(view.load(LOAD_RECORDED, RECORDED) - view.base) < generation or not view.is_open():
            return NOT_ME
        serial = view.load(LOAD_RECORDER, RECORDER)
        if serial == self.load(LOAD_RECORDER, RECORDER):  # of this session itself: it counts unless it is chained too
            return NOT_ME if view.stands(generation) or view.closed() else OWN
        if serial == 0 or not self.session.lives(serial) or not self.session.is_live(serial):
            return NOT_ME
        links.bits[(serial & 0xFFFF) // 64] |= <uint64_t>1 << (serial & 63)
        if view.stands(generation) and not view.bits_are_good(serial & 0xFFFF, links.bits):
            return NOT_ME
        return NOT_ME if view.closed() else PENDING

    cdef list waits_before(self, int64_t key, Links *links):
        """The waits of a stream's list that are pending, with the bits of whom they depend on; None: not me."""
        cdef Fate fate
        held = self.waits.get(key)
        pending = []
        known = []
        for wait in () if held is None else list(held.values()):
            if wait.verdict is True:
                known.append(wait)
            elif wait.verdict is not None or not isinstance(wait.view, Queries):
                return None
            elif wait.view is not self:
                fate = self.look_behind(wait.view, wait.generation, links)
                if fate == NOT_ME:
                    return None
                if fate == GOOD:
                    wait.verdict = True
                    known.append(wait)
                elif fate == PENDING:
                    if not wait.is_queued:  # another thread is about to
                        return None
                    pending.append(wait)
        if known:
            self.drop(known)
        return pending

    cdef bint are_listed(self, int64_t key, list pending):
        """Whether these waits are in the stream's list still, and so get a verdict before their uses are released."""
        held = self.waits.get(key)
        for wait in pending:
            if held is None or held.get(wait.place) is not wait:
                return False
        return True

    cdef list entries_with(self, list entries, int64_t generation, uint64_t stream, list pending, Links *links):
        """The chain's entries, and one for a record of `generation` on `stream` that stands behind these waits."""
        cdef int word
        if entries and not self.bits_are_good(self.own(), NULL):  # `as_of` would say that they were
            links.bits[self.own() // 64] |= <uint64_t>1 << (self.own() & 63)
        bits = 0
        for word in range(self.bit_words):
            if links.bits[word]:
                bits |= (<object>links.bits[word]) << (64 * word)
        waits = tuple(pending)
        first, rest = generation, list(entries)
        if rest:
            last = rest[len(rest) - 1]
            if last.stream == stream and last.waits == waits and last.bits == bits:
                first = last.first
                rest.pop()
        rest.append(self.make_entry(first, generation, stream, waits, bits))
        return rest

    cdef void store_links(self, const Links *links, int64_t generation) noexcept nogil:
        """Store what the record of `generation` will stand behind, before it is made."""
        cdef uint64_t bits
        cdef int word
        if MISTAKE == 11:
            self.store_as_of(links)
        for word in range(self.bit_words):
            bits = ipcsync_load(self.bits + word)
            if links.bits[word] & ~bits:
                step(STORE_BITS)
                ipcsync_store(self.bits + word, bits | links.bits[word])
        if MISTAKE != 11:
            self.store_as_of(links)
        if <int64_t>(self.load(LOAD_BEHIND, BEHIND) - self.base) <= 0:
            step(STORE_BEHIND)
            ipcsync_store(self.place + BEHIND, self.base + generation)
        step(FENCE)
        ipcsync_fence()  # before the driver's call: a GPU may show the record without this thread

    cdef inline void store_as_of(self, const Links *links) noexcept nogil:
        step(STORE_AS_OF)
        ipcsync_store(self.place + AS_OF, links.newest)
