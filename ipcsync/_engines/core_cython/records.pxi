# record: the next generation, behind what a stream has been given so far.

cdef class Core(Chained):
    """What an engine is made over."""

    cdef int64_t record_on(self, Handle stream, Refusal *refusal) noexcept nogil:
        """The generation; 0: not me, or refused; -1: recorded, but the event is not open any more.

        Called with the record lock.
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
            or (self.has_chain and self.follows(stream_id, generation))  # since this thread looked
            or not self.can_record(stream_id, generation)
        ):
            self.give()
            return 0
        return self.record_and_give(stream, stream_id, generation, refusal)

    cdef inline bint follows(self, uint64_t stream_id, int64_t generation) noexcept nogil:
        """Whether the stream is to wait for the record before, which was made on another one."""
        return stream_id != self._stream and generation > 1

    cdef inline bint can_record(self, uint64_t stream_id, int64_t generation) noexcept nogil:
        """Whether all is there that the driver's calls need."""
        if self.is_timeline:
            return self._address != 0 and self._unmarked == 0 and self.marker(stream_id) != NULL
        if self.follows(stream_id, generation) and self.event(generation - 1) == NULL:
            return False
        return self.event(generation) != NULL

    cdef int64_t record_and_give(
        self, Handle stream, uint64_t stream_id, int64_t generation, Refusal *refusal
    ) noexcept nogil:
        """The rest of it, behind all that may say "not me"; releases the lock."""
        cdef bint is_made
        cdef bint is_awaited = MISTAKE == 11 and self.is_awaited()
        is_made = self.record_and_publish(stream, stream_id, generation, refusal)
        self.give()
        if not is_made:
            return 0
        if MISTAKE != 2 and (is_awaited or (MISTAKE != 11 and self.is_awaited())):
            self.wake()
        if MISTAKE != 3 and not self.is_open():
            return -1
        return generation

    cdef inline bint record_and_publish(
        self, Handle stream, uint64_t stream_id, int64_t generation, Refusal *refusal
    ) noexcept nogil:
        if self.follows(stream_id, generation) and self.queue(stream, generation - 1) != 0:
            return False
        self._stream = stream_id
        self._begun = generation
        if MISTAKE == 1:
            self.publish(generation)
        if self.is_timeline:
            step(WRITE_VALUE)
            refusal.write = cuStreamWriteValue64(stream, self._address, self.base + generation, 0)
            if refusal.write == 0:
                step(MARK)
                refusal.record = cuEventRecord(self.marker(stream_id), stream)
        else:
            step(EVENT_RECORD)
            refusal.record = cuEventRecord(self.event(generation), stream)
        self._is_interrupted = is_refused(refusal)
        if self._is_interrupted:  # the driver may have the record: the next call makes it again
            if self.is_timeline:
                self.leave_unmarked(stream, stream_id)
            return False
        self._recorded = generation
        if MISTAKE == 2:
            self.wake()
        if MISTAKE != 1:
            self.publish(generation)
        return True

    cdef bint has_room(self, int64_t generation) noexcept nogil:
        cdef int64_t done
        if not self.take():
            return False
        done = self._completed
        if not self.closed():
            if not self.has_chain and done != self._recorded:  # a chain is to be judged first
                if self.done(self._recorded) == 0:
                    done = self._recorded
                else:
                    while done + 1 < self._recorded and self.done(done + 1) == 0:
                        done += 1
                self.store(done)
            self.raise_room()
        self.give()
        return generation <= self._room

    cdef int64_t record_among_waits(self, Handle stream, Refusal *refusal) except -9:
        """As `record_on`, where streams of this process wait for others, or the event stands behind some."""
        cdef unsigned long long stream_id = 0
        cdef int64_t key = 0, generation = 0
        cdef bint is_named
        if self.behind_all or self.changed or not self.is_usable(stream):
            return 0
        step(GET_ID)
        with nogil:
            is_named = cuStreamGetId(stream, &stream_id) == 0
        if not is_named or not self.find_list(stream_id, &key):
            return 0  # it is not known what the stream waits for
        if self.has_chain or key in self.waits:
            return self.record_behind(stream, stream_id, key, refusal)
        if self.record_lock.take():
            with nogil:
                generation = self.record_on(stream, refusal)
            self.record_lock.give()
        return generation

    cdef int64_t record_behind(self, Handle stream, uint64_t stream_id, int64_t key, Refusal *refusal) except -9:
        """As `record_on`, on a stream that waits for others, or for an event that stands behind some.

        What makes objects is done before the locks are taken: it may start a garbage collection, and that any call.
        """
        cdef int64_t generation = self._recorded + 1
        cdef bint follows = self.follows(stream_id, generation)
        cdef Links links
        cdef list entries, later
        cdef dict before = None
        cdef int64_t made
        cdef bint can_begin
        if self.has_chain and not self.is_timeline and generation > self._room:
            self._try_publish()
        chain = self.chain
        entries = chain._entries
        if not self.is_known(stream_id) or self.bit_words > MOST_BITS:
            return 0
        if chain._loss is not None or len(entries) >= chain.judge_at or (follows and key < 0):
            return 0
        if entries and entries[len(entries) - 1].last >= generation:  # a record that failed, and is repeated
            return 0
        self.begin(&links)
        pending = self.waits_before(key, &links)
        if pending is None or (pending and not chain._is_holder):
            return 0
        if MISTAKE == 10:
            self.begin(&links)
        later = self.entries_with(entries, generation, stream_id, pending, &links) if pending else None
        place = <object><uintptr_t><PyObject *>self
        followed = None
        if follows and (entries or later is not None):  # the stream is about to wait for what stands behind others
            before = {place: self.make_wait(self, generation - 1, key, stream_id)}
        if not self.record_lock.take():
            return 0
        can_begin = self._begun == generation - 1 == self._recorded and not self._is_interrupted
        if can_begin and not self.is_timeline and generation > self._room:
            with nogil:
                can_begin = self.has_room(generation)
        if not can_begin or not self.take():
            self.record_lock.give()
            return 0
        try:
            # Every change of the chain is a new list, so the same one shows that it is as it was when it was looked at.
            can_begin = not (
                self.closed()
                or not self.is_open()
                or chain._entries is not entries
                or chain._loss is not None
                or self.follows(stream_id, generation) != follows
                or not self.can_record(stream_id, generation)
                or self.changed
                or not self.are_listed(key, pending)
                or (before is not None and not self.table_lock.take())
            )
            if can_begin and before is not None:
                followed = self.put_wait(key, place, generation - 1, stream_id, before)
            if can_begin and later is not None:
                self.has_chain = True
                chain._entries = later
                if MISTAKE != 9:
                    self.store_links(&links, generation)
        except BaseException:
            self.give()
            self.record_lock.give()
            raise
        if not can_begin:
            self.give()
            self.record_lock.give()
            return 0
        with nogil:
            made = self.record_and_give(stream, stream_id, generation, refusal)
        self.record_lock.give()
        if (made != 0 or is_refused(refusal)) and followed is not None and followed.generation == generation - 1:
            followed.is_queued = True
        if MISTAKE == 9 and later is not None:
            self.store_links(&links, generation)
        return made

    cdef int64_t try_record(self, stream) except -9:
        cdef int64_t generation = 0
        cdef uintptr_t address
        cdef Refusal refusal = Refusal(0, 0)
        if self.session is None or not self.is_recorder or not self.good():
            return 0
        address = address_of(stream)
        if address == 0:
            return 0
        if self.has_chain or self.waits or self.changed:
            generation = self.record_among_waits(<Handle>address, &refusal)
        elif self.record_lock.take():
            with nogil:
                generation = self.record_on(<Handle>address, &refusal)
            self.record_lock.give()
        if is_refused(&refusal):
            self.raise_refused(&refusal)
        if generation > 0:
            self.session.shortcuts += 1
        elif generation < 0:
            self._raise_no_record()
        return generation
