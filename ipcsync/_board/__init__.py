"""The board: one file on tmpfs, a line for each session and slot. `docs/design/protocol.md` says who writes what."""

from ipcsync._board.board import Board, Peer, peer_of
from ipcsync._board.layout import BROKEN, CLOSED, EXPIRED, FREE, INT64_MAX, LIVE, OPEN, SessionLine, SlotLine
