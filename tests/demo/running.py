"""The demo's brokers and clients as a process of their own, before which a test puts a kproxy."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kproxy.demo import world


@contextmanager
def traffic() -> Iterator["World"]:
    started = World()
    try:
        yield started
    finally:
        started.process.stdin.close()  # type: ignore[union-attr]
        started.process.wait(30)


class World:
    """The demo's brokers, and, once they are admitted, its clients."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", world.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.bootstrap = ",".join(f"{host}:{port}" for host, port in json.loads(self.process.stdout.readline()))

    def admit(self, bootstrap: str) -> None:
        host, port = bootstrap.split(":")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([host, int(port)]) + "\n")
        self.process.stdin.flush()
