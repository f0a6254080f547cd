"""The connections of a capture: assigns segments to flows, and passes the bytes of each flow to its receiver.

Duty: a flow begins at a SYN or in the middle of a connection, and ends by FIN, reset, reuse of its ports or the end of
the capture. A Session gets its bytes, in order, if its protocol is Kafka. The client is the side that sent the SYN;
without a SYN, the side whose port the user did not name; else the side that sends requests. ZooKeeper flows have a
session of their own; flows of other protocols are named and counted, never taken for Kafka.

A flow depends on its own packets only, so that processes can divide flows by `shard`.

Memory: MAX_FLOWS open flows (beyond that the longest idle ones are closed), and the keys of MAX_ENDED ended ones, for
each shard; QUEUED_BYTES of segments out of order, ZOOKEEPER_BYTES; the memory of flow.py and copies.py. Refuses to know
files, tables and progress.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from kproxy.capture.columns import inorder
from kproxy.capture.columns.later import Deferred, Later
from kproxy.capture.columns.pairs import PairReader
from kproxy.capture.connections import content
from kproxy.capture.connections.flow import DISCARD, UNCONNECTED, Discard, Flow, Handlers, Shard
from kproxy.capture.connections.reassembly import BEHIND, FURTHEST, MASK, Receiver, ahead
from kproxy.capture.connections.receivers import Kafka, Undecided, ZooKeeper
from kproxy.capture.connections.tls_alerts import Alerts
from kproxy.capture.dissection.clock import Clock
from kproxy.capture.dissection.copies import Recent, times_of
from kproxy.capture.dissection.keys import SHARDS, back, shard_of
from kproxy.capture.dissection.packets import ACK, FIN, REASONS, RST, SYN, TOO_BIG, UNDELIVERED, Dissector, Segment
from kproxy.capture.formats.records import Record, Window
from kproxy.capture.quality import FEW_PACKETS, Quality
from kproxy.core import native
from kproxy.wire.bodies import BATCHES, ERRORS, TOPICS, Logs, Room
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.interest import Interest
from kproxy.wire.observing.kept import Kept
from kproxy.wire.offline.captured import CapturedSession
from kproxy.zookeeper import session as zookeeper

MAX_FLOWS = 1024  # per shard
MAX_ENDED = 256
MAX_FOREIGN = 1 << 16
IN_FLIGHT = 4 << 20  # bytes that the other side of a connection may have sent before it receives a reset
QUEUED_BYTES = 4 << 20  # per shard
ZOOKEEPER_BYTES = 8 << 20  # per shard, of large frames and requests without an answer

_EMPTY = memoryview(b"")

ALL, NEW, NOBODY = range(3)  # connections that the reader accepts; NEW: those whose SYN it reads

RETRY_PACKETS = 8  # packets of a connection that are read one by one after disorder, before columns are tried again
MAX_RETRY_PACKETS = 64  # the same, after failed tries
MIN_COLUMN_PACKETS = 16  # fewer packets of a connection are not worth reading by column

Packet = tuple[int, int, Segment]  # its index in the window, its time


class Flows:
    """All flows of one capture that fall into `shards`; feed it the capture's windows, then `finish`."""

    def __init__(
        self,
        source: str,
        quality: Quality,
        handlers: Handlers,
        *,
        cluster: str = "default",
        ports: Collection[int] = (),
        zookeeper_ports: Collection[int] = (),
        shards: Collection[int] = range(SHARDS),
        first: bool = True,
        detail: int = ERRORS,
        room: Room | None = None,
        kept: Callable[[], Kept] | None = None,
        logs: Logs | None = None,
        only: Collection[bytes] | None = None,
        apart: bool = False,
    ) -> None:
        """only: the keys of connections to read; None: all connections of `shards`.

        apart: count the flaws of a flow apart until it ends, so that another reader may take it over.
        """
        self.quality = quality
        self.encrypted: list[Flow] = []  # ended TLS flows, kept to be decrypted, if the owner wants to
        self.keep_encrypted = False
        self.kept: list[Kept] = []  # counts of bytes that were left out of kept frames
        self._source = source
        self._cluster = cluster
        self._handlers = handlers
        self._ports = frozenset(port.to_bytes(2) for port in ports)
        self._zookeeper_ports = frozenset(port.to_bytes(2) for port in zookeeper_ports)
        self._first = first  # count the packets: one of several processes that read the same capture does
        self._dissector = Dissector(quality if first else Quality(), reads_icmp=True)
        self._detail = detail
        self._logs = logs if detail >= TOPICS else None
        core = native() if handlers.many is not None and detail <= BATCHES else None
        self._reader = None if core is None else PairReader(core, detail, self._logs)
        self._ways: dict[bytes, tuple[Flow, int]] = {}
        self._foreign: set[bytes] = set()  # keys that belong to other shards
        self._only = only
        self._away: set[bytes] = set()  # keys whose next packets belong to another reader
        self.takes = ALL  # which new connections this reader accepts; the others belong to another reader
        self._apart = apart
        self.forgotten: set[bytes] = set()  # with `apart`: keys of ended flows that were dropped
        self.unsure: dict[Flow, None] = {}  # flows with a packet that may be a copy of one that another reader got
        self.is_crowded = False  # with the other reader's keys there are more than MAX_FLOWS: evictions may differ
        if kept is None:
            interest = Interest(details=True, detail=detail, room=room, logs=logs)
            self._shards = {number: Shard(interest, QUEUED_BYTES, ZOOKEEPER_BYTES) for number in shards}
        else:  # the limit holds per shard, so that the result does not depend on which shards share a process
            self.kept = [kept() for _ in shards]
            self._shards = {
                number: Shard(
                    Interest(details=True, detail=detail, room=room, kept=of_shard, logs=logs),
                    QUEUED_BYTES,
                    ZOOKEEPER_BYTES,
                )
                for number, of_shard in zip(shards, self.kept, strict=True)
            }
        self._last_ns = -1  # the latest time so far
        self._only_ns = -1  # the time of all packets so far, if it is the same
        self._packets = 0
        self.clock = Clock(quality if first else Quality())
        self._recent = Recent()
        self._deferred = Deferred(self._reader)

    def window(self, window: Window) -> None:
        """Take the packets of a window."""
        window = self.clock.take(window)
        data, records = window.data, window.records
        whole = memoryview(data)
        ways = self._ways
        foreign = self._foreign
        flow: Flow | None
        recent = self._recent
        recent.add(window)
        plain = recent.plain
        self._count(records)
        self._deferred.begin(whole)
        single: dict[Flow, None] = {}  # flows with packets that were read one by one
        try:
            for index, time_ns, segment in self._in_order(window) or self._one_by_one(window):
                held, key, seq, ack, flags, size, start, end, length = segment
                way = ways.get(key)
                if not plain[index] and key not in foreign and not flags & UNDELIVERED:
                    recent.note(index, segment)
                if way is None:
                    if key in foreign or (flow := self._meet(segment, time_ns)) is None:
                        continue
                    side = 0
                else:
                    flow, side = way
                    if flags & (SYN | RST | UNDELIVERED) or not flow.plain:
                        flow = self._turn(flow, side, segment, time_ns, index)
                        if flow is None:
                            continue
                        side = ways[key][1]
                single[flow] = None
                if flags & SYN:
                    seq += 1
                flow.last_ns = time_ns
                if length:
                    flow.payload_bytes[side] += length
                    view = whole[start:end] if held is data else memoryview(held)[start:end]
                else:
                    view = _EMPTY
                talk = flow.talk
                half = talk.halves[side]
                if (half.zero_window or not size) and not length and not flags & FIN and recent.has(index, segment):
                    continue  # its window was already counted, with the first copy
                if talk.segment(side, seq, ack, flags, size, view, length, time_ns):
                    if recent.has_bytes(index, segment):
                        talk.same_packet(side)
                        flow.payload_bytes[side] -= length
                    elif flow.continues and not recent.is_sure(index) and ahead(seq, half.first) < 0:
                        self.unsure[flow] = None
                if not talk.open_sides:
                    self._end(flow, "fin")
            for flows, bulk in self._deferred.play(whole):
                if self._handlers.many is not None:
                    self._handlers.many(flows, bulk)
        finally:
            self._deferred.drop()
            for flow in single:
                flow.talk.keep()
        recent.let_go()

    def _count(self, records: Sequence[Record]) -> None:
        """Count the packets of a window, and those with an earlier time than one before them."""
        if not records:
            return
        times = times_of(records)
        latest = np.maximum.accumulate(np.concatenate(([self._last_ns], times)))
        for time_ns in times[times < latest[:-1]].tolist():
            self._note("clock_back", time_ns)
        self._last_ns = int(latest[-1])
        first_ns = self._only_ns if self._packets else int(times[0])
        self._only_ns = first_ns if (times == first_ns).all() else -1
        self._packets += len(times)
        self._note("packets", int(times.min()), count=len(times), last_ns=self._last_ns)

    def _one_by_one(self, window: Window) -> Iterator[Packet]:
        """The segments of a window."""
        dissect, data = self._dissector.segment, window.data
        for index, (time_ns, link, start, end, wire_bytes) in enumerate(window.records):
            segment = dissect(link, data, start, end, time_ns, wire_bytes)
            if segment is not None:
                yield index, time_ns, segment

    def _in_order(self, window: Window) -> Iterator[Packet] | None:
        """Process the segments of a window that are in order, many at once; return the rest. None: process all."""
        records = self._recent.columns
        if records is None:
            return None
        if (heads := records.heads) is None or len(heads.index) < inorder.FEWEST:
            return None
        numbers: dict[bytes, int] = {}  # number of a connection by each of its two keys
        lanes = []  # half-streams to put in order: (connection, side) of each key
        firsts: list[bytes] = []  # each connection's key that came first
        strangers = 0
        for key in heads.keys:
            is_foreign = self._is_foreign(key)
            strangers += not is_foreign and not self._is_calm(key)
            number = numbers.get(key)
            if is_foreign:
                lanes.append((-1, 0))
            elif number is not None:
                lanes.append((number, 1))
            else:
                lanes.append((len(firsts), 0))
                numbers[key] = numbers[back(key)] = len(firsts)
                firsts.append(key)

        others = np.ones(len(records), bool)
        others[heads.index] = False
        dissect, data = self._dissector.segment, window.data
        known: dict[int, Segment | None] = {}
        odd: dict[int, int] = {}
        for index in np.flatnonzero(others).tolist():
            time_ns, link, start, end, wire_bytes = records[index]
            segment = known[index] = dissect(link, data, start, end, time_ns, wire_bytes)
            if segment is not None:
                key = segment[1]
                strangers += not self._is_calm(key) and not self._is_foreign(key)
                if key in numbers:
                    odd[index] = numbers[key]

        taken = np.zeros(len(records), bool)
        if strangers + max(len(shard.open) for shard in self._shards.values()) > MAX_FLOWS:
            # a flow may be evicted, and the order of all packets decides which one has been idle longest
            return self._rest(window, taken, known)
        if any(number < 0 for number, _ in lanes):
            taken[heads.index[np.array([number < 0 for number, _ in lanes])[heads.lane]]] = True
        if not firsts:
            return self._rest(window, taken, known)
        order = inorder.Order(heads, lanes, odd, records.time_ns)
        positions = {number: self._positions(key) for number, key in enumerate(firsts) if self._is_calm(key)}
        found = order.stretches(positions)
        if sum(stretch.places.stop - stretch.places.start for stretch in found) < len(order.index):
            copies = inorder.copies(heads, records.head, records.time_ns)  # a possible reason
            if copies is not None:
                order.drop(copies)
                found = order.stretches(positions)
        whole = memoryview(data)
        for stretch in found:
            self._take(firsts[stretch.pair], stretch, whole)
            taken[order.index[stretch.places]] = True
        return self._rest(window, taken, known, order, firsts)

    def _is_foreign(self, key: bytes) -> bool:
        """Whether packets with this key can be ignored."""
        if key in self._ways:
            return False
        return key in self._foreign or key in self._away or (self._only is not None and key not in self._only)

    def _is_calm(self, key: bytes) -> bool:
        """Whether the connection of a key is established and has no queued segments."""
        way = self._ways.get(key)
        if way is None:
            return False
        flow = way[0]
        return flow.plain and flow.talk.is_calm and isinstance(flow.talk.receiver, Kafka | Later | ZooKeeper | Discard)

    def _positions(self, key: bytes) -> tuple[int, int]:
        """The stream positions of both sides of a connection, first that of the key's sender."""
        flow, side = self._ways[key]
        return flow.talk.halves[side].position, flow.talk.halves[1 - side].position

    def _take(self, key: bytes, stretch: inorder.Stretch, whole: memoryview) -> None:
        """Process all segments of a stretch, as `Conversation.segment` would; key: that of the stretch's side 0."""
        flow, flip = self._ways[key]
        talk = flow.talk
        standing = zip(stretch.positions, stretch.copies, stretch.acks, strict=True)
        for number, (position, copies, ack) in enumerate(standing):
            half = talk.halves[number ^ flip]
            if ack >= 0:
                half.ack = ack
            flow.payload_bytes[number ^ flip] += position - half.position
            half.position = position
            half.duplicates += copies
        receiver, segments, some = talk.receiver, stretch.segments, stretch.carrying
        if isinstance(receiver, Later):
            receiver.taken(segments, some, flip)
        elif receiver is not DISCARD:
            for side, start, end, time_ns in segments.rows(some.start, some.stop):
                talk.clock_ns = max(talk.clock_ns, time_ns)
                receiver.receive(side ^ flip, whole[start:end], talk.clock_ns)
        talk.clock_ns = max(talk.clock_ns, int(segments.time_ns[some].max(initial=0)))
        flow.last_ns = stretch.last_ns

    def _rest(
        self,
        window: Window,
        taken: np.ndarray,
        known: dict[int, Segment | None],
        order: inorder.Order | None = None,
        keys: Sequence[bytes] = (),
    ) -> Iterator[Packet]:
        """Yield the segments of a window that are in no stretch; look for further stretches in between."""
        dissect, data, records = self._dissector.segment, window.data, window.records
        left = [RETRY_PACKETS] * len(keys)  # packets of each connection until the next try
        pauses = list(left)
        for index in np.flatnonzero(~taken).tolist():
            if taken[index]:
                continue
            time_ns, link, start, end, wire_bytes = records[index]
            segment = known[index] if index in known else dissect(link, data, start, end, time_ns, wire_bytes)
            if segment is None:
                continue
            yield index, time_ns, segment
            if order is None or (place := int(order.rank[index])) < 0:
                continue
            pair = int(order.pair[place])
            left[pair] -= 1
            if left[pair]:
                continue
            key = keys[pair]
            if order.first[pair + 1] - place > MIN_COLUMN_PACKETS and self._is_calm(key):
                stretch = order.stretch(pair, place + 1, self._positions(key))
                is_worth_it = stretch is not None and stretch.places.stop - stretch.places.start >= MIN_COLUMN_PACKETS
                pauses[pair] = RETRY_PACKETS if is_worth_it else min(2 * pauses[pair], MAX_RETRY_PACKETS)
                if stretch is not None:
                    taken[order.index[stretch.places]] = True
                    self._take(key, stretch, memoryview(data))
            left[pair] = pauses[pair]

    def finish(self) -> None:
        """End every flow, in the order of their beginning; later packets belong to another capture."""
        self._dissector.finish()
        for shard in self._shards.values():
            for flow in list(shard.open):
                self._end(flow, "open")
            shard.ended.clear()
        self._ways.clear()
        self._away.clear()
        self._recent.clear()
        self.clock.clear()
        self._last_ns = -1

    @property
    def goes_back(self) -> bool:
        """Whether packets so far go back in time, as in concatenated captures."""
        return self._recent.goes_back

    @property
    def has_times(self) -> bool:
        """Whether packets have times; a capturing program without times gives all packets the same."""
        return self._only_ns < 0 or self._packets < FEW_PACKETS

    # --- connections that several readers share ----------------------------------------------------------------------

    def of(self, key: bytes) -> Flow | None:
        """The current flow of a key."""
        return self._ways.get(key, (None,))[0]

    def hand_over(self, flow: Flow) -> None:
        """Leave the further packets of a flow, which has no queued bytes, to another reader."""
        self._shards[shard_of(flow.keys[0])].open.pop(flow)
        self._forget(flow)
        self._away.update(flow.keys)

    def leave(self, keys: Collection[bytes]) -> None:
        """Leave all further packets with these keys to another reader."""
        self._away.update(keys)

    def take_back(self, keys: Collection[bytes]) -> None:
        """Packets with these keys belong to this reader again."""
        self._away.difference_update(keys)

    @property
    def away(self) -> Collection[bytes]:
        """The keys whose next packets belong to another reader."""
        return self._away

    @property
    def ended(self) -> list[Flow]:
        """The ended flows that are kept for late segments."""
        return [flow for shard in self._shards.values() for flow in shard.ended]

    @property
    def most_queued(self) -> int:
        """The maximum of queued bytes so far, in the shard with the most."""
        return QUEUED_BYTES - min(shard.budget.least for shard in self._shards.values())

    # --- captures without an end -------------------------------------------------------------------------------------

    @property
    def open(self) -> list[Flow]:
        """The flows that are open now, of all kinds."""
        return [flow for shard in self._shards.values() for flow in list(shard.open)]

    def trust(self, ports: Collection[int]) -> None:
        """Add ports of brokers; existing flows keep their protocol."""
        self._ports |= {port.to_bytes(2) for port in ports}

    def expire(self, before_ns: int, connects_before_ns: int = -1) -> int:
        """End the flows whose last packet is before `before_ns`, and drop ended ones; return how many ended.

        Later packets of such a connection begin a new flow, in its middle. connects_before_ns: also end the flows whose
        client sent its SYN before this time without a packet of the server since.
        """
        ended = 0
        for shard in self._shards.values():
            for flow in [
                flow
                for flow in shard.open
                if flow.last_ns < before_ns
                or (
                    flow.syn_ns < connects_before_ns and flow.syn_ns >= 0 and not flow.talk.halves[1 - flow.client].seen
                )
            ]:
                self._end(flow, "idle")
                ended += 1
            while shard.ended and shard.ended[0].last_ns < before_ns:
                self._forget(shard.ended.popleft())
        return ended

    def reopen(self, flow: Flow) -> Receiver:
        """Return the receiver for the decrypted bytes of an ended TLS flow."""
        if not flow.decrypted:
            flow.decrypted = True
            flow.talk.receiver = Undecided(flow, self.decide, flow.noted, self._trusted(flow.keys[0])[0])
        return flow.talk.receiver

    def end_encrypted(self) -> None:
        """Report the end of all encrypted flows; no more decrypted bytes will arrive."""
        for flow in self.encrypted:
            if flow.decrypted:
                for side in (0, 1):
                    flow.talk.receiver.close(side, flow.last_ns)
                if flow.speaks != content.KAFKA:
                    flow.decrypted = False
                    flow.speaks = content.TLS
            self._report_end(flow)
        self.encrypted.clear()

    # --- the life of a flow ------------------------------------------------------------------------------------------

    def _meet(self, segment: Segment, time_ns: int) -> Flow | None:
        """Handle a segment without a flow: return a new flow, or None if the segment is ignored."""
        key, flags, length = segment[1], segment[4], segment[8]
        if flags & UNDELIVERED or key in self._away or (self._only is not None and key not in self._only):
            return None
        if self._ports and self._trusted(key)[0] is None:
            self._note("other_ports", time_ns, size=length)
            return None
        if self.takes != ALL and (self.takes == NOBODY or flags & (SYN | ACK) != SYN):
            self._away.update((key, back(key)))
            return None
        shard = self._shards.get(shard_of(key))
        if shard is None:
            if len(self._foreign) >= MAX_FOREIGN:
                self._foreign.clear()
            self._foreign.add(key)
            return None
        if flags & RST or not (length or flags & SYN):
            return None  # of a connection that ended before the capture, or a keep-alive
        return self._open(shard, key, time_ns, flags, segment[2], segment[3])

    def _open(self, shard: Shard, key: bytes, time_ns: int, flags: int, seq: int, ack: int) -> Flow:
        reverse = back(key)
        flow = Flow((key, reverse), time_ns, shard.budget, Quality() if self._apart else self.quality)
        trusted, side = self._trusted(key)
        if flags & SYN:
            flow.start_seen = True
            flow.talk.open(0, seq)
            if flags & ACK:
                flow.client = 1
                flow.talk.open(1, ack - 1 & MASK, seen=False)
            else:
                flow.client = 0
                flow.syn_ns = time_ns
                flow.plain = False
        elif side >= 0:
            flow.client = side
        flow.talk.receiver = Undecided(flow, self.decide, flow.noted, trusted)
        self._ways[key] = (flow, 0)
        self._ways[reverse] = (flow, 1)
        shard.open[flow] = None
        self.is_crowded |= bool(self._away) and len(shard.open) + len(self._away) > MAX_FLOWS
        if len(shard.open) > MAX_FLOWS:
            idle = sorted(shard.open, key=lambda flow: flow.last_ns)
            for old in idle[: MAX_FLOWS // 8]:
                if old is not flow:
                    self._end(old, "idle")
        return flow

    def _trusted(self, key: bytes) -> tuple[str | None, int]:
        """(the protocol that the user set for one of the ports, the client's side); -1: set for both ports or none."""
        for ports, speaks in ((self._zookeeper_ports, content.ZOOKEEPER), (self._ports, content.KAFKA)):
            ends = key[-4:-2] in ports, key[-2:] in ports
            if any(ends):
                return speaks, -1 if all(ends) else int(ends[0])
        return None, -1

    def _turn(self, flow: Flow, side: int, segment: Segment, time_ns: int, index: int) -> Flow | None:
        """Handle a segment that may begin or end a flow; return the flow that is to take it, None if none is."""
        _, key, seq, ack, flags, _, _, _, length = segment
        half, is_open = flow.talk.halves[side], flow.close == "open"
        if flags & UNDELIVERED:
            if is_open:
                self._undelivered(flow, side, segment)
            return None
        if flags & RST:
            if is_open and (half.position < 0 or abs(ahead(seq, half.position)) < FURTHEST):
                flow.last_ns = time_ns
                flow.reset_by = side
                self._end(flow, "reset")
            return None
        if flags & SYN:
            if half.first >= 0 and not (seq - half.first) & MASK:
                if is_open and half.seen and not (flags & ACK and flow.is_simultaneous):
                    twice = self._recent.has(index, segment)
                    half.duplicates += twice
                    half.retransmissions += not twice
                half.seen = True
                return None
            if is_open and flow.syn_ns >= 0 and side != flow.client and not half.seen:
                flow.talk.open(side, seq)
                if not flags & ACK:
                    flow.begin_simultaneously()
                return flow
            shard = self._shards[shard_of(key)]
            if is_open:
                self._end(flow, "reused")
            return self._open(shard, key, time_ns, flags, seq, ack)
        if not is_open:
            beyond = ahead(seq, half.position)
            if flow.reset_by == 1 - side and -BEHIND <= beyond <= IN_FLIGHT:
                if beyond + length > 0:  # else a retransmission, which belongs to the connection
                    self.quality.note("after_reset", time_ns, size=length)
            elif flow.reset_by == side and beyond == 0:  # the capture has it after the reset, out of order
                if length:
                    self.quality.note("after_reset", time_ns, size=length)
            elif length and beyond >= (flow.close != "idle"):  # the ports were reused, and the SYN was not captured
                return self._open(self._shards[shard_of(key)], key, time_ns, flags, seq, ack)
            return None
        if side == flow.client:
            flow.rtt_ns = time_ns - flow.syn_ns
            flow.syn_ns = -1
            flow.plain = True
        return flow

    @staticmethod
    def _undelivered(flow: Flow, side: int, segment: Segment) -> None:
        """ICMP reports that a packet of `side` was not delivered; its sequence number must fit (RFC 5927)."""
        seq, mtu, reason = segment[2], segment[3], REASONS[segment[5]]
        half = flow.talk.halves[side]
        if reason == TOO_BIG:
            if mtu and half.position >= 0 and abs(ahead(seq, half.position)) < FURTHEST:
                flow.path_mtu = min(mtu, flow.path_mtu or mtu)
        elif flow.syn_ns >= 0 and side == flow.client and seq == half.first and not flow.talk.halves[1 - side].seen:
            flow.unreachable = reason

    def _end(self, flow: Flow, close: str) -> None:
        """End a flow and count its flaws; keep its keys for late segments."""
        flow.talk.finish(flow.last_ns)
        flow.close = flow.failed_connect(close) or close
        flow.plain = False
        shard = self._shards[shard_of(flow.keys[0])]
        shard.open.pop(flow, None)
        if not flow.continues:
            flow.count(self.quality)
        if self.keep_encrypted and flow.speaks == content.TLS:
            self.encrypted.append(flow)
        elif flow.later is not None:
            flow.later.then(lambda: self._report_end(flow))
        else:
            self._report_end(flow)
        shard.ended.append(flow)
        if len(shard.ended) > MAX_ENDED:
            self._forget(old := shard.ended.popleft())
            if self._apart:
                self.forgotten.update(old.keys)

    def _forget(self, flow: Flow) -> None:
        """Drop the keys of a flow: further packets with them begin another flow."""
        for key in flow.keys:
            if self._ways.get(key, (None,))[0] is flow:
                del self._ways[key]

    def _report_end(self, flow: Flow) -> None:
        """Count a flow by its final protocol, report its end and release it."""
        if flow.noted is not self.quality:
            self.quality.add(flow.noted)
        if flow.session is not None:
            flow.sasl_tokens = flow.session.sasl_tokens
            if flow.session.ends_in_header and flow.close in ("fin", "reset"):
                self.quality.note("cut_request", flow.last_ns)
        if not flow.continues:
            flow.count_kind(self.quality)
        if flow.close in UNCONNECTED:
            if self._handlers.unconnected is not None and self._trusted(flow.keys[0])[0] != content.ZOOKEEPER:
                flow.info = self._info(flow)
                self._handlers.unconnected(flow)
        elif flow.info is not None and flow.speaks != content.ZOOKEEPER:
            self._handlers.ended(flow)
        flow.session = flow.later = None
        flow.talk.receiver = DISCARD

    def decide(self, flow: Flow, speaks: str) -> Receiver:
        """Set the protocol of a flow, which may be one of content.py, "undecided" or "no_data"; return its receiver."""
        flow.speaks = speaks
        if speaks not in (content.KAFKA, content.TLS, content.ZOOKEEPER):
            return DISCARD
        if flow.client < 0:  # TLS in the middle of a stream: servers have the lower ports
            flow.client = int(flow.ends[0][1] < flow.ends[1][1])
        flow.info = self._info(flow)
        if speaks == content.ZOOKEEPER:
            listen = self._handlers.zookeeper
            room = self._shards[shard_of(flow.keys[0])].zookeeper
            session = zookeeper.Session(midstream=not flow.start_seen, room=room)
            return ZooKeeper(session, flow.client, listen(flow.info) if listen is not None else None, flow.noted)
        if speaks == content.TLS:
            self._handlers.decided(flow)
            return Alerts(flow) if flow.start_seen else DISCARD
        midstream = not flow.start_seen or flow.lacks_beginning
        flow.session = CapturedSession(self._shards[shard_of(flow.keys[0])].interest, midstream=midstream)
        receiver = Kafka(flow, flow.session, self._handlers.decided(flow), flow.noted)
        if self._reader is None:
            return receiver
        flow.later = Later(flow, receiver, self._deferred)
        return flow.later

    def _info(self, flow: Flow) -> ConnectionInfo:
        client, broker = flow.proxied or flow.ends[flow.client], flow.ends[1 - flow.client]
        return ConnectionInfo(self._cluster, self._source, *client, *broker, None, flow.first_ns)

    def _note(self, kind: str, time_ns: int, *, count: int = 1, size: int = 0, last_ns: int = -1) -> None:
        if self._first:
            self.quality.note(kind, time_ns, count=count, size=size, last_ns=last_ns)
