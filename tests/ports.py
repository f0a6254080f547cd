"""Ports for tests."""

import random
import socket


def free_ports(count: int, address: str = "127.0.0.1") -> int:
    """The first of `count` free ports in a row at an address ("": at all of them).

    They lie below those that the system gives to connections on its own, so none of these takes one meanwhile.
    """
    for first in random.sample(range(20_000, 32_000), 1_000):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind((address, port))
        except OSError:
            continue
        return first
    raise AssertionError(f"no {count} free ports in a row on {address or 'this machine'}")
