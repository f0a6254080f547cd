"""One connection of a capture: the values of its row in `connections`.

`receivers.py` reads its bytes, or `DISCARD` drops them. Refuses to know which packets belong to a flow, and when it
ends.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import AF_INET, AF_INET6, inet_ntop
from typing import Any, Protocol

from kproxy.capture.connections import content, stalls
from kproxy.capture.connections.reassembly import MASK, Budget, Conversation
from kproxy.capture.dissection.packets import HOST_UNREACHABLE, NET_UNREACHABLE, PORT_UNREACHABLE, PROHIBITED
from kproxy.capture.quality import Quality
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import CLIENT, NONE, SIDES, Event, Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.offline.bulk import Bulk
from kproxy.wire.offline.captured import CapturedSession
from kproxy.zookeeper import session as zookeeper

REFUSED, UNANSWERED, CLOSED_AT_ONCE = "refused", "unanswered", "closed_at_once"
UNREACHABLE = PORT_UNREACHABLE, HOST_UNREACHABLE, NET_UNREACHABLE, PROHIBITED
UNCONNECTED = REFUSED, UNANSWERED, CLOSED_AT_ONCE, *UNREACHABLE  # how connects fail
AT_ONCE_NS = 1_000_000_000  # after the handshake; a server that ends an idle connection waits for longer
ANSWERED_IN_CLEAR, TLS_EXPECTED = "answered in clear", "TLS expected"  # how handshakes fail, or UNANSWERED
Listener = Callable[[list[Event]], None]
ZooKeeperListener = Callable[[list[zookeeper.Event]], None]


class Behind(Protocol):
    """The bytes of the current window that a session has not received yet (columns/later.py)."""

    def then(self, action: Callable[[], None]) -> None: ...


_COUNTED = {
    "duplicate_packets": "duplicates",
    "retransmissions": "retransmissions",
    "out_of_order": "out_of_order",
    "zero_windows": "zero_windows",
    "long_gap": "long_gaps",
}


class Flow:
    """One connection of the capture, with its values for the table `connections`."""

    __slots__ = (
        "alert",
        "client",
        "close",
        "continues",
        "decrypted",
        "ends",
        "first_ns",
        "foreign",
        "heard_ns",
        "info",
        "is_answered_in_clear",
        "is_probe",
        "is_simultaneous",
        "keys",
        "lacks_beginning",
        "last_ns",
        "later",
        "meets_tls",
        "noted",
        "path_mtu",
        "payload_bytes",
        "plain",
        "proxied",
        "reset_by",
        "rtt_ns",
        "sasl_tokens",
        "session",
        "speaks",
        "start_seen",
        "syn_ns",
        "talk",
        "unreachable",
    )

    def __init__(self, keys: tuple[bytes, bytes], time_ns: int, budget: Budget, noted: Quality) -> None:
        self.keys = keys  # the key of segments from side 0, and that of segments from side 1
        self.noted = noted  # counts its flaws as they occur
        self.ends = (_address(keys[0]), _address(keys[1]))
        self.client = -1  # the conversation's side that is the client; -1: not known yet
        self.first_ns = time_ns
        self.last_ns = time_ns
        self.syn_ns = -1  # time of the client's SYN, until the end of the handshake
        self.rtt_ns = -1  # time between the client's SYN and its next segment
        self.start_seen = False
        self.lacks_beginning = False  # bytes of its first frame are missing, so a frame may begin at any byte
        self.plain = True  # past its handshake and not ended: segments go directly to the conversation
        self.proxied: tuple[str, int] | None = None  # the client that a PROXY header names
        self.reset_by = -1  # the side that reset it
        self.close = "open"  # fin, reset, idle, reused, one of UNCONNECTED, or open at the capture's end
        self.unreachable: str | None = None  # why ICMP reports that its SYN was not delivered
        self.path_mtu: int | None = None  # the smallest MTU that ICMP reported for a packet that was too big
        self.speaks: str | None = None
        self.foreign: str | None = None  # the name of the protocol, if it is a known one that kproxy does not read
        self.continues = False  # another reader has its beginning; the joining code counts its flaws
        self.decrypted = False  # its protocol was found in decrypted bytes
        self.sasl_tokens = 0  # known at its end
        self.payload_bytes = [0, 0]
        self.alert: tuple[int, str] | None = None  # the side that ended a TLS handshake, and its alert
        self.is_answered_in_clear = False  # its TLS handshake got an answer that is not TLS
        self.is_simultaneous = False  # both sides sent a SYN before an ACK
        self.is_probe = False  # the client ended it within its ClientHello
        self.meets_tls = False  # the response to its first bytes is a TLS alert: the port expects TLS
        self.info: ConnectionInfo | None = None
        self.session: CapturedSession | None = None
        self.heard_ns = time_ns  # the current time for the listener of its events
        self.later: Behind | None = None
        self.talk = Conversation(DISCARD, budget)

    def begin_simultaneously(self) -> None:
        """Both sides sent a SYN (RFC 9293, 3.5): the side that sends the first bytes is the client."""
        self.is_simultaneous = self.plain = True
        self.syn_ns = self.client = -1

    def failed_connect(self, close: str) -> str | None:
        """Why the connect of a flow that ends by `close` failed, as one of UNCONNECTED; None: it did not fail.

        A single SYN at the end of a capture may get its SYN-ACK later, so UNANSWERED needs a retransmitted SYN. A
        retransmitted SYN-ACK that the client never acknowledges also counts as UNANSWERED: it did not arrive, or its
        acknowledgement got lost.
        """
        if self._has_only_syn_acks and self.talk.halves[1 - self.client].retransmissions:
            return UNANSWERED
        # Without a SYN the client may be unknown.
        server = self.talk.halves[1 - self.client] if self.syn_ns >= 0 else None
        if server is None or server.seen:
            if server is not None and server.retransmissions and self.reset_by != self.client:
                return UNANSWERED
            return CLOSED_AT_ONCE if self._is_closed_at_once(close) else None
        if close == "reset":
            return REFUSED if self.reset_by != self.client else None
        is_retransmitted = self.talk.halves[self.client].retransmissions > 0
        return self.unreachable or (UNANSWERED if is_retransmitted else None)

    @property
    def _has_only_syn_acks(self) -> bool:
        """Whether only SYN-ACKs were captured, because the client's packets took another path."""
        is_client_seen = self.talk.halves[self.client].seen or self.reset_by == self.client
        return self.start_seen and self.syn_ns < 0 and not is_client_seen and not any(self.payload_bytes)

    def _is_closed_at_once(self, close: str) -> bool:
        """Whether the server accepted the connection and closed it before either side sent a byte.

        A client that closes it first is a health check, or timed out.
        """
        if not self.start_seen or any(self.payload_bytes) or self.total("gaps"):
            return False
        if self.first_end is None:
            return False
        side, time_ns = self.first_end
        return side == 1 - self.client and time_ns - self.first_ns - max(0, self.rtt_ns) <= AT_ONCE_NS

    @property
    def first_end(self) -> tuple[int, int] | None:
        """The side of the first captured FIN or RST, and its time; None: neither was captured."""
        if self.talk.first_fin is None and self.reset_by >= 0:
            return self.reset_by, self.last_ns
        return self.talk.first_fin

    def total(self, counter: str) -> int:
        """The sum of a counter over both halves: retransmissions, out_of_order, zero_windows, gaps and others."""
        return int(getattr(self.talk.halves[0], counter) + getattr(self.talk.halves[1], counter))

    def sent_again(self, exchange: Exchange) -> int:
        """The number of retransmissions between an exchange's first byte and its last."""
        times = self.talk.retransmitted_ns
        if not times:
            return 0
        start = exchange.request_start if exchange.request_start != NONE else exchange.response_start
        end = exchange.response_end if exchange.response_end != NONE else self.heard_ns
        return bisect_right(times, end) - bisect_left(times, start)

    def stalled(self, exchange: Exchange) -> Sequence[int]:
        """The delays of an answered exchange by lost bytes and closed windows, as `Stalls.of` returns them."""
        if exchange.response_end == NONE or exchange.request_end == NONE:
            return stalls.NOTHING
        times = exchange.request_start, exchange.request_end, exchange.response_start, exchange.response_end
        return self.talk.stalls.of(self.client, times, exchange.queue_ns + exchange.muted_ns)

    @property
    def snapshot(self) -> tuple[Any, ...] | None:
        """The state, by value, that decides the handling of a Kafka connection's next packets.

        None: the state is unusual. Flows of two readers with equal snapshots continue alike (`join`).
        """
        talk, session = self.talk, self.session
        if session is None or self.speaks != content.KAFKA or not self.plain or self.decrypted or not talk.is_still:
            return None
        snapshot = session.snapshot
        if snapshot is None:
            return None
        since_ns = session.waits_since_ns
        sides = self.client, 1 - self.client
        return (
            [self.keys[side] for side in sides],
            [talk.halves[side].position & MASK for side in sides],
            talk.clock_ns,
            [time_ns for time_ns in talk.retransmitted_ns if time_ns >= since_ns],
            [(*each[:2], each[2] ^ self.client, each[3]) for each in talk.stalls.since(since_ns)],
            [talk.halves[side].ack for side in sides],
            snapshot,
        )

    def count_anew(self) -> None:
        """Reset the counters: the previous reader reports the counts up to here."""
        assert self.session is not None
        self.continues = True
        self.session.count_anew()
        self.payload_bytes = [0, 0]
        self.talk.count_anew()

    def join(self, before: "Flow") -> None:
        """Add the counts of `before`: the same connection, up to the point from which this flow counts."""
        turned = self.client ^ before.client
        self.continues = before.continues
        self.info, self.first_ns, self.start_seen = before.info, before.first_ns, before.start_seen
        self.rtt_ns, self.sasl_tokens = before.rtt_ns, self.sasl_tokens + before.sasl_tokens
        self.path_mtu = min(filter(None, (self.path_mtu, before.path_mtu)), default=None)
        for side in (0, 1):
            self.payload_bytes[side] += before.payload_bytes[side ^ turned]
        self.talk.join(before.talk, turned)

    def count(self, quality: Quality) -> None:
        """Count the flaws of an ended flow."""
        first, last = self.first_ns, self.last_ns
        for kind, counter in _COUNTED.items():
            if count := self.total(counter):
                quality.note(kind, first, count=count, last_ns=last)
        if gaps := self.total("gaps"):
            quality.note("gap", first, count=gaps, size=self.total("gap_bytes"), last_ns=last)
        for half in self.talk.halves:
            if half.gaps and not half.seen:  # nothing of that side was captured
                quality.note("one_direction", first, size=half.gap_bytes, last_ns=last)
        if truncated := self.total("truncated"):
            quality.note("truncated", first, count=truncated, size=self.total("truncated_bytes"), last_ns=last)
        if self.talk.strays:
            quality.note("strays", first, count=self.talk.strays, last_ns=last)

    def count_kind(self, quality: Quality) -> None:
        """Count an ended flow by its final protocol."""
        first, last, close = self.first_ns, self.last_ns, self.close
        if self.speaks in (content.KAFKA, content.ZOOKEEPER):
            if not self.start_seen:
                quality.note("midstream", first)
            if close in ("open", "idle"):
                quality.note(close, last)
            numbers = [self.talk.halves[side].first & MASK for side in (self.client, 1 - self.client)]
            name = " to ".join(spelled(self.ends[side]) for side in (self.client, 1 - self.client))
            quality.stream((numbers[0], numbers[1]), name, first, last, sum(self.payload_bytes))
            if self.meets_tls:
                quality.note_named("tls_expected", self._server, first, size=sum(self.payload_bytes), last_ns=last)
            if self.sasl_tokens:
                quality.note("raw_sasl", first, count=self.sasl_tokens, last_ns=last)
            if self.decrypted:
                quality.note("tls_decrypted", first, size=sum(self.payload_bytes), last_ns=last)
        if self.alert is not None and self.speaks == content.TLS:
            side, name = self.alert
            sender = f"a client of {self._server}" if side == self.client else f"the server {self._server}"
            quality.note_named("tls_alert", f"{name} by {sender}", first, size=sum(self.payload_bytes), last_ns=last)
        elif self._is_unanswered_tls:
            quality.note_named("tls_unanswered", self._server, first, size=sum(self.payload_bytes), last_ns=last)
        elif close in UNCONNECTED:
            kind, name = f"connect_{close}", self._server
            if close in UNREACHABLE:
                kind, name = "connect_undelivered", f"{name} {close.replace('_', ' ')}"
            quality.note_named(kind, name, first, last_ns=last)
        elif self.foreign is not None:
            name = f"{self.foreign} at {self._server}"
            quality.note_named("other_protocol", name, first, size=sum(self.payload_bytes), last_ns=last)
        else:
            quality.note(self.speaks or "no_data", first, size=sum(self.payload_bytes), last_ns=last)

    @property
    def _server(self) -> str:
        """HOST:PORT of the server; valid only if the client side is known."""
        return spelled(self.ends[1 - self.client])

    def discard_rest(self) -> None:
        """Discard all further bytes of this connection."""
        self.talk.receiver = DISCARD

    @property
    def _is_unanswered_tls(self) -> bool:
        """Whether the server, whose packets were captured, sent nothing or no TLS in response to a ClientHello."""
        if self.speaks != content.TLS or not self.start_seen:
            return False
        server = 1 - self.client
        is_silent = self.close != "open" and self.talk.halves[server].seen and not self.payload_bytes[server]
        return (is_silent and not self.is_probe) or self.is_answered_in_clear

    @property
    def tls_failure(self) -> str | None:
        """Why the TLS handshake failed: the alert and its sender, or a text; None: no failure, or no handshake."""
        if self.meets_tls:
            return TLS_EXPECTED
        if self.speaks != content.TLS:
            return None
        if self.alert is not None:
            return f"{self.alert[1]} by {'client' if self.alert[0] == self.client else 'broker'}"
        if not self._is_unanswered_tls:
            return None
        return ANSWERED_IN_CLEAR if self.is_answered_in_clear else UNANSWERED

    @property
    def closed(self) -> tuple[str, int] | None:
        """The side that closed it first, and when; None: not captured, or an earlier FIN may be missing."""
        if self.first_end is None:
            return None
        side, time_ns = self.first_end
        is_sure = self.talk.halves[1 - side].seen and not self.talk.has_unseen_fin
        return (SIDES[side ^ self.client], time_ns) if is_sure else None

    def columns(self) -> dict[str, Any]:
        """The TCP columns of its row of `connections`."""
        client = self.client
        broker = self.talk.halves[1 - client]
        late_ns, since_ns, times = broker.latest
        closed_by, closed_ns = self.closed or (None, None)
        return {
            "start_ns": self.first_ns,
            "end_ns": self.last_ns,
            "client_bytes": self.payload_bytes[client ^ CLIENT],
            "broker_bytes": self.payload_bytes[client ^ 1],
            "tls": "tls_decrypted" if self.decrypted else "tls" if self.speaks == content.TLS else "plain",
            "start_seen": self.start_seen,
            "end_seen": self.close in ("fin", "reset", REFUSED, CLOSED_AT_ONCE, *UNREACHABLE),
            "close": self.close,
            "handshake_rtt_ns": None if self.rtt_ns < 0 else self.rtt_ns,
            "retransmissions": self.total("retransmissions"),
            "out_of_order": self.total("out_of_order"),
            "zero_windows": self.total("zero_windows"),
            "gaps": self.total("gaps"),
            "gap_bytes": self.total("gap_bytes"),
            "late_answers": broker.late,
            "late_answer_ns": late_ns or None,
            "late_answer_since_ns": since_ns if late_ns else None,
            "late_answer_times": times if late_ns else None,
            "tls_failure": self.tls_failure,
            "path_mtu": self.path_mtu,
            "closed_by": closed_by,
            "closed_ns": closed_ns,
        }


@dataclass(frozen=True)
class Handlers:
    """Callbacks that the owner of flows sets: for flows of Kafka or TLS, flows of ZooKeeper, and failed connects."""

    decided: Callable[[Flow], Listener]  # the protocol of a flow is clear; returns the listener of its events
    many: Callable[[Sequence[Flow], Bulk], None] | None  # exchanges read by the core; None: all exchanges are events
    ended: Callable[[Flow], None]
    zookeeper: Callable[[ConnectionInfo], ZooKeeperListener] | None = None  # None: nobody listens
    unconnected: Callable[[Flow], None] | None = None  # a connect failed; `ended` is not called for the flow


class Shard:
    """The flows of one shard, in whichever process, and the limits of memory that they share."""

    __slots__ = ("budget", "ended", "interest", "open", "zookeeper")

    def __init__(self, interest: Interest, queued_bytes: int, zookeeper_bytes: int) -> None:
        self.interest = interest
        self.open: dict[Flow, None] = {}
        self.ended: deque[Flow] = deque()
        self.budget = Budget(queued_bytes)
        self.zookeeper = zookeeper.Room(zookeeper_bytes)


class Discard:
    """Receiver that drops all bytes: the connection is neither Kafka nor ZooKeeper, or needs no further reading."""

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        pass

    def gap(self, side: int, count: int, now_ns: int) -> None:
        pass

    def close(self, side: int, now_ns: int) -> None:
        pass


DISCARD = Discard()


def _address(key: bytes) -> tuple[str, int]:
    """(address, port) of the sender in a key."""
    half = len(key) // 2 - 2
    return inet_ntop(AF_INET if half == 4 else AF_INET6, key[:half]), int.from_bytes(key[-4:-2])


def spelled(end: tuple[str, int]) -> str:
    address, port = end
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
