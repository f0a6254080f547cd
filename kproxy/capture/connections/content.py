"""The protocol of a connection, by its first bytes: Kafka, TLS, ZooKeeper, HTTP, another, or not clear yet.

Duty: `opening` judges a stream from its very beginning; `witness` judges one segment of a stream that was joined in the
middle. It is Kafka only if a request has a plausible header and a body that decodes to its end, or got an answer with
its correlation id: otherwise a ZooKeeper connect would pass for a Produce v0 with an empty client id.

Refuses to know connections and ports.
"""

import re
from typing import Any

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, CONTROLLED_SHUTDOWN
from kproxy.wire import frames
from kproxy.zookeeper.session import side_of

KAFKA, TLS, ZOOKEEPER, HTTP, NOT_KAFKA = "kafka", "tls", "zookeeper", "http", "not_kafka"

HEAD = 64 * 1024  # most bytes of each side that are examined
_OVER = 16  # most bytes after a body's end that are accepted: librdkafka sends three
SOCKS, HTTP_CONNECT = TUNNELS = ("SOCKS", "HTTP CONNECT")  # they carry other protocols behind their own messages
# How clients of other protocols begin. Read as the head of a request, they have an impossible size, API or client id;
# PostgreSQL's and Pulsar's have a correlation id that no connection begins with.
_FOREIGN = (
    ("MQTT", re.compile(rb"\x10(?:[\x80-\xff]{0,3}[\0-\x7f])\0(?:\x04MQTT|\x06MQIsdp)")),
    ("AMQP", re.compile(rb"AMQP[\0-\x03]")),
    ("SSH", re.compile(rb"SSH-")),
    ("PostgreSQL", re.compile(rb"\0\0\0\x08\x04\xd2\x16[\x2f\x30]")),  # a request for TLS or GSSAPI
    ("PostgreSQL", re.compile(rb"(?s)\0\0..\0\x03\0[\0-\x02][a-z_]{3}")),  # a StartupMessage
    ("Redis", re.compile(rb"\*[1-9][0-9]*\r\n\$")),
    (SOCKS, re.compile(rb"\x05(?:\x01[\0\x02](?:\x05\x01\0|\x01)|\x02\0[\x01\x02]|\x03\0\x01\x02)")),  # RFC 1928
    (SOCKS, re.compile(rb"(?s)\x04\x01..[\x01-\xff]...[\x20-\x7e]*\0")),  # version 4
    ("Cassandra", re.compile(rb"(?s)[\x03-\x05]\0..[\x01\x05]\0\0")),  # STARTUP or OPTIONS
    ("MongoDB", re.compile(rb"(?s)...\0....\0\0\0\0[\xd4\xdd]\x07\0\0")),
    ("Pulsar", re.compile(rb"(?s)\0\0..\0\0..\x08\x02\x12")),
    (HTTP_CONNECT, re.compile(rb"CONN")),
    ("SMB", re.compile(rb"(?s)\0...[\xfd-\xff]SMB")),
    ("Oracle", re.compile(rb"(?s)..\0\0\x01\0\0\0\x01[\x20-\x5f]")),  # a TNS CONNECT of version 288 to 351
    ("SQL Server", re.compile(rb"(?s)\x12\x01..\0\0[\0\x01]\0")),  # a PRELOGIN of TDS
    ("MySQL", re.compile(rb"(?s)..\0\x01.{9}\0{19}")),  # HandshakeResponse41 or SSLRequest
    ("LDAP", re.compile(rb"(?s)\x30(?:[\x05-\x7f]|\x84\0...)\x02\x01.[\x60\x63\x77]")),  # bind, search, StartTLS
)
_UNKNOWN = "an unknown protocol"
# https://zookeeper.apache.org/doc/current/zookeeperAdmin.html#sc_4lw
_FOUR_LETTERS = frozenset(
    b"conf cons crst dump envi ruok srst srvr stat wchs wchc wchp mntr isro hash dirs gtmk stmk".split()
)


def opening(client: bytes | bytearray, broker: bytes | bytearray, trusted: str | None) -> str | None:
    """The protocol by the client's first bytes, and the broker's if needed; None: more bytes are needed.

    trusted: the user's protocol for this port; it holds, unless the bytes are clearly of another one.
    """
    if len(client) < 4:
        return None
    if _named(client) is not None:
        return NOT_KAFKA
    kind = _other(client)
    if kind is not None:
        return kind
    if trusted is not None:
        return trusted
    if len(client) < 14:
        size = int.from_bytes(client[:4], signed=True)
        return None if 10 <= size <= frames.MAX_REQUEST else NOT_KAFKA
    if _is_zookeeper_connect(client):
        return ZOOKEEPER
    if not _plausible(client):
        return NOT_KAFKA
    whole = _decodes(client)
    if whole is not None:
        return KAFKA if whole else NOT_KAFKA
    if len(broker) >= 8 and broker[4:8] == client[8:12]:
        return KAFKA
    return KAFKA if len(client) >= HEAD else None


def foreign(client: bytes | bytearray) -> str | None:
    """The name of another protocol that the client's first bytes are of; None: they may be the head of a request."""
    name = _named(client)
    if name is None and len(client) >= 4:
        size = int.from_bytes(client[:4], signed=True)
        return None if frames.MIN_REQUEST <= size <= frames.MAX_REQUEST else _UNKNOWN
    return name


def _named(client: bytes | bytearray) -> str | None:
    """The name of the protocol whose clients begin like this; None: none that is known."""
    return next((name for name, begin in _FOREIGN if begin.match(client)), None)


def begins_request(segment: Any) -> bool:
    """Whether a segment begins with the header of a request, as far as it goes, whose client id is a text."""
    head = bytes(segment[:HEAD])
    if len(head) < 12 or not frames.is_known(head, 0):
        return False
    if len(head) < 14:
        return 10 <= int.from_bytes(head[:4], signed=True) <= frames.MAX_REQUEST
    named = frames.client_id(head, 0, len(head))
    return named is not ... and frames.is_printable(named)


def witness(segment: Any) -> tuple[int, bool] | None:
    """(correlation id, whether its body decodes to its end) of the request that a segment begins with, if it does."""
    head = bytes(segment[:HEAD])
    if len(head) < 14 or _is_zookeeper_connect(head) or not _plausible(head):
        return None
    whole = _decodes(head)
    if whole is False:
        return None
    return int.from_bytes(head[8:12], signed=True), bool(whole)


def other(segment: Any) -> str | None:
    """TLS, HTTP or ZooKeeper if a segment in the middle of a stream begins as theirs do."""
    head = bytes(segment[:64])
    return _other(head) if len(head) >= 5 else None


def zookeeper_side(segment: Any) -> int | None:
    """Which side of a ZooKeeper connection (CLIENT, SERVER) sent a segment in the middle of a stream; None: unclear."""
    return side_of(bytes(segment[:HEAD])) if segment[:1] == b"\0" else None


def _other(head: bytes | bytearray) -> str | None:
    if 0x14 <= head[0] <= 0x17 and head[1] == 3 and head[2] <= 4:
        return TLS
    kind, _ = frames.sniff(bytes(head[:8]))
    if kind == "http":
        return HTTP
    if bytes(head[:4]) in _FOUR_LETTERS or _is_zookeeper_connect(head):
        return ZOOKEEPER
    return None


def _is_zookeeper_connect(head: bytes | bytearray) -> bool:
    """ConnectRequest: protocol version 0, last zxid, timeout, session id, a password of 16 bytes, perhaps a flag."""
    return (
        len(head) >= 32
        and int.from_bytes(head[:4]) in (44, 45)
        and int.from_bytes(head[4:8]) == 0
        and int.from_bytes(head[28:32]) == 16
    )


def _plausible(head: bytes | bytearray) -> bool:
    size, key_version, _ = frames.REQUEST_HEAD.unpack_from(head)
    if key_version == CONTROLLED_SHUTDOWN << 16:  # the one header without a client id
        return bool(size == 12)
    if key_version >> 16 == API_VERSIONS and 10 <= size <= 4096:  # a client newer than our schema opens with it
        return key_version & 0xFFFF < 32 or frames.client_id(head, 0, len(head)) is not ...
    return frames.plausible_request(head, 0, len(head))


def _decodes(head: bytes | bytearray) -> bool | None:
    """Whether the whole first request decodes; None: it is not whole, or newer than the schema."""
    size = int.from_bytes(head[:4])
    if len(head) < 4 + size:
        return None
    try:
        codec.decode_request(frames.without_client_id(head, 0, 4 + size))
    except ProtocolError:
        return None if int.from_bytes(head[4:6]) == API_VERSIONS else False
    return True
