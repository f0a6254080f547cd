"""A connection that sends requests unchanged, where a client's own retries and caches would hide the response."""

import socket
import struct
from typing import Any

from kproxy.protocol import codec
from kproxy.protocol.schema import schema

KEYS = {api.name: key for key, api in schema().apis.items()}


class Asking:
    """A connection to `host:port`; use it as a context manager.

    Raises ConnectionError if the peer closes it before responding.
    """

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._sock = socket.create_connection((host, int(port)), timeout=30)

    def __enter__(self) -> "Asking":
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def ask(self, api: str, version: int, body: dict[str, Any]) -> dict[str, Any]:
        return codec.decode_response(self.answer(api, version, body), KEYS[api], version)[1]

    def answer(self, api: str, version: int, body: dict[str, Any]) -> bytes:
        """The frame of the response, without its size."""
        self._sock.sendall(codec.framed_request(KEYS[api], version, 7, "asking", body))
        (size,) = struct.unpack(">i", self._read(4))
        return self._read(size)

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._sock.recv(count - len(data))
            if not part:
                raise ConnectionResetError("closed before it answered")
            data += part
        return data
