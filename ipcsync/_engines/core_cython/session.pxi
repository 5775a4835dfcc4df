# Whether this session can be used.

cdef inline bint is_unchanged(const uint64_t *header, const uint64_t *running) noexcept nogil:
    """Whether a board's header is that of its running coordinator."""
    cdef int index
    for index in range(HEADER):
        if ipcsync_load(header + index) != running[index]:
            return False
    return True


@cython.final
cdef class SessionCheck:
    """Whether a session can be used: no fork, its line `live` and `serial`'s, the header unchanged, the lease in time.

    `good_until` is CLOCK_MONOTONIC in ns; the session's lease writes it, and -1 once there is a problem; `slowly` then
    says which. `shortcuts` counts the calls that came straight here, `slow_calls` those that Python looked at first.
    """

    cdef const uint8_t *fork_mark
    cdef const uint64_t *header
    cdef const uint64_t *running
    cdef const uint64_t *state_and_serial
    cdef uint64_t live[2]
    cdef object kept, slowly
    cdef public int64_t good_until, shortcuts, slow_calls

    def __init__(self, fork_mark, board, line, serial, live, slowly):
        self.kept = fork_mark, board
        self.fork_mark = <const uint8_t *><uintptr_t>fork_mark.address
        self.header = <const uint64_t *><uintptr_t>board.address
        self.running = <const uint64_t *><uintptr_t>board.running_header_address
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
            and is_unchanged(self.header, self.running)
            and ipcsync_now() <= self.good_until
        )

    def check(self):
        """Call `slowly` unless all is well. Costs about 0.05 µs."""
        if not self.is_good():
            self.slowly()
