# The end of a bracket: D waits for its taps, and records.

cdef class LaneRecords(Steps):

    cdef readonly int ordinal
    cdef readonly uint64_t stream_id, feeder_id, drainer_id
    cdef readonly int64_t key  # of the launch stream's list of waits

    cdef int take_turns(self, Use *uses, int count, uint64_t stream, int64_t deadline, timeout) except -1:
        """Take the turns of the calls on these events, all or none, each with a marker for `stream`."""
        cdef Core core
        cdef int index = 0
        while index < count:
            core = <Core>uses[index].core
            if uses[index].is_in:
                step(b"lock")
                if not core.calls.take():
                    self.give_turns(uses, index)
                    index = 0
                    if not core.enter_calls(deadline):
                        core.raise_timeout(core._recorded + 1, timeout, "reached (another thread's call blocks)")
                    core.leave_calls()
                    continue
                ipcsync_turns(1)
                try:
                    core.make_marker(stream, self.ordinal)
                except BaseException:
                    self.give_turns(uses, index + 1)
                    raise
            index += 1

    cdef void give_turns(self, Use *uses, int count) noexcept:
        cdef int index
        for index in range(count):
            if uses[index].is_in:
                (<Core>uses[index].core).leave_calls()

    cdef bint take_records(self, Bracket bracket) except -1:
        """Take the turns for all records; False, and none is taken, if an event's last one was refused: each call makes
        such a one again first."""
        cdef Use *uses = bracket.uses + bracket.fed
        cdef int index
        self.take_turns(uses, bracket.recorded, self.drainer_id, FOREVER, None)
        for index in range(bracket.recorded):
            if (<Core>uses[index].core)._begun != (<Core>uses[index].core)._recorded:
                self.give_turns(uses, bracket.recorded)
                return False
        return True

    cdef object record_all(self, Bracket bracket):
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
                    self.begin_records(<Core>uses[index].core, &uses[index])
                except IpcSyncError as refusal:
                    (<Core>uses[index].core).leave_calls()
                    uses[index].is_in = False
                    error = error or refusal
            for index in range(bracket.recorded):
                if uses[index].is_in:
                    core = <Core>uses[index].core
                    core.set_stream(self.drainer_id)
                    core._begun = uses[index].highest + uses[index].count
            with nogil:
                result = self.end(bracket)
                if result == 0:
                    result = self.drain(bracket, True)
                for index in range(bracket.recorded):  # behind refused ones too: the stream may have some of it
                    if uses[index].is_in:
                        marked = (<Core>uses[index].core).mark(self.draining, self.drainer_id)
                        result = result or marked
            for index in range(bracket.recorded):
                if uses[index].is_in and result == 0:
                    core = <Core>uses[index].core
                    core._recorded = core._begun
                    core.publish_record(core._recorded)
        finally:
            self.give_turns(uses, bracket.recorded)
        if result:
            for index in range(bracket.gates, bracket.gates + bracket.taps):
                bracket.items[index].generation = 0
            raise_refused(result)
        for index in range(bracket.recorded):
            core = <Core>uses[index].core
            if uses[index].is_in:
                if core.is_awaited():
                    core.wake()
                if not core.is_open():
                    error = error or self.end_records(bracket, &uses[index])
        return error

    cdef int begin_records(self, Core core, Use *use) except -1:
        """Store what the records will depend on; called with the event's turn."""
        cdef list entries
        cdef bint follows = core.follows(self.drainer_id, core._recorded + 1)
        if core.closed() or not core.is_open():
            core.raise_no_record()
        use.highest, use.address, use.base, use.flags = core._recorded, core._address, core.base, core._flags
        if core.chain.is_needed or core.depends_on_all or row_count != 0:
            entries = core.depend_on(self.key, self.drainer_id, core._recorded + 1, None)  # on all that L waits for
            if follows and (entries or core.chain.entries):
                add(self.key, core, use.highest, self.drainer_id)
            core.chain.commit(core._recorded + 1, use.highest + use.count, entries)
        if follows:  # only now: what was refused waits for nothing of that event
            use.follows = use.highest

    cdef object end_records(self, Bracket bracket, Use *use):
        """The error of an event that is not open any more: its records were made, and do not count."""
        cdef int index
        for index in range(bracket.gates, bracket.gates + bracket.taps):
            if bracket.items[index].use == use:
                bracket.items[index].generation = 0
        try:
            (<Core>use.core).raise_no_record()
        except IpcSyncError as error:
            return error

    cdef object record_each(self, Bracket bracket, replaying):
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
                result = self.give(self.draining, at)
            at = self.operations
            if result:
                raise_refused(result)
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
            result = self.give(self.draining, at)
        if result:
            raise_refused(result)
        return error
