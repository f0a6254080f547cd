"""Ports for tests: of runs beside each other on one machine, each has its own."""

import os
import random
import socket
import time

# They lie below those that the system gives to connections on its own, so none of these takes one meanwhile.
FIRST, END = 12_000, 32_000
BLOCK = 400  # ports of one claim
FEW_BLOCKS = 3  # of one process, in which it gives each port once before it gives one again
PATIENCE_S = 60  # for a block, while other processes have all


class _Claimed:
    """The blocks of this process, whose ports are given in turn: it takes a while until they are bound."""

    def __init__(self) -> None:
        self._blocks: dict[int, socket.socket] = {}  # the first port -> what holds it, as long as this process lives
        self._given = 0

    def take(self, count: int, address: str) -> int:
        assert count <= BLOCK
        end = time.monotonic() + PATIENCE_S
        while True:
            for _ in range(len(self._blocks) * BLOCK):
                if self._given >= len(self._blocks) * BLOCK:  # each was given, or is bound: for a minute longer too
                    if len(self._blocks) < FEW_BLOCKS:
                        self._claim()
                    self._given %= len(self._blocks) * BLOCK
                number, offset = divmod(self._given, BLOCK)
                first = [*self._blocks][number] + offset
                if offset + count <= BLOCK and all(_is_free(address, port) for port in range(first, first + count)):
                    self._given += count
                    return first
                self._given += 1
            if not self._claim():
                assert time.monotonic() < end, f"no {count} free ports in a row on {address or 'this machine'}"
                time.sleep(0.5)

    def forked(self) -> None:
        """In a child of this process: the blocks remain its parent's, and end with that."""
        for holder in self._blocks.values():
            holder.close()
        self._blocks = {}
        self._given = 0

    def _claim(self) -> bool:
        """Claim one more block by the name of an abstract socket, which ends with its process; False: none is left."""
        for block in random.sample(range(FIRST, END, BLOCK), (END - FIRST) // BLOCK):
            holder = socket.socket(socket.AF_UNIX)
            try:
                holder.bind(f"\0kproxy-tests-ports-{block}")
            except OSError:  # this process has it, or another one
                holder.close()
                continue
            self._given = len(self._blocks) * BLOCK
            self._blocks[block] = holder
            return True
        return False


_claimed = _Claimed()
os.register_at_fork(after_in_child=_claimed.forked)


def free_ports(count: int, address: str = "127.0.0.1") -> int:
    """The first of `count` free ports in a row at an address ("": at all of them)."""
    return _claimed.take(count, address)


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
