# One slot as an engine has it: its state, and each step that is taken on it.

from libc.stdlib cimport calloc, free

cdef enum:
    RECENT = 8
    MOST_BITS = 64  # words: a board for 4096 sessions
    NOT_READY = 600


cdef struct Marker:
    uint64_t stream
    Handle event


cdef struct Refusal:  # the driver's errors from calls of which the stream may have work all the same; 0: none
    int write
    int record


cdef inline bint is_refused(const Refusal *refusal) noexcept nogil:
    return refusal.write != 0 or refusal.record != 0


cdef class State:
    """The attributes of an engine, which are its own: no state is held twice. And the steps, one function for each."""

    cdef int64_t complete
    cdef public int64_t _lost_from, _recorded, _begun, _completed
    cdef public int64_t _room  # up to this generation a record has nothing to wait for
    cdef public uint64_t incarnation, base, _address
    cdef public bint is_closed, is_recorder, _is_interrupted
    cdef public uint64_t _unmarked, _unmarked_id  # of a stream that may have work of a refused record, and no marker behind it
    cdef public int depth
    cdef public int _sleepers  # shortcuts that sleep on an import of this use, which may not be destroyed meanwhile
    cdef patience patience
    cdef public object _lock, _record_lock
    cdef Lock lock, record_lock
    cdef uint64_t _stream
    cdef uint64_t recent[RECENT]
    cdef int next_recent
    cdef SessionCheck session
    cdef public bint has_chain  # whether anything recorded here stands behind something not settled, or lost
    cdef ipcsync_pair lists[RECENT]  # streams, and the numbers of their lists of waits, which never change
    cdef uint64_t last_list
    cdef dict waits
    cdef list changed
    cdef Lock table_lock
    cdef object drop, make_wait, chain, make_entry
    cdef bint behind_all
    cdef uint64_t *place  # of the slot's line
    cdef uint64_t *bits
    cdef int bit_words
    cdef uint8_t *visits
    cdef bint has_visits
    cdef Handle *ring
    cdef Marker markers[MANY_MARKERS]
    cdef bint is_timeline

    def __dealloc__(self):
        free(self.ring)

    def shorten(self, session, bint is_timeline, links):
        """Begin to take shortcuts, with `compiled.Links`, if the driver's functions are bound. Until then, each call is the Python engine's."""
        if is_bound and isinstance(session, SessionCheck):
            line = getattr(self, "line")
            self.ring = <Handle *>calloc(self.depth, sizeof(Handle))
            self.place = <uint64_t *><uintptr_t>line.address
            self.bits = <uint64_t *><uintptr_t>line.bits_address
            self.bit_words = line.bits_length
            self.visits = <uint8_t *><uintptr_t>line.visits_address
            self.lock, self.record_lock = self._lock, self._record_lock
            self.is_timeline = is_timeline
            self.waits, self.changed = links.waits, links.changed
            self.table_lock, self.drop = links.lock, links.drop
            self.make_wait, self.make_entry = links.make_wait, links.make_entry
            self.chain, self.behind_all = links.chain, links.behind_all
            self.patience.look = LOOK_LATEST_NS
            self.session = session if self.ring != NULL else None

    @property
    def _last_stream(self):
        return self._stream

    @_last_stream.setter
    def _last_stream(self, uint64_t stream):
        self._stream = self.recent[self.next_recent] = stream
        self.next_recent = (self.next_recent + 1) % RECENT

    @property
    def known_complete(self):
        return self.known()

    @property
    def _last_key(self):
        cdef uint64_t stream = 0
        cdef int64_t key = 0
        self.newest_list(&stream, &key)
        return stream, key

    @_last_key.setter
    def _last_key(self, value):
        """With the lock; the rest may be read meanwhile, without it."""
        cdef uint64_t stream, last = self.last_list
        cdef int64_t key, known
        cdef uint64_t index
        stream, key = value
        for index in range(RECENT):
            if self.is_list_of(index, stream, &known):
                break
        else:
            index = (last + 1) % RECENT
            ipcsync_put_pair(&self.lists[index], stream, <uint64_t>key)
        ipcsync_store(&self.last_list, index)

    def _note_visits(self, bint found):
        """Remember whether the recorder's last look at the visits found any: then the Python engine looks next too."""
        self.has_visits = found

    def _keep_event(self, int index, address):
        """Remember the CUevent of the ring at `index`."""
        if self.session is not None:
            self.ring[index] = <Handle><uintptr_t>int(address)

    def keep_marker(self, uint64_t stream, address):
        """Know the event that is recorded behind the waits on a stream; 0: it is about to be destroyed."""
        cdef int index
        cdef Handle event
        if self.session is None:
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
        """Sleep until `event` is complete, the 64-bit word at that address has reached `wanted`, or `until` in ns.

        Without an event (0) it waits for the word only. `nudge` is the address of the recorder's nudge, which is woken
        if the wait takes long. None if there are no shortcuts; else the caller looks again.
        """
        cdef Handle handle
        if self.session is None:
            return None
        handle = <Handle><uintptr_t>int(event)
        with nogil:
            await_work(handle, <const uint64_t *>word, wanted, until, <const void *>nudge, &self.patience)
        PyErr_CheckSignals()
        return True

    def _knows_complete(self, int64_t generation):
        return generation <= self.known()

    def _note_complete(self, int64_t generation):
        """Remember that everything up to `generation` is complete; of two threads, neither undoes the other's."""
        ipcsync_raise_to(&self.complete, generation)

    cdef inline int64_t known(self) noexcept nogil:
        return <int64_t>ipcsync_load(<const uint64_t *>&self.complete)

    cdef inline uint64_t load(self, Step name, int word) noexcept nogil:
        step(name)
        return ipcsync_load(self.place + word)

    cdef inline bint is_open(self) noexcept nogil:
        return self.load(LOAD_STATE, STATE) == OPEN

    cdef inline bint stands(self, int64_t generation) noexcept nogil:
        """Whether the generation stands behind something unsettled."""
        cdef int64_t first = <int64_t>(self.load(LOAD_BEHIND, BEHIND) - self.base)
        return 0 < first <= generation

    cdef inline bint is_lost(self, int64_t generation) noexcept nogil:
        cdef int64_t first = <int64_t>(self.load(LOAD_LOST, LOST) - self.base)
        return 0 < first <= generation

    cdef bint bits_are_good(self, uint64_t own, uint64_t *more) noexcept nogil:
        """Whether the line `own` is not among the slot's bits, and every session that they name lives.

        If so, they are added to `more`, unless that is null.
        """
        cdef uint64_t as_of = self.load(LOAD_AS_OF, AS_OF)
        cdef uint64_t bits[MOST_BITS]
        cdef uint64_t index, rest
        cdef int word
        if self.bit_words > MOST_BITS:
            return False
        step(LOAD_BITS)
        for word in range(self.bit_words):
            bits[word] = ipcsync_load(self.bits + word)
        for word in range(self.bit_words):
            rest = bits[word]
            while rest:
                index = <uint64_t>word * 64 + ipcsync_lowest(rest)
                if index == own or not self.session.session_is_good(index, as_of):
                    return False
                rest &= rest - 1
        if more != NULL:
            for word in range(self.bit_words):
                more[word] |= bits[word]
        return True

    cdef inline bint is_clear(self, int64_t generation) noexcept nogil:
        """Whether all is well with what the generation stands behind; False: for the Python engine to judge."""
        if not self.stands(generation):
            return True
        return not self.is_recorder and self.bits_are_good(self.load(LOAD_RECORDER, RECORDER) & 0xFFFF, NULL)

    cdef inline bint goes_on(self, int64_t generation) noexcept nogil:
        """Whether a wait for a generation that is not complete may go on; False: not me."""
        return self.is_open() and not self.closed() and self.is_clear(generation)

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
        return self.session.is_good() and not self.closed() and self.load(LOAD_INCARNATION, INCARNATION) == self.incarnation

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

    cdef int raise_refused(self, const Refusal *refusal) except -1:
        """Raise the driver's error here, as the Python engine does: a second attempt would have another number."""
        if refusal.write != 0:
            self._raise_refused(refusal.write, "cuStreamWriteValue64")
        else:
            self._raise_refused(refusal.record, "cuEventRecord")
        return 0

    cdef inline void leave_unmarked(self, Handle stream, uint64_t stream_id) noexcept nogil:
        """With the lock: the stream may have work of this use that no marker is behind."""
        self._unmarked = <uint64_t><uintptr_t>stream
        self._unmarked_id = stream_id

    cdef inline bint is_known(self, uint64_t stream) noexcept nogil:
        """Whether this event was recorded on the stream lately, which then is of its device."""
        cdef int index
        for index in range(RECENT):
            if self.recent[index] == stream and stream != 0:
                return True
        return False

    cdef inline bint find_list(self, uint64_t stream, int64_t *key) noexcept nogil:
        """Whether it is known which list the waits on the stream are in."""
        cdef int index
        for index in range(RECENT):
            if self.is_list_of(index, stream, key):
                return stream != 0
        return False

    cdef inline bint is_list_of(self, int index, uint64_t stream, int64_t *key) noexcept nogil:
        cdef uint64_t found = 0
        return ipcsync_get_pair(&self.lists[index], &found, <uint64_t *>key) and found == stream

    cdef inline void newest_list(self, uint64_t *stream, int64_t *key) noexcept nogil:
        """The stream whose list was asked for last, and that list; 0, 0: another thread is about to change that."""
        if not ipcsync_get_pair(&self.lists[ipcsync_load(&self.last_list)], stream, <uint64_t *>key):
            stream[0] = key[0] = 0

    cdef object listed(self, int64_t key, place, int64_t generation, uint64_t stream):
        """The wait in that list that stands for one for `generation` on that stream too, or None."""
        cdef dict held = self.waits.get(key)
        last = None if held is None else held.get(place)
        if last is None or last.verdict is True or last.generation < generation:
            return None
        if last.generation > generation and (<list>last.waited)[0] > generation:  # it does not stand for it yet
            return None
        if last.stream == stream:
            return last
        # Blocking streams share a list: `queued` notes both streams.
        return last if key >= 0 and (last.generation > generation or last.is_queued) else None

    cdef object put_wait(self, int64_t key, place, int64_t generation, uint64_t stream, dict alone):
        """Have the stream's next record stand behind the wait in `alone`; that, or one that stands for it too.

        With the table's lock, which it releases. None: not me, since another blocking stream waits for this event too.
        """
        cdef dict held
        try:
            wait = self.listed(key, place, generation, stream)  # another thread may have listed a later generation
            if wait is None:
                held = self.waits.get(key)
                last = None if held is None else held.get(place)
                if last is not None and key < 0 and (last.stream != stream or last.others):
                    return None
                wait = alone[place]
                if last is not None and last.verdict is not True:
                    if last.generation > generation:  # it stands for this one too from now on
                        (<list>last.waited).insert(0, generation)
                        return last
                    if (<list>last.waited)[0] < generation:
                        (<list>wait.waited).insert(0, (<list>last.waited)[0])
                if held is None:
                    self.waits[key] = alone
                else:
                    held[place] = wait
        finally:
            self.table_lock.give()
        return wait

    cdef inline bint recorder_lives(self) noexcept nogil:
        cdef uint64_t serial = self.load(LOAD_RECORDER, RECORDER)
        return serial == 0 or self.is_recorder or self.session.lives(serial)

    cdef inline void publish(self, int64_t generation) noexcept nogil:
        step(STORE_RECORDED)
        ipcsync_store(self.place + RECORDED, self.base + generation)
        if MISTAKE != 6:
            step(FENCE)
            ipcsync_fence()  # before the looks at `state` and at who waits: those store, then look what is recorded

    cdef inline bint is_awaited(self) noexcept nogil:
        return self.load(LOAD_AWAITED, AWAITED) != 0 or self.load(LOAD_FOLLOWED, FOLLOWED) != 0

    cdef inline void wake(self) noexcept nogil:
        step(WAKE)
        ipcsync_futex_wake(self.place + RECORDED, False, 0x7FFFFFFF)

    cdef inline bint sleep(self, uint64_t recorded, int64_t ns) noexcept nogil:
        """Sleep while `recorded` is that; whether a signal ended it."""
        if MISTAKE != 12 and self.load(LOAD_AWAITED, AWAITED) == 0:
            step(STORE_AWAITED)
            ipcsync_store(self.place + AWAITED, 1)
        step(SLEEP)
        return ipcsync_futex_wait(self.place + RECORDED, False, <uint32_t>recorded, ns)

    cdef inline void enter(self) noexcept nogil:
        """Begin a visit, as `SlotLine.enter`; a recorder records under the same lock."""
        cdef uint8_t *visit = self.visits + self.session.own
        if self.is_recorder:
            return
        if self.load(LOAD_VISITED, VISITED) == 0:
            step(STORE_VISITED)
            ipcsync_store(self.place + VISITED, 1)
        step(ENTER)
        ipcsync_store_byte(visit, <uint8_t>((ipcsync_load_byte(visit) + 1) | 1))
        step(FENCE)
        ipcsync_fence()

    cdef inline void leave(self) noexcept nogil:
        cdef uint8_t *visit = self.visits + self.session.own
        if not self.is_recorder:
            step(LEAVE)
            if ipcsync_load_byte(visit) & 1:
                ipcsync_store_byte(visit, <uint8_t>(ipcsync_load_byte(visit) + 1))

    cdef inline bint is_visited(self) noexcept nogil:
        """Whether another process may be about to queue a wait on a CUDA event that is about to be recorded again."""
        cdef const uint64_t *words = <const uint64_t *>self.visits
        cdef uint64_t word
        step(FENCE)
        ipcsync_fence()  # behind the store of `completed`: who enters later sees that
        if self.load(LOAD_VISITED, VISITED) == 0:
            return False
        step(LOAD_VISITS)
        for word in range((self.session.sessions + 7) // 8):
            if ipcsync_has_odd(ipcsync_load(words + word)):
                return True
        return self.has_visits  # the Python engine is to forget them: the same byte comes again some day

    cdef inline void raise_room(self) noexcept nogil:
        if self._room < self._completed + self.depth and (MISTAKE == 16 or not self.is_visited()):
            self._room = self._completed + self.depth

    cdef inline void store(self, int64_t done) noexcept nogil:
        if done <= self._completed or not self.session.coordinator_is_good():
            return
        if self.load(LOAD_STATE, STATE) != BROKEN:
            step(STORE_COMPLETED)
            ipcsync_store(self.place + COMPLETED, self.base + done)
        self._completed = done
        ipcsync_raise_to(&self.complete, done)

    cdef inline bint is_chained(self) noexcept nogil:
        """Whether something that was recorded here stands behind others, of which the Python engine judges first."""
        return self.is_recorder and self.has_chain
