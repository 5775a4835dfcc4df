# The chain of one slot, in its recorder's process: what each record depends on is stored before the record is made,
# and resolved later. The recorder is the only writer of these words; `Dependencies` reads them.

cdef enum:
    MANY_ENTRIES = 16


cdef class Entry:
    """Generations `first` to `last`, not settled yet: the waits queued before them, and a bit for each session that
    these depend on.

    `stream` is the id of the stream whose waits must be over once these are complete, 0 for none.
    """

    cdef readonly int64_t first, last
    cdef readonly uint64_t stream
    cdef readonly tuple waits
    cdef readonly object bits

    cdef Entry but(self, int64_t first, int64_t last):
        return new_entry(first, last, self.stream, self.waits, self.bits)

    cdef bint is_alike(self, Entry other):
        """Whether it depends on the same as another one."""
        return self.stream == other.stream and self.bits == other.bits and self.waits == other.waits


cdef Entry new_entry(int64_t first, int64_t last, uint64_t stream, tuple waits, bits):
    cdef Entry entry = Entry.__new__(Entry)
    entry.first, entry.last, entry.stream, entry.waits, entry.bits = first, last, stream, waits, bits
    return entry


cdef class Chain:
    """The chain of one slot. It is changed with `state`, or before anybody else has the engine."""

    cdef PyObject *view_  # borrowed: the use holds this, and who has its chain later holds the use
    cdef readonly list entries  # that are not settled, in order
    cdef public object loss  # the first one, None if there is none
    cdef public int64_t lost_from
    cdef public bint wants_break, has_asked
    cdef readonly bint is_due  # records that are complete depend on what another recorder has not resolved yet
    cdef public int64_t resolve_at  # with so many entries a record resolves first
    cdef bint is_stored  # as far as it was resolved
    cdef readonly bint is_needed  # there are entries, or a loss: read without a lock
    cdef uint64_t newest  # session, when what the next record will depend on was looked at

    def __init__(self, view):
        self.view_ = <PyObject *>view
        self.entries = []
        self.resolve_at, self.is_stored = MANY_ENTRIES, True

    cdef inline Queries view(self):
        return <Queries>self.view_

    @property
    def is_open(self):
        """Whether there is something to resolve, or to store of the resolution."""
        return bool(self.entries) or not self.is_stored

    cdef void keep(self, list entries):
        self.entries = entries
        self.is_needed = bool(entries) or self.loss is not None

    # --- before a record ----------------------------------------------------------------------------------------------

    def extend(self, int64_t generation, uint64_t stream, waits):
        """Store what the record of `generation` will depend on. RecorderLost if any of it is lost."""
        self.commit(generation, stream, self.entry_of(generation, stream, waits))

    cdef Entry entry_of(self, int64_t generation, uint64_t stream, waits):
        """What a record will depend on, None if that is nothing. The looks may run anybody's code: no lock is held."""
        cdef Queries view = self.view()
        cdef uint64_t own = view.load(LOAD_RECORDER, RECORDER) & 0xFFFF
        cdef Wait wait
        cdef bint is_in_order = True
        if self.loss is not None:
            raise self.loss.error(view.name, view.label, generation)
        known, pending = [], []
        step(LOAD_NEWEST)
        newest = ipcsync_load(view.sessions.header + NEWEST)  # before the looks that follow
        for wait in waits:
            if wait.view is view:
                continue
            outcome = self.outcome_of_wait(wait)
            if outcome is None:
                pending.append(wait)
                # A wait that another thread is about to queue, or that the driver refused, is not before it.
                is_in_order = is_in_order and (wait.is_queued or wait.stream != stream)
            elif isinstance(outcome, Loss):
                raise wait.behind(outcome).error(view.name, view.label, generation)
            elif wait.outcome is True:
                known.append(wait)
        if known:
            drop(known)
        if not pending:
            return None
        if MISTAKE == 10:
            step(LOAD_NEWEST)
            newest = ipcsync_load(view.sessions.header + NEWEST)
        self.newest = newest
        bits = 0
        if view.depends_on_all and any([wait.stream != stream for wait in pending]):
            bits = bit_of(own)  # the record's stream waits for none of these: only this recorder sees their end
        for wait in pending:
            bits |= self.evidence_of(wait, own)
        return new_entry(generation, generation, stream if is_in_order else 0, tuple(pending), bits)

    cdef bint commit(self, int64_t generation, uint64_t stream, Entry entry) except -1:
        """Store it, before the record is made."""
        cdef Queries view = self.view()
        cdef uint64_t own = view.load(LOAD_RECORDER, RECORDER) & 0xFFFF
        view.enter_state()
        try:
            entry = self.with_refused(generation, entry)
            if entry is not None:
                # If they are not, the new `valid_as_of` would say that they were.
                if self.entries and not view.dependencies.are_good(own, NULL):
                    entry.bits |= bit_of(own)
                self.add_entry(entry)
                if MISTAKE != 9:
                    self.store_links(generation)
        finally:
            view.state.give()
        return True

    cdef Entry with_refused(self, int64_t generation, Entry entry):
        """If a record of `generation` was refused, and is repeated: take out its entry; one that depends on all of both.

        The two may be on different streams, so their end does not prove that the waits there are over.
        """
        cdef Entry last = self.entries[-1] if self.entries else None
        if last is None or last.last < generation:
            return entry
        self.keep(self.entries[:-1] + ([last.but(last.first, generation - 1)] if last.first < generation else []))
        if entry is None:
            return new_entry(generation, generation, 0, last.waits, last.bits)
        waits = tuple(dict.fromkeys(last.waits + entry.waits))
        return new_entry(generation, generation, 0, waits, last.bits | entry.bits)

    cdef void store_links(self, int64_t generation):
        cdef Queries view = self.view()
        cdef Entry last = self.entries[-1]
        if MISTAKE == 11:
            view.dependencies.store_valid_as_of(self.newest)
        view.dependencies.store_bits(last.bits, True)  # those of the others are there
        if MISTAKE != 11:
            view.dependencies.store_valid_as_of(self.newest)
        if view.dependencies.first_unsettled() == 0:
            view.dependencies.store_first(generation)
        else:
            step(FENCE)
            ipcsync_fence()

    cdef void add_entry(self, Entry entry):
        cdef Entry last = self.entries[-1] if self.entries else None
        if last is not None and last.is_alike(entry):  # on the same waits as the record before
            self.keep(self.entries[:-1] + [last.but(last.first, entry.last)])
        else:
            self.entries.append(entry)
            self.is_needed = True

    cdef object outcome_of_wait(self, Wait wait):
        """As `Wait.known`; an event of this session itself counts unless it depends on something."""
        cdef Queries theirs
        outcome = wait.look()
        if outcome is None and self.is_own(wait):
            theirs = wait.view
            is_open = theirs.last() < wait.generation or theirs.dependencies.depends(wait.generation)
            return wait.outcome or (None if is_open else True)  # if it has one now, the words may be another use's
        return outcome

    cdef inline bint is_here(self, Queries theirs):
        """Whether its slot is of this coordinator's board."""
        cdef object board = self.view().board
        return theirs.board is board or theirs.board.epoch == board.epoch

    cdef bint is_own(self, Wait wait):
        cdef Queries theirs = wait.view
        return theirs.load(LOAD_RECORDER, RECORDER) == self.view().load(LOAD_RECORDER, RECORDER) and self.is_here(theirs)

    cdef object evidence_of(self, Wait wait, uint64_t own):
        """The bits of the sessions that a wait depends on; of `own` if only this recorder can resolve it."""
        found = self.find_evidence(wait)
        # If it has an outcome by now, the words may be those of the slot's next use.
        return bit_of(own) if found is None or wait.outcome is not None else found

    cdef object find_evidence(self, Wait wait):
        cdef Queries theirs = wait.view
        cdef uint64_t bits[MOST_BITS]
        cdef uint64_t serial = theirs.load(LOAD_RECORDER, RECORDER)
        if not self.is_here(theirs) or serial == 0 or theirs.last() < wait.generation:
            return None
        if theirs.node:
            return None  # the bridge records a mirror here, and outlives the recorder on the other node
        found = 0
        if serial != self.view().load(LOAD_RECORDER, RECORDER):
            if not theirs.sessions.is_live(serial) or not theirs.recorder_lives():
                return None
            found = bit_of(serial & 0xFFFF)
        if not theirs.dependencies.depends(wait.generation):
            return found
        if not theirs.dependencies.are_good(serial & 0xFFFF, bits):
            return None
        return found | number_of(bits, theirs.dependencies.bit_words)

    # --- the resolution -----------------------------------------------------------------------------------------------

    def resolve(self, int64_t done):
        """The last generation such that all up to it count; at most `done`, which was found complete before."""
        cdef Queries view = self.view()
        cdef int64_t settled
        cdef list before = self.entries
        if self.loss is None and view.dependencies.are_good(view.load(LOAD_RECORDER, RECORDER) & 0xFFFF, NULL):
            left = self.settle_all(done)
        else:
            left = self.resolve_each(done)
        if len(left) < len(before) or (left and (<Entry>left[0]).first != (<Entry>before[0]).first):
            view.dependencies.calm()
        if left is not before:
            self.is_stored = False
        self.keep(left)
        settled = min(done, (<Entry>left[0]).first - 1) if left else done
        self.is_due = settled < done and self.loss is None
        if self.loss is not None:
            settled = min(settled, self.lost_from - 1)
            self.wants_break = settled == self.lost_from - 1
        return settled

    cdef list settle_all(self, int64_t done):
        """Settle all up to `done`: the bits were found good after it was found complete, so its waits were good too."""
        cdef Entry entry
        cdef Wait wait
        for entry in self.entries:
            if entry.first <= done and entry.stream:
                for wait in entry.waits:
                    if wait.stream == entry.stream and wait.outcome is None:
                        wait.outcome = True
        return rest_of(self.entries, done)

    cdef list resolve_each(self, int64_t done):
        """The entries that are still open, or lost."""
        cdef list entries = list(self.entries)
        cdef Entry entry
        cdef Wait wait
        while entries and (<Entry>entries[0]).first <= done:
            entry = entries[0]
            outcomes = [self.outcome_of_wait(wait) or wait.resolved() for wait in entry.waits]
            self.find_loss(entry)
            if any([outcome is not True for outcome in outcomes]):
                break
            rest = rest_of([entry], done)
            entries[:1] = rest
            if rest:
                break
        for entry in entries:
            self.find_loss(entry)  # an entry behind an open one may be lost already
            for wait in entry.waits:
                if self.outcome_of_wait(wait) is None:
                    wait.view.dependencies.ring(wait.view.recorder)
        return entries

    cdef void find_loss(self, Entry entry):
        """All from the first entry with a lost wait on is lost. A later death may make an earlier entry the first."""
        cdef Wait wait
        if self.loss is not None and entry.first >= self.lost_from:
            return
        for wait in entry.waits:
            outcome = self.outcome_of_wait(wait)
            if isinstance(outcome, Loss):
                loss = wait.behind(outcome)
                # On this board the serial of another coordinator's session names none, or another one.
                is_here = wait.view.board.epoch == self.view().board.epoch
                self.lost_from = entry.first
                self.loss = loss if is_here else loss._replace(serial=0)
                return

    def store(self):
        """Store the resolution on the board; `completed` was stored before."""
        cdef Queries view = self.view()
        cdef int64_t first = (<Entry>self.entries[0]).first if self.entries else 0
        if view.dependencies.first_unsettled() != first:
            view.dependencies.store_first(first)
        bits = 0
        for entry in self.entries:
            bits |= (<Entry>entry).bits
        view.dependencies.store_bits(bits)
        if self.loss is not None and not view.dependencies.is_lost(self.lost_from):
            view.dependencies.lose(self.lost_from, self.loss.serial)
        self.is_stored = True


cdef inline object bit_of(uint64_t line):
    return (<object>1) << line


cdef list rest_of(list entries, int64_t done):
    """The entries that remain once all up to `done` is settled."""
    cdef Entry entry
    left = []
    for entry in entries:
        if entry.last > done:
            left.append(entry if entry.first > done else entry.but(done + 1, entry.last))
    return left
