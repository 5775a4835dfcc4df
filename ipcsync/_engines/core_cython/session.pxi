# The sessions of a board: whether the coordinator and the recorders live, and whether this one can be used.

cdef class Sessions:
    """What the kernel and the coordinator have marked on a board. Nothing here asks the kernel."""

    cdef const uint64_t *header
    cdef const uint64_t *running
    cdef object board
    cdef bint has_mark
    cdef uint64_t sessions

    def __init__(self, board):
        self.board = board
        self.header = <const uint64_t *><uintptr_t>board.address
        self.running = <const uint64_t *><uintptr_t>board.running_header_address
        self.has_mark = board.has_mark
        self.sessions = board.sessions

    cdef inline bint header_is_good(self) noexcept nogil:
        cdef int index
        for index in range(HEADER):
            if ipcsync_load(self.header + index) != self.running[index]:
                return False
        return True

    cdef inline bint coordinator_is_good(self) noexcept nogil:
        """Whether the coordinator is known to serve; False too if the kernel is to be asked."""
        step(b"coordinator?")
        return self.has_mark and self.header_is_good()

    cdef inline bint lives(self, uint64_t serial) noexcept nogil:
        """Whether the session `serial` is known to live, by its line; False too if the kernel is to be asked."""
        step(b"recorder alive?")
        if (serial & 0xFFFF) >= self.sessions:
            return False
        cdef const uint64_t *line = self.line(serial)
        cdef uint64_t owner = ipcsync_load(line + S_OWNER)  # before the serial
        return ipcsync_load(line + S_SERIAL) == serial and owner != 0 and not owner & OWNER_DIED

    cdef inline const uint64_t *line(self, uint64_t serial) noexcept nogil:
        return self.header + FIRST_SESSION + (serial & 0xFFFF) * LINE

    cdef inline bint session_is_good(self, uint64_t index, uint64_t valid_as_of) noexcept nogil:
        """Whether that line's session lives, and is among the first `valid_as_of` sessions."""
        step(b"session good?")
        if index >= self.sessions:
            return False
        cdef const uint64_t *line = self.line(index)
        cdef uint64_t owner = ipcsync_load(line + S_OWNER)  # in this order: a later session has a larger count
        if owner == 0 or owner & OWNER_DIED or ipcsync_load(line + S_STATE) != LIVE:
            return False
        return ipcsync_load(line + S_SERIAL) >> 16 <= valid_as_of


cdef class SessionCheck(Sessions):
    """Whether a session can be used: no fork, its line `live` and `serial`'s, the header unchanged, the lease in time.

    `good_until` is CLOCK_MONOTONIC in ns; the session's lease writes it, and -1 once there is a problem; `slowly` then
    says which. `shortcuts` counts the calls that came straight here, `slow_calls` those that Python looked at first.
    """

    cdef const uint8_t *fork_mark
    cdef const uint64_t *state_and_serial
    cdef uint64_t live[2]
    cdef object owner, slowly
    cdef public int64_t good_until, shortcuts, slow_calls

    def __init__(self, fork_mark, board, line, serial, live, slowly):
        Sessions.__init__(self, board)
        self.owner = fork_mark
        self.fork_mark = <const uint8_t *><uintptr_t>fork_mark.address
        self.state_and_serial = <const uint64_t *><uintptr_t>line.state_and_serial_address
        self.live[0], self.live[1] = live, serial
        self.slowly = slowly
        self.good_until = -1

    cdef inline bint is_good(self) noexcept nogil:
        step(b"guard.check")
        return (
            self.fork_mark[0]
            and ipcsync_load(self.state_and_serial) == self.live[0]
            and ipcsync_load(self.state_and_serial + 1) == self.live[1]
            and self.header_is_good()
            and ipcsync_now() <= self.good_until
        )

    def check(self):
        """Call `slowly` unless all is well. Costs about 0.05 µs."""
        if not self.is_good():
            self.slowly()
