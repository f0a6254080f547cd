"""Flaws of a capture, counted, so that nobody takes "not captured" for "slow".

Duty: one row for each kind of flaw or trait, with its count, bytes, first and last time, and a plain sentence. Each
byte of a capture that is in no table is counted in one of these rows.

Address translation does not change sequence numbers. Two connections that begin with the same sequence numbers at the
same time are therefore one stream, captured on both sides of the translation: its exchanges are in the tables twice.

Bounds, for each reader: the kinds below, MAX_STREAMS connections whose sequence numbers are compared, and MAX_NAMES
names of headers and servers.

Refuses to know files, packets and sessions: the code that finds a flaw names its kind.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kproxy.wording import few

NONE = -1

MAX_STREAMS = 1 << 16
SAME_STREAM_NS = 1_000_000_000  # between the first packets of two captures of one stream
_STREAM = "stream "  # begins the keys of rows that only `_copies` reads
NAME_AT = len(_STREAM) + 17  # offset of a connection's ends in such a key, behind two sequence numbers
_SAME_ENDS = 64  # a connection is compared with the last 64 that have the same ends
_NAMED = 3  # copies, headers or servers named in a sentence
_WITH_NAMES = frozenset(
    (
        *("unknown_link", "unread", "connect_refused", "connect_unanswered", "connect_closed_at_once"),
        *("other_protocol", "connect_undelivered", "tls_alert", "tls_expected", "tls_unanswered"),
    )
)
_DERIVED = frozenset(("same_stream", "no_times"))
MAX_NAMES = 64
FEW_PACKETS = 3  # fewer packets may have the same time by chance

# kind -> sentence; the order here is the order of the summary
KINDS = {
    "packets": "packet records read",
    "kafka": "connections whose bytes are Kafka's",
    "cut_file": "files that end inside a record: the capture was stopped, or copied or cut while it was being written",
    "damaged": "places where a record's header made no sense; reading went on at the next record that did",
    "zeros": "places of zeros without a record: behind the last one the file was preallocated; elsewhere, which is "
    "damage, a crash or a full disk left blocks unwritten",
    "clock_back": "packets stamped earlier than the one before them; times count from the latest",
    "clock_step": "times that the capturing machine's clock was set: times behind are those of the clock as it was "
    "before, so durations are right and the time of day is not",
    "kernel_drops": "packets that the capturing machine dropped, by its own count: capture with a larger buffer",
    "unknown_link": "packets of a link type that kproxy does not read: capture on Ethernet, or with -i any",
    "unread": "packets under headers that kproxy does not read: capture inside them, as on the host itself",
    "not_tcp": "packets without TCP inside",
    "undelivered": "ICMP messages that a TCP segment was not delivered: too large, unreachable or prohibited",
    "malformed": "packets whose IP or TCP header makes no sense",
    "fragments": "IP fragments whose other parts were not captured",
    "truncated": "segments cut by the capture's snap length: capture with -s 0",
    "duplicate_packets": "packets captured twice, as at both ends, or on a bridge and its member: one was dropped",
    "retransmissions": "retransmissions: segments lost on the network, or acknowledged late by a busy receiver",
    "out_of_order": "segments that arrived behind a later one and were put in order",
    "zero_windows": "times a receiver closed its window: it reads more slowly than its peer sends",
    "gap": "gaps: bytes that the receiver acknowledged and the capture does not contain",
    "long_gap": "gaps of more than 1 GiB, such as a missing file of a rotated capture: their size is not known",
    "one_direction": "connections with only one captured direction: the bytes of the other one are missing",
    "no_times": "packets that all have the same time: durations and latencies of this capture are not known",
    "resync": "bytes captured but skipped to find the next frame after a gap or a late start",
    "midstream": "connections already open when the capture began",
    "open": "connections still open when the capture ended",
    "idle": "connections put away because too many were open at once; the longest idle went first",
    "clusters": "clusters, distinguished by the cluster ids in responses, or by brokers that list each other: the "
    "column cluster has them",
    "cluster_unknown": "connections whose cluster no response shows: their column cluster has the given name",
    "clusters_not_shown": "brokers without a Metadata or DescribeCluster response in the capture: whether they are one "
    "cluster is not known, and they have one name; begin to capture before clients connect",
    "clusters_as_one": "clusters that have one name with another one, since their brokers have the same addresses, or "
    "kproxy watch knows too many: capture or watch each by an interface or a port of its own",
    "clusters_unclear": "sets of brokers that name each other, with the same node ids and without a cluster id (before "
    "Kafka 0.10.1, or for clients of that age): listeners of one cluster, or clusters of their own; they have one "
    "name: convert the packets of each apart, with --cluster NAME",
    "same_stream": "connections captured a second time under other addresses, as of a ClusterIP and of its pod: their "
    "exchanges are counted twice; leave one address out of the capture, or out of the question",
    "in_two_captures": "connections that another capture holds too, as those of both ends: their exchanges are in the "
    "tables twice; choose one capture with --where \"source = 'NAME'\", or compare them with --by source",
    "tls_decrypted": "Kafka connections that were encrypted with TLS, and read with its keys",
    "tls": "connections encrypted with TLS: to read them, give their keys with --key-log FILE",
    "tls_alert": "TLS handshakes that one side ended by an alert, which says why",
    "tls_expected": "connections of a client without TLS to a port with it: set its security.protocol",
    "tls_unanswered": "TLS handshakes that the server did not answer, or not in TLS: most often, its port has no TLS",
    "zookeeper": "ZooKeeper connections, whose operations are in the table registry",
    "http": "HTTP connections",
    "other_protocol": "connections of other protocols",
    "not_kafka": "connections that speak neither Kafka nor TLS, ZooKeeper or HTTP",
    "undecided": "connections whose protocol is not clear: too few bytes, or one side only",
    "no_data": "connections without a byte of payload",
    "connect_refused": "connection attempts that were refused: nothing listens there, or a firewall resets",
    "connect_closed_at_once": "connection attempts that the server closed before a byte of either side: its limit "
    "of connections is reached, or a load balancer has no server behind it",
    "connect_undelivered": "connection attempts that ICMP answered: a router, a firewall or the host reports that "
    "they cannot be delivered",
    "connect_unanswered": "connection attempts that nobody answered, or whose answer the client never got: the host "
    "is down, unknown or behind a firewall, or packets come back another way",
    "raw_sasl": "SASL tokens without a Kafka header, which give no exchanges",
    "after_reset": "segments captured behind the reset of their connection; what they carry is in no table",
    "other_ports": "segments of other ports than those asked for",
    "strays": "segments whose sequence number belongs to no window of their connection",
    "zookeeper_fault": "places where a ZooKeeper connection is not what its protocol says",
    "zookeeper_unread": "operations of ZooKeeper whose values are not all read: larger than 1 MiB, or malformed",
    "records_left_out": "batches of chosen topics too large for all of their records to be written",
    "records_unread": "batches of chosen topics whose records do not decompress or make no sense",
    "not_kept": "exchanges missing from the tables of groups, leaders and changes: their frames are too large, too "
    "many at once, or not captured whole",
    "not_decoded": "exchanges missing from the tables of groups, leaders and changes: they do not decode",
    "log_unnamed": "batches that look like those of __consumer_offsets or __transaction_state, of a topic whose name "
    "no response shows; they are in no table of groups",
    "forgotten": "groups, members, topics and partitions beyond the number followed at once",
    "fault": "places where a Kafka connection breaks the protocol, or answers a request that was not captured",
    "cut_request": "connections that ended within the header of a request, which no table has",
}


@dataclass(frozen=True)
class Row:
    kind: str
    count: int
    bytes: int
    first_ns: int  # NONE: no time is known
    last_ns: int
    sentence: str


class Stream(NamedTuple):
    """A Kafka connection in a capture."""

    key: str  # the sequence numbers of client and broker at its first packet, and its ends
    first_ns: int
    last_ns: int
    size: int  # its bytes

    @property
    def name(self) -> str:
        """Its ends."""
        return self.key[NAME_AT:]

    def is_part_of(self, other: "Stream") -> bool:
        """Whether its first packets are among the bytes of `other`, one with the same ends at the same time."""
        ahead = [
            (int(self.key[at : at + 8], 16) - int(other.key[at : at + 8], 16)) & 0xFFFF_FFFF
            for at in (len(_STREAM), len(_STREAM) + 8)
        ]
        return other.first_ns <= self.last_ns and self.first_ns < other.last_ns and sum(ahead) <= other.size


class Twice:
    """Finds connections that are in several captures, even if the captures begin at different bytes of them."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._named: dict[str, deque[Stream]] = {}

    def add(self, streams: Iterable[Stream]) -> Iterator[Stream]:
        """Add the connections of one more capture; yield those that are in an earlier capture too."""
        mine = list(streams)
        for stream in mine:
            others = self._named.get(stream.name, ())
            if stream.key in self._keys or any(stream.is_part_of(each) or each.is_part_of(stream) for each in others):
                yield stream
        for stream in mine:
            self._keys.add(stream.key)
            self._named.setdefault(stream.name, deque(maxlen=_SAME_ENDS)).append(stream)


class Quality:
    """The counts of one source; two of them, of two shards, can be added."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}
        self._streams = 0
        self._named = 0

    def note(self, kind: str, time_ns: int = NONE, *, count: int = 1, size: int = 0, last_ns: int = NONE) -> None:
        """Count a kind, `count` times, with `size` bytes, first at `time_ns` and last at `last_ns` (or then too)."""
        if last_ns == NONE:
            last_ns = time_ns
        row = self._rows.get(kind)
        if row is None:
            self._rows[kind] = [count, size, time_ns, last_ns]
            return
        row[0] += count
        row[1] += size
        if time_ns != NONE and (row[2] == NONE or time_ns < row[2]):
            row[2] = time_ns
        row[3] = max(row[3], last_ns)

    def forget(self) -> None:
        """Nothing was counted."""
        self._rows.clear()
        self._streams = self._named = 0

    def note_named(self, kind: str, name: str, time_ns: int, *, size: int = 0, last_ns: int = NONE) -> None:
        """Count a kind, and its subject, a header or a server, for the first MAX_NAMES subjects."""
        self.note(kind, time_ns, size=size, last_ns=last_ns)
        key = f"{kind} {name}"
        if key in self._rows or self._named < MAX_NAMES:
            self._named += key not in self._rows
            self.note(key, time_ns, size=size)

    def _names(self, kind: str) -> str:
        """The most frequent subjects of a kind, in brackets."""
        found = sorted((-row[0], key) for key, row in self._rows.items() if key.startswith(f"{kind} "))
        named = [f"{key.removeprefix(f'{kind} ')} ×{-count:,}" for count, key in found]
        return f" ({few(named, _NAMED)})" if named else ""

    def stream(self, numbers: tuple[int, int], name: str, time_ns: int, last_ns: int, size: int) -> None:
        """A Kafka connection: the sequence numbers of client and broker at its first packet, and its bytes."""
        key = f"{_STREAM}{numbers[0]:08x}{numbers[1]:08x} {name}"
        if self._streams < MAX_STREAMS:
            self._streams += key not in self._rows
            self.note(key, time_ns, size=size, last_ns=last_ns)

    def streams(self) -> Iterator[Stream]:
        """Its Kafka connections."""
        for key, (_, size, first_ns, last_ns) in self._rows.items():
            if key.startswith(_STREAM):
                yield Stream(key, first_ns, last_ns, size)

    def counts(self) -> Iterator[tuple[str, int, int, int, int]]:
        """Arguments of `note` that repeat these counts: kind, count, bytes, first_ns, last_ns."""
        for kind, (count, size, first_ns, last_ns) in self._rows.items():
            yield kind, count, size, first_ns, last_ns

    def add(self, other: "Quality") -> None:
        for kind, count, size, first_ns, last_ns in other.counts():
            self.note(kind, first_ns, count=count, size=size, last_ns=last_ns)

    def count(self, kind: str) -> int:
        if kind in _DERIVED:
            derived = self._derived(kind)
            return derived.count if derived else 0
        row = self._rows.get(kind)
        return row[0] if row else 0

    def size(self, kind: str) -> int:
        row = self._rows.get(kind)
        return row[1] if row else 0

    def __iter__(self) -> Iterator[Row]:
        for kind, sentence in KINDS.items():
            if kind in _DERIVED:
                derived = self._derived(kind)
                if derived is not None:
                    yield derived
            elif (row := self._rows.get(kind)) is not None:
                names = self._names(kind) if kind in _WITH_NAMES else ""
                yield Row(kind, row[0], row[1], row[2], row[3], sentence + names)

    def _derived(self, kind: str) -> Row | None:
        """The row of a kind that follows from the counts of others."""
        return self._copies() if kind == "same_stream" else self._without_times()

    def _without_times(self) -> Row | None:
        """All packets, where they have one time, as of a program that writes none."""
        count, _, first_ns, last_ns = self._rows.get("packets", (0, 0, NONE, NONE))
        if count < FEW_PACKETS or first_ns == NONE or first_ns != last_ns:
            return None
        return Row("no_times", count, 0, first_ns, last_ns, KINDS["no_times"])

    def _copies(self) -> Row | None:
        """The connections that are copies of another one."""
        streams: dict[str, list[tuple[int, int, str]]] = {}
        for key, (_, size, first_ns, _) in self._rows.items():
            if key.startswith(_STREAM):
                _, numbers, name = key.split(" ", 2)
                streams.setdefault(numbers, []).append((first_ns, size, name))
        pairs = []
        for found in streams.values():
            found.sort()
            for (_, _, original), copy in pairwise(found):
                if copy[0] - found[0][0] <= SAME_STREAM_NS:
                    pairs.append((*copy, original))
        if not pairs:
            return None
        pairs.sort()
        named = few([f"{copy} is {original}" for _, _, copy, original in pairs], _NAMED, "; ")
        times = [time_ns for time_ns, _, _, _ in pairs]
        sentence = f"{KINDS['same_stream']} ({named})"
        return Row("same_stream", len(pairs), sum(size for _, size, _, _ in pairs), times[0], times[-1], sentence)
