# The end of a bracket: D waits for its taps, and records.

cdef int take_turns(Lane self, Use *uses, int count, uint64_t stream, int64_t deadline, timeout) except -1:
    """Take the turns of the calls on these events, all or none, each with a marker for `stream`."""
    cdef Core core
    cdef int index = 0
    while index < count:
        core = <Core>uses[index].core
        if uses[index].is_in:
            step(b"lock")
            if not core.calls.take():
                give_turns(uses, index)
                index = 0
                if not enter_calls(core, deadline):
                    core.raise_timeout(core._recorded + 1, timeout, "reached (another thread's call blocks)")
                leave_calls(core)
                continue
            ipcsync_turns(1)
            try:
                make_marker(core, stream, self.ordinal)
            except BaseException:
                give_turns(uses, index + 1)
                raise
        index += 1

cdef void give_turns(Use *uses, int count) noexcept:
    cdef int index
    for index in range(count):
        if uses[index].is_in:
            leave_calls(<Core>uses[index].core)

cdef bint take_records(Lane self, Bracket bracket) except -1:
    """Take the turns for all records; False, and none is taken, if an event's last one was refused: each call makes
    such a one again first."""
    cdef Use *uses = bracket.uses + bracket.fed
    cdef int index
    take_turns(self, uses, bracket.recorded, self.drainer_id, FOREVER, None)
    for index in range(bracket.recorded):
        if (<Core>uses[index].core)._begun != (<Core>uses[index].core)._recorded:
            give_turns(uses, bracket.recorded)
            return False
    return True

cdef object record_all(Lane self, Bracket bracket):
    """End, and drain with all records, which are of timelines and have their turns; the first error of an event.

    What may raise comes before the driver's calls, and these are made in one go.
    """
    cdef Use *uses = bracket.uses + bracket.fed
    cdef Core core
    cdef int index, marked, result
    cdef object error = None
    try:
        for index in range(bracket.recorded):
            try:
                begin_records(self, &uses[index])
            except IpcSyncError as refusal:
                leave_calls(<Core>uses[index].core)
                uses[index].is_in = False
                error = error or refusal
        for index in range(bracket.recorded):
            if uses[index].is_in:
                core = <Core>uses[index].core
                set_stream(core, self.drainer_id)
                core._begun = uses[index].highest + uses[index].count
        with nogil:
            result = end_launch(self, bracket)
            if result == 0:
                result = drain(self, bracket, True)
            for index in range(bracket.recorded):  # behind refused ones too: the stream may have some of it
                if uses[index].is_in:
                    marked = mark(<Core>uses[index].core, self.draining, self.drainer_id)
                    result = result or marked
        for index in range(bracket.recorded):
            if uses[index].is_in and result == 0:
                core = <Core>uses[index].core
                core._recorded = core._begun
                publish_record(core, core._recorded)
    finally:
        give_turns(uses, bracket.recorded)
    if result:
        for index in range(bracket.gates, bracket.gates + bracket.taps):
            bracket.items[index].generation = 0
        check_taken(result)
    for index in range(bracket.recorded):
        core = <Core>uses[index].core
        if uses[index].is_in:
            if is_awaited(core):
                wake(core)
            if not is_open(core):  # its records were made, and do not count
                uses[index].is_in = False
                try:
                    core.raise_no_record()
                except IpcSyncError as refusal:
                    error = error or refusal
    for index in range(bracket.gates, bracket.gates + bracket.taps):
        if not bracket.items[index].use.is_in:
            bracket.items[index].generation = 0
    return error

cdef int begin_records(Lane self, Use *use) except -1:
    """Store what the records will depend on; called with the event's turn."""
    cdef list entries
    cdef Core core = <Core>use.core
    cdef bint follows = must_follow(core, self.drainer_id, core._recorded + 1)
    if was_closed(core) or not is_open(core):
        core.raise_no_record()
    use.highest, use.address, use.base, use.flags = core._recorded, core._address, core.base, core._flags
    if core.chain.is_needed or core.depends_on_all or row_count != 0:
        entries = depend_on(core, self.key, self.drainer_id, core._recorded + 1, None)  # on all that L waits for
        if follows and (entries or core.chain.entries):
            add(self.key, core, use.highest, self.drainer_id)
        core.chain.commit(core._recorded + 1, use.highest + use.count, entries)
    if follows:  # only now: what was refused waits for nothing of that event
        use.follows = use.highest

cdef object record_each(Lane self, Bracket bracket, replaying):
    """Drain with one record behind each tap, by the calls of events; of an event, none behind one that failed."""
    cdef object error = None
    cdef Item *tap
    cdef Item *gate
    cdef Operation *at
    cdef int index, other, result
    cdef list waits = latest(self.key)
    if bracket._is_ahead:  # a record depends on those points alone that are not surely captured after it
        waits = bracket.before + [wait for wait in waits if wait.stream != self.feeder_id]
    at = put_one(self.operations, WAIT_64, self.armed.address, self.prepared)
    for index in range(bracket.gates, bracket.gates + bracket.taps):
        tap = &bracket.items[index]
        at = put_one(at, WAIT_32, tap.address, 1)
        with nogil:
            result = give_operations(self, self.draining, at)
        at = self.operations
        check_taken(result)
        for other in range(bracket.gates if bracket._is_ahead and tap.use.is_in else 0):
            gate = &bracket.items[other]
            is_due = gate.use != NULL and gate.generation > gate.use.known
            if is_due and not (<object>tap.spot.place).is_surely_before(<object>gate.spot.place):
                add(self.drainer_id, <Core>gate.use.core, gate.generation, self.feeder_id)
        try:
            tap.generation = replaying._record(<object>tap.value, waits) if tap.use.is_in else 0
        except IpcSyncError as refusal:
            tap.use.is_in = False
            error = error or refusal
    at = put_one(at, WRITE_64, self.drained.address, self.number)
    with nogil:
        result = give_operations(self, self.draining, at)
    check_taken(result)
    return error
