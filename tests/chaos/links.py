"""Links that fail: a TCP relay between any two parties, which cuts connections, stalls, and slows down when told.

`python -m tests.chaos.links` serves the links given as its arguments (FROM=TO, addresses of this machine) and takes one
command per line of its standard input, as JSON, answered by a line when it is done:

    {"do": "cut", "share": 0.5, "seed": 1}    that share of the connections ends within 4 KiB, by a reset or not
    {"do": "stall", "seconds": 3}             nothing passes meanwhile
    {"do": "slow", "seconds": 5, "bytes_per_s": 50000}  in each direction of each connection
    {"do": "refuse", "seconds": 2}            new connections are closed at once

`Links` is the other end of that pipe.
"""

import asyncio
import json
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_READ = 64 * 1024
_CUT_WITHIN = 4096  # bytes of a connection: soon, and in the middle of any frame


class _Relay:
    """All links of the process, and what is wrong with them right now."""

    def __init__(self) -> None:
        self._passing = asyncio.Event()
        self._passing.set()
        self._bytes_per_s = 0
        self._refusing = False
        self._connections: set[_Connection] = set()

    async def serve(self, links: Mapping[str, str]) -> None:
        for source, target in links.items():
            host, port = target.rsplit(":", 1)

            async def accepted(
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                address: tuple[str, int] = (host, int(port)),
            ) -> None:
                await self._accepted(reader, writer, address)

            host, port = source.rsplit(":", 1)
            await asyncio.start_server(accepted, host, int(port), limit=_READ)

    async def _accepted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: tuple[str, int]
    ) -> None:
        if self._refusing:
            writer.close()
            return
        try:
            there = await asyncio.open_connection(*address, limit=_READ)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, there[1])
        self._connections.add(connection)
        await asyncio.gather(
            self._carry(reader, there[1], connection), self._carry(there[0], writer, connection), return_exceptions=True
        )
        connection.end(reset=False)
        self._connections.discard(connection)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: "_Connection"
    ) -> None:
        try:
            while data := await reader.read(_READ):
                await self._passing.wait()
                if self._bytes_per_s:
                    await asyncio.sleep(len(data) / self._bytes_per_s)
                allowed = connection.allowed(len(data))
                writer.write(data[:allowed])
                await writer.drain()
                if allowed < len(data):
                    connection.end(reset=connection.reset)
                    return
            if writer.can_write_eof():
                writer.write_eof()
        except (OSError, RuntimeError):
            connection.end(reset=True)

    async def do(self, command: Mapping[str, Any]) -> None:
        match command["do"]:
            case "cut":
                chosen = random.Random(command["seed"])
                for connection in list(self._connections):
                    if chosen.random() < command["share"]:
                        connection.cut_after(chosen.randrange(_CUT_WITHIN), reset=chosen.random() < 0.5)
            case "stall":
                self._passing.clear()
                await asyncio.sleep(command["seconds"])
                self._passing.set()
            case "slow":
                self._bytes_per_s = command["bytes_per_s"]
                await asyncio.sleep(command["seconds"])
                self._bytes_per_s = 0
            case "refuse":
                self._refusing = True
                await asyncio.sleep(command["seconds"])
                self._refusing = False


class _Connection:
    """Both sides of a connection, and how many bytes it has left to live."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._sides = (client, server)
        self._left: int | None = None
        self.reset = False

    def cut_after(self, count: int, *, reset: bool) -> None:
        self._left = count
        self.reset = reset

    def allowed(self, count: int) -> int:
        if self._left is None:
            return count
        passed = min(count, self._left)
        self._left -= passed
        return passed

    def end(self, *, reset: bool) -> None:
        for side in self._sides:
            sock = side.get_extra_info("socket")
            with suppress(OSError):
                if reset and sock is not None:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if reset:
                side.transport.abort()
            else:
                side.close()


class Links:
    """The process with these links, while it is entered."""

    def __init__(self, links: Mapping[str, str]) -> None:
        self._links = links

    def __enter__(self) -> "Links":
        pairs = [f"{source}={target}" for source, target in self._links.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.links", *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def do(self, **command: Any) -> None:
        """Tells it one command, and waits until that is over."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise AssertionError("the process of the links ended")


async def main(arguments: Sequence[str]) -> None:
    relay = _Relay()
    await relay.serve(dict(argument.split("=", 1) for argument in arguments))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("ready", flush=True)
    while line := await reader.readline():
        await relay.do(json.loads(line))
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
