"""A session's line of the board as an object: each word by its name, and the order of stores to several words."""

from __future__ import annotations

import struct

from ipcsync._board import layout
from ipcsync._board.words import Word, fence
from ipcsync._linux.futex import Futex


class SessionLine:
    """One session's words, `offset` bytes into a board whose `words` lie at `address`; its name is `label` bytes in.

    `serial` is (count << 16) | line number, and is never reused. `doorbell` is a futex that wakes the session's client.
    """

    __slots__ = (
        *(
            "_label",
            "doorbell",
            "first",
            "offset",
            "owner_address",
            "probe_address",
            "state_and_serial_address",
            "words",
        ),
    )

    state: Word = Word(layout.S_STATE)  # FREE, LIVE or EXPIRED; the coordinator's
    serial: Word = Word(layout.S_SERIAL)  # which session has the line; the coordinator's
    heartbeat: Word = Word(layout.S_HEARTBEAT)  # CLOCK_MONOTONIC in ns at the last beat; of the client's thread
    # A robust futex: the id of the client's thread that holds it, marked OWNER_DIED by the kernel; 0: not held.
    owner: Word = Word(layout.S_OWNER)
    lock: Word = Word(layout.S_LOCK)  # the inode of the socket that keeps the lock, if `end_is_shown`; the client's
    # For trying whether a stream's write arrives; the client's, and whatever the last left.
    probe: Word = Word(layout.S_PROBE)
    _pid, _started, _namespace = Word(layout.S_PID), Word(layout.S_START), Word(layout.S_NAMESPACE)
    _shows_end, _goodbye = Word(layout.S_SHOWS_END), Word(layout.S_GOODBYE)

    def __init__(self, words: memoryview[int], address: int, offset: int, label: int) -> None:
        self._label = label // 8
        self.offset: int = offset
        self.doorbell: Futex = Futex(address + offset + layout.S_DOORBELL * 8)
        self.first: int = offset // 8
        self.words: memoryview[int] = words
        first_word = address + offset
        self.state_and_serial_address: int = first_word + layout.S_STATE * 8  # of both words
        self.owner_address: int = first_word + layout.S_OWNER * 8
        self.probe_address: int = first_word + layout.S_PROBE * 8

    @property
    def process(self) -> tuple[int, int, int]:
        """(pid, start time, pid namespace) as the coordinator sees them; pid 0 if it cannot see the process."""
        return self._pid, self._started, self._namespace

    @property
    def end_is_shown(self) -> bool:
        """Whether a lock shows the end of the process whose session has the line."""
        return self._shows_end == self.serial

    def shows_end(self, lock: int) -> None:
        """Store that it does (client), once the lock is held by the socket of that inode."""
        self.lock = lock
        fence()
        self._shows_end = self.serial

    @property
    def has_said_goodbye(self) -> bool:
        """Whether the session that has the line is closed, and touches no slot."""
        return self._goodbye == self.serial

    def say_goodbye(self) -> None:
        """Store that it is (client), for a coordinator that gets no message of it."""
        fence()
        self._goodbye = self.serial

    @property
    def label(self) -> str:
        """The session's name (at most 64 bytes of it), else its public id."""
        label = self.words[self._label : self._label + layout.LABEL // 8]
        return label.tobytes().rstrip(b"\0").decode(errors="replace")

    def assign(self, serial: int, pid: int, started: int, namespace: int, now_ns: int, label: str = "") -> None:
        """Give the line to a session (coordinator), which stores the first heartbeat for it."""
        self.serial = 0  # a process that asks for the last session meanwhile must not find this one's
        fence()
        self.heartbeat, self.owner = now_ns, 0
        self._pid, self._started, self._namespace = pid, started, namespace
        for index, word in enumerate(_label_words(label), self._label):
            self.words[index] = word
        self.serial = serial
        fence()
        self.state = layout.LIVE

    def set_state(self, state: int) -> None:
        """Store the session's state (coordinator)."""
        self.state = state


def _label_words(label: str) -> tuple[int, ...]:
    """A session's name as words, truncated between two characters if it is too long."""
    data = label.encode()[: layout.LABEL].decode(errors="ignore").encode()
    return struct.unpack(f"={layout.LABEL // 8}Q", data.ljust(layout.LABEL, b"\0"))
