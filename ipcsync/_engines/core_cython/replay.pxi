# A replay: what it checks before anything is queued, and the bracket that it claims.
#
# Torch, contexts, the making of lanes, and errors that several places raise are Python's: methods that are not here are of the
# class over it. An object that nobody refers to any more leaves its bracket open, without an owner: the next replay ends it.

cdef enum:
    OTHERS_NS = 100000000  # for which an abandoned bracket of another lane is waited for
    LONGEST_ROOM_NS = 1000000  # between two looks for room

cdef Lock claims = Lock()  # of gates and taps by lanes
cdef dict imported = modules

@cython.embedsignature(False)
cdef class ReplayingBase:
    cdef readonly object _session, _stream, _timeout
    cdef SessionCheck guard
    cdef bint has_begun
    cdef readonly Bracket _replay
    cdef PyObject *lane  # while its bracket may be open
    cdef readonly uintptr_t _address  # of the launch stream
    cdef readonly int _ordinal
    cdef uint64_t stream_id
    cdef int64_t ns, began, deadline  # its timeout, and from when until when that lasts

    def __init__(self, session, waits, records, stream, timeout, ahead):
        self._session, self._stream, self._timeout = session, stream, timeout
        self.guard = session.lease.session_check
        if (type(timeout) is float or type(timeout) is int) and 0 <= timeout <= 1e9:  # Python's look takes longer
            self.ns = <int64_t>(<double>timeout * 1e9)
        else:
            self.ns = FOREVER if timeout is None else deadline_of(timeout, 1) - 1
        kind = self._replay_type
        self._replay = (<NewFunction>PyType_GetSlot(kind, Py_tp_new))(kind, NOTHING, NULL)
        self._replay._is_ahead = ahead
        self._replay.fill(self.dict_of(waits), self.dict_of(records), self)

    cdef dict dict_of(self, mapping):
        if type(mapping) is dict:
            return mapping
        if not isinstance(mapping, Mapping):
            self._raise_type(mapping)
        return dict(mapping)

    def __dealloc__(self):
        if self.lane != NULL and (<Lane>self.lane).owner == <PyObject *>self:
            (<Lane>self.lane).owner = NULL

    # --- the beginning ------------------------------------------------------------------------------------------------

    def __enter__(self):
        self._locate()
        self._enter()
        return self._replay

    def _locate(self):
        """Find the launch stream. Raises CaptureError if torch would launch elsewhere."""
        if self.has_begun:
            self._raise_used()
        self.check_session()
        self.has_begun = True
        if type(self._stream) is Stream:
            self._address, self._ordinal = self._stream._pointer, self._stream._index
        else:
            self._stream, self._address, self._ordinal = self._find_stream()
        elsewhere = self._elsewhere() if "torch" in imported else None
        if elsewhere is not None:
            raise elsewhere

    cdef int check_session(self) except -1:
        if not self.guard.is_good() or self._session.is_closed:
            self._session.check()

    def _enter(self, int64_t began=0):
        """Wait until all can be queued, and queue what comes before the launch. The timeout counts from `began`, or now."""
        self.began = began or ipcsync_now()
        self.deadline = FOREVER if self.ns == FOREVER else self.began + self.ns
        while not self.try_enter(self.lane_of()):
            pass

    cdef Lane lane_of(self):
        """The lane of the launch stream. StreamCapturing if that captures."""
        cdef unsigned long long stream = 0
        cdef Handle handle = <Handle>self._address
        cdef int status = 0
        cdef Lane lane = None
        if lanes and self._address > DEFAULT_STREAMS and cuStreamIsCapturing(handle, &status) == 0 and status == 0:
            if cuStreamGetId(handle, &stream) == 0:
                lane = lanes.get(stream)
                self.stream_id = stream
        if lane is None:
            lane, self.stream_id = self._find_lane()
        return lane

    cdef bint try_enter(self, Lane lane) except -1:
        """Open the bracket; False if the lane serves another stream now, or had an abandoned one."""
        cdef Bracket bracket = self._replay
        self.check_items(bracket)
        if bracket._is_ahead:
            self._check_passing(self._ordinal)
        for index in range(bracket.fed):
            self.check_use(bracket, &bracket.uses[index])
        self.check_events(bracket, lane)
        self.await_room(bracket, lane)
        if lane.lock.mine():
            self._raise_open()
        if not lane.lock.await_turn(self.deadline):
            self._raise_no_room(0)
        try:
            if bracket._is_over:  # its task was cancelled
                self._raise_ended()
            if lane.stream_id != self.stream_id:
                return False
            if lane.bracket is not None:
                if lane.owner != NULL:
                    self._raise_open()
                lane.finish()
                return False  # it is in flight now, and has to find room as any other
            self.claim(bracket, lane)
            try:
                lane.open(bracket, self.deadline, self._timeout)
                if bracket._is_over:  # meanwhile
                    self._raise_ended()
            except BaseException:
                lane.owner = NULL  # what cannot be ended now, the next replay ends
                lane.finish()
                raise
        finally:
            lane.lock.give()
        return True

    cdef int check_items(self, Bracket bracket) except -1:
        """Look at gates and taps, and at what they wait for or record on."""
        cdef Use *use = NULL
        cdef PyObject *event = NULL
        bracket.recorded = 0
        self.check_spots(bracket.items, bracket.gates)
        self.check_spots(bracket.items + bracket.gates, bracket.taps)
        for index in range(bracket.gates if bracket.has_unbound else 0):
            item = &bracket.items[index]
            if item.use == NULL:
                core = self.core_of_point(<PointBase>item.value)
                if core != NULL:
                    bracket.wait_for(item, core, NULL)
        for index in range(bracket.gates, bracket.gates + bracket.taps):
            item = &bracket.items[index]
            if item.value != event:
                event = item.value
                if not ((<EventBase>event)._is_open and (<EventBase>event)._is_recorder):
                    (<EventBase>event)._raise_not_recorder()
                use = bracket.use_of(<Core?>(<EventBase>event).attached.engine, bracket.fed, &bracket.recorded)
            item.use = use
            use.count += 1

    cdef int check_spots(self, Item *items, int count) except -1:
        """Have gates, or taps, in the order of their captures. Raises unless all are captured, on this device."""
        cdef int64_t last = 0
        cdef bint is_sorted = True
        for index in range(count):
            spot = items[index].spot
            if spot.index != self._ordinal or spot.order == 0:
                place = text_of(spot)
                if spot.index != self._ordinal:
                    raise DeviceMismatch(f"{place} is for another device than the stream's, {self._ordinal}")
                raise CaptureError(f"{place} was never captured: call its capture within a capture first")
            is_sorted = is_sorted and spot.order > last
            last = spot.order
        if not is_sorted:
            qsort(items, count, sizeof(Item), by_order)

    cdef PyObject *core_of_point(self, PointBase point) except? NULL:
        """That of a point that had none so far, or is traced; NULL if its use is over, and the point complete."""
        if point.attached is None:
            point._bound(left_of(self.deadline))
        engine = point.attached.engine
        if isinstance(engine, Core):
            return <PyObject *>engine  # which the point's attachment has
        engine.query(point._generation)  # that is all there is to ask
        return NULL

    cdef int check_use(self, Bracket bracket, Use *use) except -1:
        """Wait until the points of an event are recorded; raises if they may not be waited for."""
        cdef Core core = <Core>use.core
        use.is_in, use.known, use.fed = False, FOREVER, FOREVER
        is_complete = ask(core, use.highest)
        if not is_complete and use.highest > last_of(core) and not bracket._is_ahead:
            for index in range(bracket.fed, bracket.fed + bracket.recorded):
                if (<Core>bracket.uses[index].core).origin == core.origin:
                    raise ValueError(
                        f"generation {use.highest} of {core.label} is for this replay to record, which waits for its points "
                        "first: within a graph, the order of its nodes is what to wait by"
                    )
            core.await_recorded(use.highest, self.deadline, self._timeout, self._check_points)
            is_complete = ask(core, use.highest)
        if is_complete:
            use.highest = 0
        elif not core.has_ring:
            if bracket._is_ahead and use.highest > last_of(core):
                self._check_recorder(core)
            open_import(core, use.highest)
            use.is_in, use.known = True, known_of(core)
            use.fed = use.known
            use.address, use.base, use.flags = core._address, core.base, core._flags
        elif bracket._is_ahead or not core.is_recorder or depends(core, use.highest):
            # On the engine `event` nobody ends a wait for a process that died.
            what = f"generation {use.highest} of {core.label}, which uses the engine 'event', is pending"
            if bracket._is_ahead:
                raise EngineMismatch(f"{what}: a replay waits ahead of records only for events with engine='timeline'")
            raise EngineMismatch(
                f"{what}, and depends on another process: if that died, the replay's stream would never go on. Open the "
                "event with engine='timeline', or wait for the point by Point.synchronize before the replay"
            )

    def _check_points(self):
        """While one point is waited for: raise if the session is over, or another one is lost."""
        cdef Bracket bracket = self._replay
        self._session.check_liveness()
        for index in range(bracket.fed):
            core = <Core>bracket.uses[index].core
            if isinstance(find_outcome(core, bracket.uses[index].highest), Loss):
                core.check_liveness(bracket.uses[index].highest)  # of its own client and coordinator, too
                core.raise_lost(bracket.uses[index].highest)
            is_clear(core, bracket.uses[index].highest)  # or its recorder is asked to resolve it

    cdef int check_events(self, Bracket bracket, Lane lane) except -1:
        """Raise unless the records are possible."""
        bracket.is_slow = bracket._is_ahead
        for index in range(bracket.fed, bracket.fed + bracket.recorded):
            use = &bracket.uses[index]
            core = <Core>use.core
            use.is_in = True
            check_use(core)
            if not core.is_recorder:
                core.raise_not_recorder()
            if core.ordinal != self._ordinal:
                raise DeviceMismatch(
                    f"Event device {core.ordinal} does not match recording stream's device {self._ordinal}."
                )
            if not is_open(core) or core.chain.loss is not None:
                core.raise_no_record()
            bracket.is_slow = bracket.is_slow or core.is_traced or core.has_ring
            if core.has_ring:
                if use.count > core.depth:
                    raise EngineMismatch(
                        f"a replay makes {use.count} records of {core.label}, which uses the engine 'event' with depth="
                        f"{core.depth}: open it with a larger depth, or with engine='timeline', which has no such limit"
                    )
                oldest = core._recorded + use.count - core.depth
                if oldest > 0:
                    core.await_complete(oldest, self._timeout, self.began)
            else:
                open_import(core, 1)
        if bracket.recorded and row_count != 0:
            check_lost(core, lane.key)

    cdef int await_room(self, Bracket bracket, Lane lane) except -1:
        """Block until few enough brackets are in flight, or one is open, which ends by no wait."""
        cdef int64_t most = max(1, min(<int>MOST_IN_FLIGHT, STREAM_ROOM // bracket.most()))
        cdef int64_t pause = 20000
        while lane.claimed == 0 and lane.number - now_drained(lane) >= most:
            self._session.check_liveness()
            if ipcsync_now() >= self.deadline or bracket._is_over:
                self._raise_no_room(most)
            with nogil:
                ipcsync_pause(pause)
            PyErr_CheckSignals()
            pause = min(2 * pause, <int64_t>LONGEST_ROOM_NS)

    # --- the claim ----------------------------------------------------------------------------------------------------

    cdef int claim(self, Bracket bracket, Lane lane) except -1:
        """Have the lane's next bracket be this one. CaptureError if one is open over any of these words."""
        cdef Spot *last = NULL
        held = self.try_claim(bracket, lane)
        while held != NULL and held != last:  # each that was abandoned is ended
            last = held
            other = <Lane>held.lane
            if other.owner == NULL and not other.lock.mine() and other.lock.await_turn(ipcsync_now() + <int64_t>OTHERS_NS):
                try:
                    if other.owner == NULL:
                        other.finish()
                finally:
                    other.lock.give()
            held = self.try_claim(bracket, lane)
        if held != NULL:
            raise CaptureError(f"{text_of(held)} is in use: a replay that names it is not ended")

    cdef Spot *try_claim(self, Bracket bracket, Lane lane) noexcept:
        """The first gate or tap that another open bracket has; null if all are this one's now."""
        cdef bint collects = begin(claims)
        cdef Spot *held = bracket.claim(<PyObject *>lane, lane.number + 1)
        if held == NULL:
            self.lane = <PyObject *>lane
            lane.claimed = lane.number + 1
            lane.owner = <PyObject *>self
            lane.bracket, lane.session, lane.stream = bracket, self._session, self._stream
        end(claims, collects)
        return held

    # --- the end ------------------------------------------------------------------------------------------------------

    def __exit__(self, kind, error, traceback):
        self._leave(error, self._elsewhere() if "torch" in imported else None)

    def _leave(self, error, elsewhere=None):
        """Queue what comes behind the launch; without records if the block raised, or ended `elsewhere`. If there is
        nothing left to end, the block's own error goes on."""
        if self.lane == NULL:
            self._raise_ended()
        lane = <Lane>self.lane
        if not self.guard.fork_mark[0]:
            if error is not None:
                return
            self._session.check()
        if lane.lock.mine() or not lane.lock.await_turn(INT64_MAX):
            self._raise_open()
        try:
            self._replay._is_over = True
            if lane.owner != <PyObject *>self:
                if error is not None:
                    return
                self.check_session()
                self._raise_ended()
            lane.check_launch("end a replay")
            try:
                refusal = lane.close(self._replay, error is None and elsewhere is None, self)
            except BaseException:
                lane.finish()
                raise
        finally:
            if lane.owner == <PyObject *>self:  # an error's traceback may keep this alive
                lane.owner = NULL
            lane.lock.give()
        if error is None and (elsewhere is not None or refusal is not None):
            raise elsewhere or refusal

    def _end_from_outside(self):
        """End it as if its block had raised: by another thread, as of a task that was cancelled."""
        if self.lane != NULL:
            (<Lane>self.lane).end_from_outside(self)
