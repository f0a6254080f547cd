"""Ports for tests: of runs beside each other on one machine, each has its own."""

import random
import socket

# They lie below those that the system gives to connections on its own, so none of these takes one meanwhile.
FIRST, END = 20_000, 32_000
BLOCK = 400  # ports of one claim: so many are given before one is given again


class _Claimed:
    """The blocks of this process, whose ports are given in turn: it takes a while until they are bound."""

    def __init__(self) -> None:
        self._blocks: dict[int, socket.socket] = {}  # the first port -> what holds it, as long as this process lives
        self._given = 0

    def take(self, count: int, address: str) -> int:
        while True:
            for _ in range(len(self._blocks) * BLOCK):
                number, offset = divmod(self._given % (len(self._blocks) * BLOCK), BLOCK)
                first = [*self._blocks][number] + offset
                if offset + count <= BLOCK and all(_is_free(address, port) for port in range(first, first + count)):
                    self._given += count
                    return first
                self._given += 1
            assert self._claim(), f"no {count} free ports in a row on {address or 'this machine'}"

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
