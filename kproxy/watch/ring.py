"""Packets of network interfaces, as the kernel writes them into memory that is shared with us (AF_PACKET, TPACKET_V3).

Duty: `window` hands out what has come since the last time as columns, without a copy and without a system call;
`release` gives the memory back to the kernel. What comes while there is no room is dropped by the kernel, which counts
it. Times are the kernel's, of when the packet passed the interface. The link layer is left out (SOCK_DGRAM): a packet
begins at its IP header, and a VLAN tag is taken off by the kernel.

Opening needs CAP_NET_RAW, everything after it nothing: the filter can be changed and the socket bound anew without.

Format: linux/Documentation/networking/packet_mmap.rst, linux/if_packet.h. Memory: the ring, of whole blocks of
BLOCK_BYTES, and columns of WINDOW_PACKETS packets. Refuses to know what is in a packet.
"""

import ctypes
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap
from struct import Struct, pack

import numpy as np

from kproxy.capture.columns import inorder
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.packets import RAW
from kproxy.capture.records import SECOND, Window

BLOCK_BYTES = 1 << 18  # larger than any packet, and small: a ring of few blocks is soon full of those that are not
RETIRE_MS = 20  # a block that is not full is handed over after this time
WINDOW_PACKETS = 1 << 14

_ALL = 0x0003  # ETH_P_ALL
_PACKET = 263  # SOL_PACKET
_RX_RING, _STATISTICS, _VERSION, _V3 = 5, 6, 10, 2
_ATTACH_FILTER = 26

_USER = 1  # a block's status: it is ours
_BLOCK = Struct("=8xIII").unpack_from  # its status, how many packets it has, where the first one is
_STATUS = Struct("=I").pack_into
_STATISTIC = Struct("=III")
_PACKET_HEAD = np.dtype(
    {
        "names": ["second", "nanosecond", "captured", "original", "net", "protocol", "interface"],
        "formats": ["<u4", "<u4", "<u4", "<u4", "<u2", ">u2", "<i4"],
        "offsets": [4, 8, 12, 16, 26, 50, 52],
        "itemsize": 68,
    }
)
_NET = 96  # where a packet of SOCK_DGRAM begins behind its head, always
_SPAN = _NET + inorder.HEAD
_TAGS = (0x8100, 0x88A8)

_libc = ctypes.CDLL(None, use_errno=True)


class Ring:
    """The packets of one socket. Use: `window`, then `release`, again and again; wait with `fileno` in between."""

    def __init__(self, program: Sequence[bytes], blocks: int) -> None:
        """Open it, with room for so many blocks; nothing is captured before `bind`. Raises OSError."""
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        try:
            self._socket.setsockopt(_PACKET, _VERSION, _V3)
            self.attach(program)
            frames = blocks * (BLOCK_BYTES >> 11)
            request = pack("=7I", BLOCK_BYTES, blocks, 1 << 11, frames, RETIRE_MS, 0, 0)
            self._socket.setsockopt(_PACKET, _RX_RING, request)
            self._memory = mmap(self._socket.fileno(), blocks * BLOCK_BYTES)
        except BaseException:
            self._socket.close()
            raise
        self._blocks = blocks
        self._next = 0  # the block that the kernel fills next, as far as we have looked
        self._taken: list[int] = []  # blocks of the window in hand
        room = len(self._memory) - _SPAN + 1
        self._every = np.ndarray((room,), f"V{_SPAN}", self._memory, strides=(1,))
        self._last = room - 1
        self.interface = np.zeros(0, np.int64)  # of each packet of the window in hand, by its number
        self.packets = 0  # since the start, those that were dropped included
        self.dropped = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def bind(self, interface: int) -> None:
        """Capture from an interface from now on, by its number; 0: all. OSError: there is none, or it is down."""
        # struct sockaddr_ll; Python's own bind() knows no way to say "all"
        address = pack("=HHiHBB8x", socket.AF_PACKET, socket.htons(_ALL), interface, 0, 0, 0)
        if _libc.bind(self._socket.fileno(), address, len(address)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def attach(self, program: Sequence[bytes]) -> None:
        """Put a filter in the place of the one before it; no packet is lost in between."""
        code = ctypes.create_string_buffer(b"".join(program))
        # struct sock_fprog: the number of instructions, and where they are
        self._socket.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pack("HL", len(program), ctypes.addressof(code)))

    def fault(self) -> int:
        """The error that waits at the socket (errno), such as ENETDOWN; 0: none."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def count(self) -> None:
        """Ask the kernel how many packets came and were dropped; it counts from 0 after each answer."""
        packets, dropped, _ = _STATISTIC.unpack(self._socket.getsockopt(_PACKET, _STATISTICS, _STATISTIC.size))
        self.packets += packets
        self.dropped += dropped

    @property
    def has_more(self) -> bool:
        """Whether another block waits."""
        return bool(_BLOCK(self._memory, self._next * BLOCK_BYTES)[0] & _USER)

    def window(self, packets: int = WINDOW_PACKETS) -> Window | None:
        """What waits, `packets` and one block at most; None: nothing. Its data are ours until `release`."""
        memory = self._memory
        places: list[int] = []
        append = places.append
        next_offset = Struct("=I").unpack_from
        while len(places) < packets:
            base = self._next * BLOCK_BYTES
            status, count, first = _BLOCK(memory, base)
            if not status & _USER:
                break
            at = base + first
            for _ in range(count):
                append(at)
                at += next_offset(memory, at)[0]
            self._taken.append(base)
            self._next += 1
            if self._next == self._blocks:  # a window's packets lie in the order of their coming
                self._next = 0
                break
        if not places:
            return None
        return Window(memory, 0, self._columns(np.array(places, np.int64)), is_lasting=False)

    def _columns(self, places: np.ndarray) -> Columns:
        spans = self._every[np.minimum(places, self._last)].view(np.uint8).reshape(-1, _SPAN)
        late = places > self._last  # the last of the ring, if it is small
        for index in np.flatnonzero(late).tolist():
            part = np.frombuffer(self._memory, np.uint8, offset=int(places[index]))
            spans[index, : len(part)] = part
            spans[index, len(part) :] = 0
        heads = np.ascontiguousarray(spans[:, : _PACKET_HEAD.itemsize]).view(_PACKET_HEAD)[:, 0]
        start = places + heads["net"]
        end = start + heads["captured"]
        head = spans[:, _NET:]
        for index in np.flatnonzero((heads["protocol"] == _TAGS[0]) | (heads["protocol"] == _TAGS[1])).tolist():
            if head[index, 0] >> 4 not in (4, 6):  # a second tag: the kernel has taken off one
                start[index] += 4
                head[index, : inorder.HEAD - 4] = head[index, 4:].copy()
        time_ns = heads["second"].astype(np.int64) * SECOND + heads["nanosecond"]
        self.interface = heads["interface"].astype(np.int64)
        return Columns(time_ns, RAW, start, end, heads["original"].astype(np.int64), head)

    def release(self) -> None:
        """The window in hand is done with."""
        for base in self._taken:
            _STATUS(self._memory, base + 8, 0)
        self._taken.clear()

    def close(self) -> None:
        self._socket.close()
        del self._every
        with suppress(BufferError):  # somebody still has a view: it goes with that
            self._memory.close()
