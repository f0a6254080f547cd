"""`python -m bench.attacks`: clients that try to delay the other clients of a kproxy, and their broker.

`attack NAME HOST:PORT SECONDS` runs that one attack, by threads with blocking sockets, and prints how many bytes it
sent. `broker` prints its port and serves: it responds to ApiVersions and Metadata, from version 12 on with a cluster of
100,000 partitions, and discards everything else. `bench.waits` starts both and measures.
"""

import itertools
import math
import os
import socket
import ssl
import struct
import sys
import threading
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench import cases
from kproxy.protocol import codec
from kproxy.protocol.apis import (
    API_VERSIONS,
    DESCRIBE_GROUPS,
    FETCH,
    METADATA,
    PRODUCE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
)

Address = tuple[str, int]

_PIECE_BYTES = 1 << 18
_ROUND_BYTES = 4 << 20  # prepared in advance and sent repeatedly
_TIMEOUT_S = 0.2
_TOPICS, _PARTITIONS = 2000, 50  # in the large cluster
_HEAD = struct.Struct(">ihhi")  # size, API key, version, correlation id
_RAW_GSSAPI = struct.pack(">i", 12) + b"\x60" + bytes(11)  # the first token of a client before Kafka 1.0
_NO_SUCH_API = 9999
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST


class Sender:
    """State shared by the threads of an attack: the target, the time limit from the first connection on, and the bytes
    sent."""

    def __init__(self, address: Address, seconds: float) -> None:
        self.address = address
        self._seconds = seconds
        self._end = math.inf
        self.sent = 0

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self._end  # the first connection sets it

    def connect(self, *, receive_bytes: int = 0) -> socket.socket:
        if self._end == math.inf:
            self._end = time.monotonic() + self._seconds
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(5.0)
        sock.connect(self.address)
        sock.settimeout(_TIMEOUT_S)
        return sock

    def stream(self, first: bytes, again: bytes) -> None:
        """Send `first`, then `again` without end, on one connection after another; responses are read and discarded."""
        while self.goes_on:
            with suppress(OSError), self.connect() as sock:
                reader = threading.Thread(target=_drop, args=(sock,), daemon=True)
                reader.start()
                self.send(sock, first)
                while self.goes_on:
                    self.send(sock, again)
                sock.shutdown(socket.SHUT_RDWR)

    def send(self, sock: socket.socket, data: bytes, until: float = math.inf) -> None:
        """Send bytes in pieces, as many as the peer accepts until `until` or the end of the attack."""
        left, until = memoryview(data), min(until, self._end)
        while left and time.monotonic() < until:
            with suppress(TimeoutError):
                sent = sock.send(left[:_PIECE_BYTES])
                self.sent += sent
                left = left[sent:]

    def hold(self, connections: int, request: bytes = b"", *, receive_bytes: int = 0) -> None:
        """Open `connections` connections, send the same request on each, read nothing, and keep them until the end."""
        opened: list[socket.socket] = []
        while self.goes_on and len(opened) < connections:
            with suppress(OSError):
                sock = self.connect(receive_bytes=receive_bytes)
                opened.append(sock)
                self.send(sock, request)
        while self.goes_on:
            time.sleep(_TIMEOUT_S)
        for sock in opened:
            sock.close()

    def call(self, sock: socket.socket, request: bytes) -> bytes:
        """The response to one request, without its size. Raises OSError, also if there is no response."""
        sock.settimeout(30.0)
        sock.sendall(request)
        self.sent += len(request)
        head = _exactly(sock, 4)
        return _exactly(sock, int.from_bytes(head, "big"))


@dataclass(frozen=True)
class Attack:
    """One way to delay others. listener: the kind of listener that it attacks, as named by `bench.waits`."""

    title: str
    listener: str
    run: Callable[[Sender], None]
    threads: int = 1  # that run it


def _streaming(request: Callable[[], bytes], first: bytes = b"") -> Callable[[Sender], None]:
    def run(sender: Sender) -> None:
        one = request()
        sender.stream(first, one * max(1, _ROUND_BYTES // len(one)))

    return run


def _smallest() -> bytes:
    return _HEAD.pack(8, _NO_SUCH_API, 0, 1)


def _many_partitions(count: int = 17, acks: int = 1) -> bytes:
    """The smallest Produce that names `count` partitions: each costs a lookup with `detail = "topics"`."""
    data = [{"index": index, "records": None} for index in range(count)]
    body = {"transactionalId": None, "acks": acks, "timeoutMs": 1, "topicData": [{"name": "t", "partitionData": data}]}
    return cases.request_frame(PRODUCE, 3, body)


def _bursts(sender: Sender) -> None:
    """Send small requests on 300 connections, so that their events count as cheap; then large ones, on all at once."""
    with ExitStack() as opened:
        socks = [opened.enter_context(sender.connect()) for _ in range(300)]
        little, much = _many_partitions(1, acks=0), _many_partitions(acks=0) * 64
        while sender.goes_on:
            for request in (little, little, little, much):
                for sock in socks:
                    sender.send(sock, request, time.monotonic() + _TIMEOUT_S)
                time.sleep(0.06 if request is little else 0.3)


def _ask_for_all(sender: Sender) -> None:
    request = cases.request_frame(METADATA, 12, _METADATA)
    while sender.goes_on:
        with suppress(OSError), sender.connect() as sock:
            sender.call(sock, request)


def _never_read(sender: Sender) -> None:
    """Request everything and read nothing."""
    sender.hold(100, cases.request_frame(METADATA, 12, _METADATA) * 4, receive_bytes=4096)


def _refused_names(sender: Sender) -> None:
    """65,000 names, all refused by rules."""
    groups = [f"g-{number}" for number in range(65_000)]
    request = cases.request_frame(DESCRIBE_GROUPS, 5, {"groups": groups, "includeAuthorizedOperations": False})
    while sender.goes_on:
        with suppress(OSError), sender.connect() as sock:
            while sender.goes_on:
                sender.call(sock, request)


def _logins(mechanism: str, token: Callable[[int], bytes]) -> Callable[[Sender], None]:
    def run(sender: Sender) -> None:
        handshake = cases.request_frame(SASL_HANDSHAKE, 1, {"mechanism": mechanism})
        for number in itertools.count():
            if not sender.goes_on:
                return
            with suppress(OSError), sender.connect() as sock:
                sender.call(sock, handshake)
                sender.call(sock, cases.request_frame(SASL_AUTHENTICATE, 1, {"authBytes": token(number)}))

    return run


def _guess(number: int) -> bytes:
    return b"\0alice\0guess-%d-%d" % (os.getpid(), number)


def _deep_token(_: int) -> bytes:
    """A token whose JSON is 40,000 arrays deep; the client leaves at the challenge that reports its error."""
    header = urlsafe_b64encode(b'{"alg":' + b"[" * 40_000).rstrip(b"=")
    return b"n,,\1auth=Bearer " + header + b".e30.AA\1\1"


def _connections(sender: Sender) -> None:
    """Connect, send a request with a client id of its own, reset."""
    for number in itertools.count():
        if not sender.goes_on:
            return
        name = f"client-{os.getpid()}-{threading.get_ident()}-{number}"
        request = codec.framed_request(API_VERSIONS, 0, 0, name, {})
        with suppress(OSError), sender.connect() as sock:
            sender.call(sock, request)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def _handshakes(sender: Sender) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    while sender.goes_on:
        with suppress(OSError), sender.connect() as sock:
            sock.settimeout(5.0)
            context.wrap_socket(sock).close()


def _scrapes(sender: Sender) -> None:
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    while sender.goes_on:
        with suppress(OSError), sender.connect() as sock:
            sock.sendall(request)
            sender.sent += len(request)
            while sock.recv(1 << 20):
                pass


def _silent(sender: Sender) -> None:
    sender.hold(200)


def _zookeeper(then_reset: bool) -> Callable[[Sender], None]:
    """A session, then getData of /a in frames of 15 bytes, as many as the peer accepts."""
    connect = struct.pack(">iqiqi", 0, 0, 30_000, 0, 16) + bytes(16) + b"\0"
    path = b"/a"
    get_data = struct.pack(">iii", 1, 4, len(path)) + path + b"\0"
    first, again = (struct.pack(">i", len(body)) + body for body in (connect, get_data))

    def run(sender: Sender) -> None:
        many = again * ((3 << 20) // len(again))
        if not then_reset:
            sender.stream(first, many)
            return
        while sender.goes_on:
            with suppress(OSError), sender.connect() as sock:
                sender.send(sock, first + many, time.monotonic() + 0.5)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    return run


_METADATA: dict[str, Any] = {
    "topics": None,
    "allowAutoTopicCreation": False,
    "includeTopicAuthorizedOperations": False,
}

ATTACKS = {
    "nothing": Attack("nothing", "plain", lambda _: None),
    "small": Attack("requests of 12 bytes of no known API", "plain", _streaming(_smallest)),
    "tokens": Attack("raw GSSAPI tokens of no bytes", "plain", _streaming(lambda: bytes(4), _RAW_GSSAPI)),
    "answered": Attack(
        "ApiVersions that kproxy answers", "plain", _streaming(lambda: codec.framed_request(API_VERSIONS, 0, 1, "", {}))
    ),
    "partitions": Attack("Produces of 17 partitions", "topics", _streaming(_many_partitions), threads=2),
    "bursts": Attack("300 connections, 64 such Produces at one moment", "topics", _bursts),
    "garbage": Attack("random bytes", "plain", _streaming(lambda: os.urandom(1 << 16))),
    "metadata": Attack("Metadata of 100,000 partitions, 40 at once", "topics", _ask_for_all, threads=40),
    "unread": Attack("400 clients that never read 5 MiB", "plain", _never_read, threads=4),
    "refused": Attack("DescribeGroups of 65,000 refused names", "policy", _refused_names, threads=2),
    "guesses": Attack("PLAIN passwords, guessed", "login", _logins("PLAIN", _guess), threads=8),
    "deep": Attack("tokens of 40,000 nested arrays", "login", _logins("OAUTHBEARER", _deep_token), threads=4),
    "connections": Attack("connections, each with a new client id", "plain", _connections, threads=4),
    "handshakes": Attack("TLS handshakes", "tls", _handshakes, threads=8),
    "scrapes": Attack("scrapes of the admin port", "admin", _scrapes, threads=8),
    "silent": Attack("silent connections of the admin port", "admin", _silent, threads=4),
    "zookeeper": Attack("ZooKeeper requests of 15 bytes", "zookeeper", _zookeeper(then_reset=False), threads=4),
    "resets": Attack("3 MiB of them, then a reset", "zookeeper", _zookeeper(then_reset=True), threads=4),
}


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("closed before the answer was whole")
        data += part
    return bytes(data)


def _drop(sock: socket.socket) -> None:
    while True:
        try:
            if not sock.recv(_PIECE_BYTES):
                return
        except TimeoutError:
            continue
        except OSError:
            return


# --- the broker ------------------------------------------------------------------------------------------------------


@cache
def _large_cluster(port: int) -> bytes:
    """A framed Metadata v12 response with correlation id 0: one broker here, 100,000 partitions."""
    partitions = [
        {
            "errorCode": 0,
            "partitionIndex": index,
            "leaderId": 0,
            "leaderEpoch": 7,
            "replicaNodes": [0],
            "isrNodes": [0],
            "offlineReplicas": [],
        }
        for index in range(_PARTITIONS)
    ]
    topics = [
        {
            "errorCode": 0,
            "name": f"team.domain.topic-{number:06}",
            "topicId": uuid.UUID(int=number + 1),
            "isInternal": False,
            "partitions": partitions,
            "topicAuthorizedOperations": -2147483648,
        }
        for number in range(_TOPICS)
    ]
    body = _cluster_of(port) | {"clusterId": "attacked", "topics": topics}
    return _framed(METADATA, 12, body)


def _cluster_of(port: int) -> dict[str, Any]:
    broker = {"nodeId": 0, "host": "127.0.0.1", "port": port, "rack": None}
    return {"throttleTimeMs": 0, "brokers": [broker], "clusterId": "attacked", "controllerId": 0, "topics": []}


def _framed(api_key: int, version: int, body: dict[str, Any]) -> bytes:
    answer = codec.encode_response(api_key, version, {"correlationId": 0}, body)
    return cases.INT32.pack(len(answer)) + answer


@cache
def _answer(api_key: int, version: int, port: int) -> bytes | None:
    if api_key == API_VERSIONS:
        ranges = [(PRODUCE, 0, 9), (FETCH, 0, 12), (METADATA, 0, 12), (API_VERSIONS, 0, 0), (DESCRIBE_GROUPS, 0, 5)]
        keys = [{"apiKey": key, "minVersion": low, "maxVersion": high} for key, low, high in ranges]
        return _framed(API_VERSIONS, 0, {"errorCode": 0, "apiKeys": keys})
    if api_key != METADATA:
        return None
    return _large_cluster(port) if version >= 12 else _framed(METADATA, version, _cluster_of(port))


def _serve(sock: socket.socket, port: int) -> None:
    with suppress(OSError), sock:
        while True:
            size, api_key, version, correlation_id = _HEAD.unpack(_exactly(sock, _HEAD.size))
            answer = _answer(api_key, version, port)
            if answer is None:
                while sock.recv(_PIECE_BYTES):
                    pass
                return
            _exactly(sock, size - (_HEAD.size - 4))
            sock.sendall(answer[:4] + cases.INT32.pack(correlation_id))
            sock.sendall(memoryview(answer)[8:])


def _accepted(server: socket.socket) -> Iterator[socket.socket]:
    while True:
        yield server.accept()[0]


def broker() -> None:
    """Print the port, and serve until the process is ended."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        port = server.getsockname()[1]
        _large_cluster(port)
        print(port, flush=True)
        for sock in _accepted(server):
            threading.Thread(target=_serve, args=(sock, port), daemon=True).start()


def attack(name: str, address: Address, seconds: float) -> int:
    """Run an attack; returns the bytes sent, without handshakes."""
    sender = Sender(address, seconds)
    threads = [
        threading.Thread(target=ATTACKS[name].run, args=(sender,), daemon=True) for _ in range(ATTACKS[name].threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sender.sent


if __name__ == "__main__":
    if sys.argv[1] == "broker":
        broker()
    else:
        host, _, port = sys.argv[3].rpartition(":")
        print(attack(sys.argv[2], (host, int(port)), float(sys.argv[4])))
