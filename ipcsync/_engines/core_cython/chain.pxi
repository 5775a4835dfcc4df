# The chain of one slot, in its recorder's process: what each record depends on is stored before the record is made,
# and resolved later. The recorder is the only writer of these words; waiters read them by line.pxi.

cdef enum:
    MANY_ENTRIES = 16

cdef class Entry:
    """A wait that generations `first` to `last` depend on, not settled yet, and a bit for each session that it depends
    on. Once generation `proof` is complete, the wait is over: that record is behind it on its stream."""

    cdef readonly Wait wait
    cdef readonly int64_t first, last, proof
    cdef readonly object bits

@cython.final
cdef class Chain:
    """The chain of one slot; `view` is any of the session's uses of it. It is changed with `state`, which they share,
    or before anybody else has the engine."""

    cdef readonly dict entries  # that are not settled: of each wait the newest by it, others by themselves
    cdef readonly int64_t first  # of them all; FOREVER: there are none
    cdef public object loss  # the first one, None if there is none
    cdef public int64_t lost_from
    cdef public bint wants_break, has_asked
    cdef readonly bint is_due  # records that are complete depend on what another recorder has not resolved yet
    cdef public int64_t resolve_at  # with so many entries a record resolves first
    cdef public bint is_needed  # there are entries, a loss, or a resolution to store: read without a lock
    cdef int64_t committed  # the last generation of which it was stored what it will depend on
    cdef uint64_t newest  # session, when what the next record will depend on was looked at

    def __init__(self):
        self.entries, self.first = {}, FOREVER
        self.resolve_at = MANY_ENTRIES

    # --- before a record ----------------------------------------------------------------------------------------------

    cpdef int extend(self, Core view, int64_t generation, int64_t last, uint64_t stream, waits) except -1:
        """Store what the records of `generation` to `last` will depend on. RecorderLost if any of it is lost."""
        cdef list found = self.entries_of(view, generation, stream, waits)
        cdef uint64_t own = load(view.place, RECORDER) & 0xFFFF
        cdef Entry entry, held
        enter_state(view)
        try:
            # One that was refused is repeated, perhaps behind new waits, or on another stream: that proves none of them.
            if generation <= max(self.committed, view._begun):
                for held in [*self.entries.values(), *found]:
                    held.last = min(held.last, last)
                    if held.proof >= generation:
                        held.proof = FOREVER
            self.committed = last
            if found:
                # If they are not, the new `valid_as_of` would say that they were, for as long as any of them is open.
                bits, self.is_needed = 0 if not self.entries or are_good(view, own, NULL) else bit_of(own), True
                for held in self.entries.values():
                    held.bits |= bits
                for entry in found:
                    held = self.entries.get(entry.wait)
                    if held is not None and held.last < generation - 1 and held.proof > held.last:
                        # The wait may be open once that is settled, and what is between the two is not behind it.
                        self.entries[held], entry.bits = held, held.bits | (entry.bits or 0)
                        held = None
                    if held is None:
                        held = self.entries[entry.wait] = entry
                        if entry.bits is None:  # it was settled meanwhile
                            entry.bits = bit_of(own)
                    held.last, held.proof = last, min(held.proof, entry.proof)
                    held.bits |= entry.bits or 0
                    bits |= held.bits
                self.first = min(self.first, generation)
                store_bits(view, bits, True)  # those of the others are there
                store(view.place, VALID_AS_OF, self.newest)
                if first_unsettled(view) == 0:
                    store_first(view, generation)
                else:
                    fence()
        finally:
            view.state.give()

    cdef bint may_be_lost(self) except -1:
        """Whether a wait that earlier records depend on is lost, which may not be resolved yet."""
        for entry in list(self.entries.values()):
            if isinstance((<Entry>entry).wait.known_outcome(), Loss):
                return True
        return False

    cdef list entries_of(self, Core view, int64_t generation, uint64_t stream, waits):
        """What a record will depend on; empty if that is nothing. The looks may run anybody's code: no lock is held."""
        cdef uint64_t own = load(view.place, RECORDER) & 0xFFFF
        cdef Wait wait
        cdef Entry entry
        if self.loss is not None:
            raise self.loss.error(view.name, view.label, generation)
        known, found = [], []
        step(b"load newest")
        newest = ipcsync_load(view.header + NEWEST)  # before the looks that follow
        for wait in waits:
            if wait.view is view:
                continue
            outcome = outcome_of_wait(view, wait)
            if outcome is None:
                entry = Entry.__new__(Entry)
                entry.wait, entry.first = wait, generation
                # A wait that another thread is about to queue, or that the driver refused, is not before it.
                entry.proof = generation if wait.is_queued and wait.stream == stream else FOREVER
                found.append(entry)
            elif isinstance(outcome, Loss):
                raise outcome.behind(wait.label).error(view.name, view.label, generation)
            elif wait.outcome is True:
                known.append(wait)
        if known:
            drop(known)
        self.newest = newest
        for entry in found:
            if entry.wait not in self.entries:
                entry.bits = evidence_of(view, entry.wait, own)
            if view.depends_on_all and entry.wait.stream != stream:  # the record's own stream does not wait for it:
                entry.bits = bit_of(own) | (entry.bits or 0)  # only this recorder sees its end
        return found

    # --- the resolution -----------------------------------------------------------------------------------------------

    def resolve(self, Core view, int64_t done):
        """The last generation such that all up to it count; at most `done`, which was found complete before."""
        cdef Entry entry
        cdef int64_t first = FOREVER
        cdef Py_ssize_t count = len(self.entries)
        cdef bint is_good = self.loss is None and are_good(view, load(view.place, RECORDER) & 0xFFFF, NULL)
        for key, entry in list(self.entries.items()):
            # What was good after `done` was found complete: so were the waits before it.
            if entry.first <= done and (
                is_good or (outcome_of_wait(view, entry.wait) or entry.wait.resolved()) is True
            ):
                if is_good and entry.proof <= done:
                    entry.wait.settle(True)
                if entry.last <= done:
                    del self.entries[key]
                    continue
                entry.first = done + 1
            elif not is_good:
                self.find_loss(view, entry)
            first = min(first, entry.first)
        if first != self.first or len(self.entries) < count:
            calm(view)
        self.first = first
        settled = min(done, first - 1)
        self.is_due = settled < done and self.loss is None
        if self.loss is not None:
            settled = min(settled, self.lost_from - 1)
            self.wants_break = settled == self.lost_from - 1
        return settled

    cdef void find_loss(self, Core view, Entry entry):
        """All from the first entry with a lost wait on is lost. A later death may make an earlier entry the first."""
        cdef Wait wait = entry.wait
        outcome = outcome_of_wait(view, wait)
        if outcome is None:
            ring(<Core>wait.view, load((<Core>wait.view).place, RECORDER))
        elif isinstance(outcome, Loss) and (self.loss is None or entry.first < self.lost_from):
            loss = outcome.behind(wait.label)
            self.lost_from = entry.first
            # On this board the serial of another coordinator's session names none, or another one.
            self.loss = loss if is_here(view, wait.view.board) else loss._replace(serial=0)

    def store(self, Core view):
        """Store the resolution on the board; `completed` was stored before."""
        cdef Entry entry
        cdef int64_t first = self.first if self.entries else 0
        if first_unsettled(view) != first:
            store_first(view, first)
        bits = 0
        for entry in self.entries.values():
            bits |= entry.bits
        store_bits(view, bits, False)
        if self.loss is not None and not is_lost(view, self.lost_from):
            store(view.place, ROOT_CAUSE, self.loss.serial)
            store(view.place, LOST, view.base + self.lost_from)
            fence()
            wake(view)
        self.is_needed = bool(self.entries) or self.loss is not None

# --- what a wait depends on -------------------------------------------------------------------------------------------

cdef object outcome_of_wait(Core view, Wait wait):
    """As `Wait.known_outcome`; an event of this session itself counts unless it depends on something."""
    cdef Core theirs
    outcome = wait.known_outcome()
    if outcome is None:
        theirs = wait.view
        if load(theirs.place, RECORDER) == load(view.place, RECORDER) and is_here(view, theirs.board):
            is_open = last_of(theirs) < wait.generation or depends(theirs, wait.generation)
            return wait.outcome or (None if is_open else True)  # if it has one now, the words may be another use's
    return outcome

cdef inline bint is_here(Core view, board):
    """Whether that is this coordinator's board."""
    return board is view.board or board.epoch == view.board.epoch

cdef object evidence_of(Core view, Wait wait, uint64_t own):
    """The bits of the sessions that a wait depends on; of `own` if only this recorder can resolve it."""
    cdef Core theirs = wait.view
    cdef uint64_t bits[MOST_BITS]
    cdef uint64_t serial = load(theirs.place, RECORDER)
    cdef bint is_own = serial == load(view.place, RECORDER)
    found = 0 if is_own else bit_of(serial & 0xFFFF)
    if (
        not is_here(view, theirs.board)
        or serial == 0
        or last_of(theirs) < wait.generation
        or theirs.node  # the bridge records a mirror here, and outlives the recorder on the other node
        or not is_own
        and (ipcsync_load(session_of(theirs, serial) + S_STATE) != LIVE or not recorder_lives(theirs))
    ):
        found = None
    elif depends(theirs, wait.generation):
        if are_good(theirs, serial & 0xFFFF, bits):
            found |= int.from_bytes((<char *>bits)[:theirs.bit_words * sizeof(uint64_t)], "little")
        else:
            found = None
    # If it has an outcome by now, the words may be those of the slot's next use.
    return bit_of(own) if found is None or wait.outcome is not None else found

cdef inline object bit_of(uint64_t line):
    return (<object>1) << line
