"""Packets of network interfaces, written by the kernel into shared memory (AF_PACKET, TPACKET_V3).

Duty: `window` returns the packets received since the previous one as columns, without a copy and without a system call;
`release` returns the memory to the kernel. Packets that find no room are dropped and counted by the kernel. Times are
the kernel's, of the packet's passage through the interface. The link layer is left out (SOCK_DGRAM): a packet begins at
its IP header, and the kernel removes a VLAN tag.

Only opening needs CAP_NET_RAW: the filter and the binding can be changed without it.

Format: linux/Documentation/networking/packet_mmap.rst, linux/if_packet.h. Memory: the ring, in blocks of BLOCK_BYTES,
and columns of WINDOW_PACKETS packets. Refuses to know the content of packets.
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
from kproxy.capture.dissection.packets import RAW
from kproxy.capture.formats.records import SECOND, Window

BLOCK_BYTES = 1 << 18  # larger than any packet, and small: a ring of few blocks is soon full of incomplete ones
RETIRE_MS = 20  # time after which an incomplete block is handed over
WINDOW_PACKETS = 1 << 14

_ALL = 0x0003  # ETH_P_ALL
_PACKET = 263  # SOL_PACKET
_RX_RING, _STATISTICS, _VERSION, _V3 = 5, 6, 10, 2
_ATTACH_FILTER = 26

_USER = 1  # status of a block that belongs to us
_BLOCK = Struct("=8xIII").unpack_from  # status, number of packets, offset of the first one
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
_NET = 96  # offset of a SOCK_DGRAM packet from its header, always the same
_SPAN = _NET + inorder.HEAD
_TAGS = (0x8100, 0x88A8)

_libc = ctypes.CDLL(None, use_errno=True)


class Ring:
    """The packets of one socket. Call `window`, then `release`, in a loop; wait with `fileno` in between."""

    def __init__(self, program: Sequence[bytes], blocks: int) -> None:
        """Open the socket with a ring of `blocks`; nothing is captured before `bind`. Raises OSError."""
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
        self._next = 0  # the block that the kernel fills next, as far as checked
        self._taken: list[int] = []  # blocks of the current window
        room = len(self._memory) - _SPAN + 1
        self._every = np.ndarray((room,), f"V{_SPAN}", self._memory, strides=(1,))
        self._last = room - 1
        self.interface = np.zeros(0, np.int64)  # number of the interface of each packet in the current window
        self.packets = 0  # since the start, including dropped ones
        self.dropped = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def bind(self, interface: int) -> None:
        """Capture from an interface, by number; 0: all. Raises OSError if it does not exist or is down."""
        # struct sockaddr_ll; Python's bind() cannot express "all"
        address = pack("=HHiHBB8x", socket.AF_PACKET, socket.htons(_ALL), interface, 0, 0, 0)
        if _libc.bind(self._socket.fileno(), address, len(address)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def attach(self, program: Sequence[bytes]) -> None:
        """Replace the filter; no packet is lost in between."""
        code = ctypes.create_string_buffer(b"".join(program))
        # struct sock_fprog: the number of instructions, and their address
        self._socket.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pack("HL", len(program), ctypes.addressof(code)))

    def fault(self) -> int:
        """Return the pending error of the socket (errno), such as ENETDOWN; 0: none."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def count(self) -> None:
        """Add the kernel's counters of received and dropped packets, which restart at 0 after each call."""
        packets, dropped, _ = _STATISTIC.unpack(self._socket.getsockopt(_PACKET, _STATISTICS, _STATISTIC.size))
        self.packets += packets
        self.dropped += dropped

    @property
    def has_more(self) -> bool:
        """Whether another block is ready."""
        return bool(_BLOCK(self._memory, self._next * BLOCK_BYTES)[0] & _USER)

    def window(self, packets: int = WINDOW_PACKETS) -> Window | None:
        """Return the waiting packets, about `packets` at most, or None. The data are valid until `release`."""
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
            if self._next == self._blocks:  # a window's packets are in arrival order
                self._next = 0
                break
        if not places:
            return None
        return Window(memory, 0, self._columns(np.array(places, np.int64)), is_lasting=False)

    def _columns(self, places: np.ndarray) -> Columns:
        spans = self._every[np.minimum(places, self._last)].view(np.uint8).reshape(-1, _SPAN)
        late = places > self._last  # the last packets of the ring, if they are short
        for index in np.flatnonzero(late).tolist():
            part = np.frombuffer(self._memory, np.uint8, offset=int(places[index]))
            spans[index, : len(part)] = part
            spans[index, len(part) :] = 0
        heads = np.ascontiguousarray(spans[:, : _PACKET_HEAD.itemsize]).view(_PACKET_HEAD)[:, 0]
        start = places + heads["net"]
        end = start + heads["captured"]
        head = spans[:, _NET:]
        for index in np.flatnonzero((heads["protocol"] == _TAGS[0]) | (heads["protocol"] == _TAGS[1])).tolist():
            if head[index, 0] >> 4 not in (4, 6):  # a second tag: the kernel has removed one
                start[index] += 4
                head[index, : inorder.HEAD - 4] = head[index, 4:].copy()
        time_ns = heads["second"].astype(np.int64) * SECOND + heads["nanosecond"]
        self.interface = heads["interface"].astype(np.int64)
        return Columns(time_ns, RAW, start, end, heads["original"].astype(np.int64), head)

    def release(self) -> None:
        """Return the memory of the current window to the kernel."""
        for base in self._taken:
            _STATUS(self._memory, base + 8, 0)
        self._taken.clear()

    def close(self) -> None:
        self._socket.close()
        del self._every
        with suppress(BufferError):  # a view still exists: the memory is freed with it
            self._memory.close()
