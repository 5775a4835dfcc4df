# Whether a session can be used.

from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t


cdef class SessionCheck:
    """Whether a session can be used: no fork, its line `live` and `serial`'s, the header unchanged, the lease in time.

    `good_until` is CLOCK_MONOTONIC in ns; the session's lease writes it, and -1 once there is a problem. `shortcuts` and
    `slow_calls` count the calls that were taken here, and those that were left to the Python engine.
    """

    cdef const uint8_t *fork_mark
    cdef const uint64_t *header
    cdef const uint64_t *state_and_serial
    cdef const uint64_t *running
    cdef uint64_t live[2]
    cdef object owners, slowly
    cdef bint has_mark
    cdef uint64_t sessions, own
    cdef public int64_t good_until, shortcuts, slow_calls

    def __init__(self, fork_mark, board, line, serial, live, slowly):
        self.owners = (fork_mark, board)
        self.fork_mark = <const uint8_t *><uintptr_t>fork_mark.address
        self.header = <const uint64_t *><uintptr_t>board.address
        self.state_and_serial = <const uint64_t *><uintptr_t>line.state_and_serial_address
        self.running = <const uint64_t *><uintptr_t>board.running_header_address
        self.live[0], self.live[1] = live, serial
        self.has_mark = board.has_mark
        self.sessions = board.sessions
        self.own = serial & 0xFFFF
        self.slowly = slowly
        self.good_until = -1

    cdef inline bint header_is_good(self) noexcept nogil:
        cdef int index
        for index in range(HEADER):
            if ipcsync_load(self.header + index) != self.running[index]:
                return False
        return True

    cdef inline bint is_good(self) noexcept nogil:
        step(GUARD)
        return (
            self.fork_mark[0]
            and ipcsync_load(self.state_and_serial) == self.live[0]
            and ipcsync_load(self.state_and_serial + 1) == self.live[1]
            and self.header_is_good()
            and ipcsync_now() <= self.good_until
        )

    cdef inline bint coordinator_is_good(self) noexcept nogil:
        step(COORDINATOR)
        return self.has_mark and self.header_is_good()

    cdef inline bint lives(self, uint64_t serial) noexcept nogil:
        """Whether the session `serial` is known to live, by its line; False too if the kernel is to be asked."""
        step(ALIVE)
        if (serial & 0xFFFF) >= self.sessions:
            return False
        cdef const uint64_t *line = self.header + FIRST_SESSION + (serial & 0xFFFF) * LINE
        cdef uint64_t owner = ipcsync_load(line + S_OWNER)  # before the serial
        return ipcsync_load(line + S_SERIAL) == serial and owner != 0 and not owner & OWNER_DIED

    cdef inline bint is_live(self, uint64_t serial) noexcept nogil:
        """Whether the coordinator has not ended the session; after `lives`."""
        return ipcsync_load(self.header + FIRST_SESSION + (serial & 0xFFFF) * LINE + S_STATE) == LIVE

    cdef inline bint session_is_good(self, uint64_t index, uint64_t as_of) noexcept nogil:
        """As in `behind`: whether that line's session lives, and is among the first `as_of` sessions."""
        step(SESSION_GOOD)
        if index >= self.sessions:
            return False
        cdef const uint64_t *line = self.header + FIRST_SESSION + index * LINE
        cdef uint64_t owner = ipcsync_load(line + S_OWNER)  # in this order: a later session has a larger count
        if owner == 0 or owner & OWNER_DIED or ipcsync_load(line + S_STATE) != LIVE:
            return False
        return ipcsync_load(line + S_SERIAL) >> 16 <= as_of

    def check(self):
        """Call `slowly` unless all is well. Costs about 0.05 µs."""
        if not self.is_good():
            self.slowly()
