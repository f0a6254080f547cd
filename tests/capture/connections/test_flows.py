"""Captures of real traffic have exactly the exchanges that an independent decoder found, in every form of capture."""

from collections import Counter

import pytest

from kproxy.capture.columns import mapped
from kproxy.capture.connections import content, flows
from kproxy.capture.connections.flow import Handlers
from kproxy.capture.connections.flows import Flows
from kproxy.capture.dissection.keys import SHARDS, shard_of
from kproxy.capture.dissection.packets import ACK, FIN, RST, SYN
from kproxy.capture.dissection.uncut import uncut
from kproxy.capture.formats import pcap
from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import SAME_STREAM_NS, Quality
from kproxy.protocol import codec, schema
from kproxy.views.summary import verdict
from kproxy.wire import bodies
from kproxy.wire.events import ANSWERED, LOST, NONE, REQUEST_NOT_SEEN, UNANSWERED, Exchange, Unanswered
from tests import captures
from tests.capture import packet

WHOLE = [
    "k41_java_cluster",
    "k41_kip848_share",
    "k41_librdkafka",
    "k41_kafkajs",
    "k41_sasl_plain",
    "k41_quota",
    "k39_zk_cluster",
    "k0102_java_cluster",
    "k0102_python147",
    "k0102_sasl_plain",
    "k111_java_cluster",
    "k111_kcat_sarama",
    "k0822_java_cluster",
    "k0822_python147",
]
SAME = [
    "k41_bigendian",
    "k41_gz",
    "k41_ipfrag",
    "k41_ipv6",
    "k41_mixedlinks",
    "k41_ng",
    "k41_portreuse",
    "k41_rawip",
    "k41_realSLL",
    "k41_realSLL2",
    "k41_realnano",
    "k41_reordered",
    "k41_retransmit",
    "k41_seqwrap",
    "k41_tinyseg",
    "k41_vlan",
]


# captured by another tcpdump, or with reordered segments: the times differ from those of the base
OTHER_TIMES = ("k41_realnano", "k41_realSLL", "k41_realSLL2", "k41_mixedlinks", "k41_reordered", "k41_retransmit")


class Seen:
    """The results of the flows of a capture."""

    def __init__(self, *paths, ports=(), shards=range(SHARDS), detail=bodies.ERRORS):
        self.exchanges = []  # (info, exchange)
        self.at_once = 0  # how many of them were converted by column
        self.flows = []
        self.unconnected = []
        self.quality = Quality()
        handlers = Handlers(self.decided, self.many, self.flows.append, unconnected=self.unconnected.append)
        self.reader = reader = Flows("test", self.quality, handlers, ports=ports, shards=shards, detail=detail)
        for window in uncut(Capture(paths, self.quality).windows()):
            reader.window(window)
        reader.finish()

    def decided(self, flow):
        def listen(events):
            for event in events:
                if type(event) is Unanswered:
                    event = event.exchange
                if type(event) is Exchange:
                    self.exchanges.append((flow.info, event))

        return listen

    def many(self, flows, bulk):
        self.at_once += len(bulk.connection)
        self.exchanges += [(flows[number].info, exchange) for number, exchange in captures.one_by_one(bulk)]

    def requests(self, ports=True):
        """Exchanges counted by the fields of NAME.exchanges.jsonl.gz."""
        return Counter(
            (
                *((info.client_port, info.broker_port) if ports else ()),
                exchange.correlation_id,
                exchange.plan.api_key,
                exchange.plan.api_version,
                exchange.client_id,
                exchange.outcome is ANSWERED,
                exchange.throttle_ms if exchange.throttle_ms != NONE else None,
                exchange.error_code if has_top_level_error(exchange.plan) else None,
            )
            for info, exchange in self.exchanges
            if exchange.outcome is not REQUEST_NOT_SEEN
        )

    def kinds(self):
        return {row.kind: row.count for row in self.quality}


def has_top_level_error(plan):
    if not plan.known:
        return False
    fields = schema.schema().apis[plan.api_key].response.fields
    return any(field.name == "errorCode" and plan.api_version in field.versions for field in fields)


def expected(name, ports=True):
    return Counter(
        (
            *((entry["client_port"], entry["broker_port"]) if ports else ()),
            entry["id"],
            entry["key"],
            entry["version"],
            entry["client_id"],
            entry["answered"],
            entry["throttle"],
            entry["error"],
        )
        for entry in captures.expected(name)
    )


@pytest.mark.parametrize("name", WHOLE)
def test_a_capture_gives_exactly_its_exchanges(name):
    seen = Seen(captures.capture(name))
    assert seen.requests() == expected(name)
    kinds = seen.kinds()
    assert not {"gap", "fault", "truncated", "malformed", "not_kafka", "strays", "same_stream"} & kinds.keys()
    whole = sum(
        (exchange.request_bytes if exchange.request_end != NONE else 0)
        + (exchange.response_bytes if exchange.response_end != NONE else 0)
        for _, exchange in seen.exchanges
    )
    assert whole <= seen.quality.size("kafka")


def test_only_the_named_ports_are_read():
    path = captures.capture("k41_java_cluster")
    seen = Seen(path, ports=(9091, 9092, 9093))
    want = Counter({key: count for key, count in expected("k41_java_cluster").items() if key[1] in (9091, 9092, 9093)})
    assert seen.requests() == want
    assert seen.quality.count("other_ports")


@pytest.mark.parametrize("name", SAME)
def test_a_shape_without_loss_has_the_exchanges_of_its_base(name):
    ports = name != "k41_portreuse"  # its client ports were renumbered
    seen = Seen(captures.capture(name))
    assert seen.requests(ports) == expected("k41_BASE", ports)
    base = Seen(captures.capture("k41_BASE"))
    shaped = Counter(identity(exchange) for _, exchange in seen.exchanges)
    if name not in OTHER_TIMES:
        assert shaped == Counter(identity(exchange) for _, exchange in base.exchanges)


def body_rows(found):
    """Everything that was read from a body."""
    if found is None:
        return None
    return [*found.partitions], [*found.batches]


@pytest.mark.parametrize("name", ("k41_tinyseg", "k41_reordered", "k41_retransmit", "k41_ipfrag"))
def test_bodies_have_the_same_rows_however_they_were_split(name):
    base = Seen(captures.capture("k41_BASE"), detail=bodies.BATCHES)
    shaped = Seen(captures.capture(name), detail=bodies.BATCHES)

    def bodies_of(seen):
        return {
            (info.client_port, exchange.number): (body_rows(exchange.request_body), body_rows(exchange.response_body))
            for info, exchange in seen.exchanges
        }

    assert bodies_of(shaped) == bodies_of(base)
    batches = sum(len(e.request_body.batches) for _, e in base.exchanges if e.request_body is not None)
    assert batches > 20
    assert not shaped.quality.count("fault")


def test_a_body_with_a_gap_has_no_rows():
    seen = Seen(captures.capture("k41_snap400"), detail=bodies.BATCHES)
    base = Seen(captures.capture("k41_BASE"), detail=bodies.BATCHES)
    whole = {
        (info.client_port, e.number): (body_rows(e.request_body), body_rows(e.response_body))
        for info, e in base.exchanges
    }
    silent = 0
    for info, exchange in seen.exchanges:
        for cut, full in zip(
            (body_rows(exchange.request_body), body_rows(exchange.response_body)),
            whole[info.client_port, exchange.number],
            strict=True,
        ):
            assert cut in (None, full)
            silent += cut != full
    assert silent > 30


def identity(exchange):
    return (
        exchange.number,
        exchange.correlation_id,
        exchange.request_start,
        exchange.request_end,
        exchange.response_start,
        exchange.response_end,
        exchange.queue_ns,
        exchange.muted_ns,
        exchange.request_bytes,
        exchange.response_bytes,
        exchange.errors and tuple(exchange.errors),
        exchange.in_flight,
    )


def test_a_capture_of_requests_alone_reports_missing_responses():
    seen = Seen(captures.capture("k41_oneway"))
    want = Counter(key[:6] for key in expected("k41_BASE").elements())
    assert Counter(key[:6] for key in seen.requests().elements()) == want
    assert {exchange.outcome for _, exchange in seen.exchanges} <= {LOST, UNANSWERED, "no_answer_expected"}
    assert seen.quality.count("gap")


@pytest.mark.parametrize("name", ("k41_snap400", "k41_snap96"))
def test_a_short_snap_length_loses_bodies_but_no_request_and_no_pairing(name):
    seen = Seen(captures.capture(name))

    def paired(counter):
        return Counter((key[:5], key[6]) for key in counter.elements())

    assert paired(seen.requests()) == paired(expected("k41_BASE"))
    # values that were read are right, others are not invented
    whole = {key[:5]: key for key in expected("k41_BASE")}
    for key in seen.requests():
        assert key[7] in (None, whole[key[:5]][7])
        assert key[8] in (None, whole[key[:5]][8])
    assert seen.quality.size("truncated") > 100_000


@pytest.mark.parametrize("name", ("k41_gaps", "k41_cut", "k41_midstream"))
def test_gaps_are_reported_and_nothing_is_invented(name):
    seen = Seen(captures.capture(name))
    base = Counter(key[:6] for key in expected("k41_BASE").elements())
    got = Counter(key[:6] for key in seen.requests().elements())
    assert not got - base
    answered = Counter(key[:6] for key in expected("k41_BASE").elements() if key[6])
    assert not Counter(key[:6] for key in seen.requests().elements() if key[6]) - answered
    missing = sum((base - got).values())
    kinds = seen.kinds()
    if name == "k41_gaps":  # requests inside a gap
        assert missing <= 6
        assert kinds["gap"] == 8
        unpaired = sum(exchange.outcome is REQUEST_NOT_SEEN for _, exchange in seen.exchanges)
        assert missing == unpaired
    elif name == "k41_cut":
        assert kinds["cut_file"] == 1
    else:
        assert kinds["midstream"] == 8
        assert sum(got.values()) == 268  # by tshark's count


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [("k39_zookeeper", "zookeeper", 4), ("k0102_zookeeper", "zookeeper", 15), ("k41_tls13_keys", "tls", 24)],
)
def test_other_protocols_are_named_and_give_no_exchange(name, kind, count):
    seen = Seen(captures.capture(name))
    assert not seen.exchanges
    assert seen.kinds()[kind] == count
    assert "kafka" not in seen.kinds()
    assert not Seen(captures.capture(name), ports=(9092, 9093, 9094, 9095, 2181, 2182)).exchanges


def test_a_plaintext_client_on_a_tls_port_is_recognised():
    seen = Seen(captures.capture("k41_tls_nokeys_kcat"))
    assert [(exchange.plan.api, exchange.outcome) for _, exchange in seen.exchanges] == [("ApiVersions", UNANSWERED)]
    assert seen.kinds()["tls"] == 4


def test_all_shards_together_have_all_exchanges():
    path = captures.capture("k41_librdkafka")
    whole = Seen(path)
    parts = [Seen(path, shards=range(start, SHARDS, 3)) for start in range(3)]
    assert sum((part.requests() for part in parts), Counter()) == whole.requests()
    assert sum(part.quality.count("kafka") for part in parts) == whole.quality.count("kafka")
    assert all(part.quality.count("kafka") for part in parts)


def test_both_directions_of_a_flow_fall_into_one_shard():
    for length in (4, 16):
        one = b"\1" * length + b"\2" * length + b"\3\3\4\4"
        other = b"\2" * length + b"\1" * length + b"\4\4\3\3"
        assert shard_of(one) == shard_of(other)


# --- synthetic connections --------------------------------------------------------------------------------------------


def request(number, key=18, version=0, client_id="me"):
    body = codec.encode_request(
        {
            "requestApiKey": key,
            "requestApiVersion": version,
            "correlationId": number,
            "clientId": client_id,
        },
        {},
    )
    return len(body).to_bytes(4) + body


def answer(number):
    body = codec.encode_response(18, 0, {"correlationId": number}, {"errorCode": 0, "apiKeys": []})
    return len(body).to_bytes(4) + body


class Wire:
    """Writes the packets of connections."""

    def __init__(self, client_isn=1000, broker_isn=5000, client=packet.CLIENT):
        self.packets = []
        self.ends = (client, packet.BROKER)
        self.next = [client_isn, broker_isn]

    def send(self, side, payload=b"", flags=ACK, window=500, options=b""):
        source, target = self.ends[side], self.ends[1 - side]
        data = packet.ethernet(
            packet.ipv4(
                packet.tcp(
                    payload,
                    source=source,
                    target=target,
                    seq=self.next[side] & 0xFFFFFFFF,
                    ack=self.next[1 - side] & 0xFFFFFFFF if flags & ACK else 0,
                    flags=flags,
                    window=window,
                    options=options,
                ),
                source=source,
                target=target,
                identity=len(self.packets),
            )
        )
        self.packets.append(data)
        self.next[side] += len(payload) + bool(flags & (SYN | FIN))
        return self

    def shake(self):
        return self.send(0, flags=SYN).send(1, flags=SYN | ACK).send(0)

    def ask(self, *numbers):
        for number in numbers:
            self.send(0, request(number)).send(1, answer(number))
        return self

    def seen(self, folder, step_ns=1_000_000, **options):
        path = folder / "wire.pcap"
        path.write_bytes(packet.pcap([(n * step_ns, data) for n, data in enumerate(self.packets)]))
        return Seen(path, **options)


URG = 0x20


def opened(syn=b"", syn_ack=b""):
    """A connection whose SYN or SYN-ACK carries data (TCP Fast Open, RFC 7413)."""
    return Wire().send(0, syn, flags=SYN).send(1, syn_ack, flags=SYN | ACK)


def probed(side, wire):
    """A keepalive of one byte, before the next one that is sent, and its acknowledgement."""
    wire.next[side] -= 1
    return wire.send(side, b"\xaa").send(1 - side)


def again(wire, client_isn, broker_isn):
    """The next connection of the same ports."""
    wire.next = [client_isn, broker_isn]
    return wire.shake()


@pytest.mark.parametrize(
    ("wire", "answered"),
    [
        (opened(request(1)).send(1, answer(1)).ask(2), [1, 2]),
        (opened(request(1), answer(1)).ask(2), [1, 2]),
        (probed(0, Wire().shake()).ask(1), [1]),
        (probed(1, probed(0, Wire().shake().ask(1)).ask(2)).ask(3), [1, 2, 3]),
        (Wire().shake().send(0, request(1), flags=ACK | URG).send(1, answer(1), flags=ACK | URG).ask(2), [1, 2]),
        # the payload of a RST is a text for people (RFC 9293), or is not delivered
        (Wire().shake().ask(1).send(0, request(2)).send(1, answer(2), flags=RST | ACK), [1]),
        (again(Wire().shake().ask(1), 900_000_000, 1_700_000_000).ask(2), [1, 2]),
        (again(Wire(3_000_000_000, 4_000_000_000).shake().ask(1).send(0, flags=RST), 50, 60).ask(2), [1, 2]),
        (
            again(
                Wire().shake().ask(1).send(1, flags=FIN | ACK).send(0, flags=FIN | ACK).send(1), 50, 4_000_000_000
            ).ask(2),
            [1, 2],
        ),
    ],
)
def test_segments_of_unusual_use_carry_what_they_deliver(wire, answered, tmp_path):
    seen = wire.seen(tmp_path)
    assert [exchange.correlation_id for _, exchange in seen.exchanges if exchange.outcome is ANSWERED] == answered
    assert not {"gap", "retransmissions", "fault", "resync"} & seen.kinds().keys()


def test_the_row_of_a_connection_has_its_life(tmp_path):
    wire = Wire().shake().ask(1, 2).send(0, flags=FIN | ACK).send(1, flags=FIN | ACK).send(0)
    seen = wire.seen(tmp_path)
    (flow,) = seen.flows
    assert (flow.start_seen, flow.close, flow.rtt_ns) == (True, "fin", 2_000_000)
    assert flow.payload_bytes == [2 * len(request(1)), 2 * len(answer(1))]
    assert (flow.first_ns, flow.last_ns) == (0, 8_000_000)


@pytest.mark.parametrize("has_syn", (True, False))
def test_packets_of_brokers_alone_are_one_direction(tmp_path, has_syn):
    """The SYN-ACK shows where the client's bytes begin; it is no segment of the client."""
    wire = Wire().shake().ask(*range(9)).send(1, flags=FIN | ACK)
    wire.packets = [data for data in wire.packets if data[26:30] == packet.BROKER[0]][not has_syn :]
    quality = wire.seen(tmp_path).quality
    assert (quality.count("one_direction"), quality.count("undecided"), quality.count("kafka")) == (1, 1, 0)
    assert verdict(quality).endswith("Capture both directions.")


def test_a_syn_captured_after_its_syn_ack_is_no_other_connection(tmp_path):
    wire = Wire().shake().ask(1).send(0, flags=FIN | ACK).send(1, flags=FIN | ACK).send(0)
    wire.packets[:2] = reversed(wire.packets[:2])
    seen = wire.seen(tmp_path)
    assert [(flow.close, flow.total("retransmissions")) for flow in seen.flows] == [("fin", 0)]
    assert len(seen.exchanges) == 1 and not seen.quality.count("one_direction")


def test_the_close_of_a_reset_and_of_an_open_connection_is_recorded(tmp_path):
    assert Wire().shake().ask(1).send(1, flags=RST).seen(tmp_path).flows[0].close == "reset"
    seen = Wire().shake().ask(1).send(0, request(2)).seen(tmp_path)
    assert seen.flows[0].close == "open"
    assert [exchange.outcome for _, exchange in seen.exchanges] == [ANSWERED, UNANSWERED]


@pytest.mark.parametrize(("flags", "count"), ((RST, 1), (0, 0)))
@pytest.mark.parametrize("size", (7, 11, 12))
def test_a_connection_that_ends_within_the_header_of_a_request_is_reported(tmp_path, size, flags, count):
    """It has no exchange; the end of the capture is no end of the connection."""
    seen = Wire().shake().ask(1).send(0, request(2)[:size]).send(1, flags=flags).seen(tmp_path)
    assert seen.quality.count("cut_request") == (count if size < 12 else 0)
    assert len(seen.exchanges) == 1 + (size == 12)


@pytest.mark.parametrize("lost", (False, True))
@pytest.mark.parametrize("side", (0, 1))
def test_segments_in_flight_at_a_reset_are_no_connection(tmp_path, side, lost):
    wire = Wire().shake().ask(1).send(side, flags=RST)
    wire.next[side] = 0
    for number in range(4):
        wire.send(1 - side, bytes(1400))
        if lost and number == 1:
            wire.packets.pop()
    seen = wire.seen(tmp_path)
    assert [flow.close for flow in seen.flows] == ["reset"]
    assert seen.quality.count("after_reset") == 4 - lost
    assert not seen.quality.count("midstream")


@pytest.mark.parametrize("payload", (b"", request(1)), ids=("empty", "with bytes"))
def test_late_packets_of_a_connection_before_the_capture_are_no_connection(tmp_path, payload):
    """An acknowledgement, and a reset: hosts may put text into one (RFC 9293, 3.5.2), which is no request."""
    seen = Wire().send(0).send(1).send(1, payload, flags=RST).send(0, payload, flags=RST).seen(tmp_path)
    assert not seen.flows and [row.kind for row in seen.quality] == ["packets"]


def test_a_response_captured_after_its_senders_reset_is_counted(tmp_path):
    wire = Wire().shake().ask(1).send(1, flags=RST)
    wire.packets[-2:] = reversed(wire.packets[-2:])
    seen = wire.seen(tmp_path)
    assert [exchange.outcome for _, exchange in seen.exchanges] == [UNANSWERED]
    assert seen.quality.count("after_reset") == 1


def test_ports_reused_after_a_reset_are_another_connection(tmp_path):
    wire = Wire().shake().ask(1).send(1, flags=RST)
    wire.next = [70_000_000, 90_000_000]  # the SYN was not captured
    seen = wire.ask(1, 2).seen(tmp_path)
    assert [flow.close for flow in seen.flows] == ["reset", "open"]
    assert len(seen.exchanges) == 3


def test_idle_connections_end_and_later_packets_are_another_connection(tmp_path, monkeypatch):
    """As when `kproxy watch` expires them now and then, between two windows."""
    after = []  # each time: (flows that ended, that are open)
    take = Flows.window

    def window(self, found):
        take(self, found)
        after.append((self.expire(0), len(self.open)))
        after.append((self.expire(1 << 62), len(self.open)))
        after.append((self.expire(1 << 62), len(self.open)))

    monkeypatch.setattr(Flows, "window", window)
    wire = Wire().shake().ask(1)
    paths = [tmp_path / "1.pcap", tmp_path / "2.pcap"]
    paths[0].write_bytes(packet.pcap([(n * 1_000_000, data) for n, data in enumerate(wire.packets)]))
    wire.packets.clear()
    wire.ask(2, 3)
    paths[1].write_bytes(packet.pcap([(10**12 + n * 1_000_000, data) for n, data in enumerate(wire.packets)]))
    seen = Seen(*paths, ports=(packet.BROKER[1],))
    assert set(zip(after[::3], after[1::3], after[2::3], strict=True)) == {((0, 1), (1, 0), (0, 0))}
    assert seen.quality.count("idle") == len(seen.flows) == len(after) // 3 > 1
    asked = [each.correlation_id for _, each in seen.exchanges if each.outcome is not REQUEST_NOT_SEEN]
    assert asked == [1, 2, 3]


def test_a_connection_evicted_as_idle_loses_nothing_when_it_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(flows, "MAX_FLOWS", 8)
    clients = [(packet.CLIENT[0], port) for port in range(40_000, 41_000)]
    broker = packet.BROKER
    keys = {client: client[0] + broker[0] + client[1].to_bytes(2) + broker[1].to_bytes(2) for client in clients}
    first, *others = [client for client in clients if shard_of(keys[client]) == shard_of(keys[clients[0]])]
    idle = Wire(client=first).shake().ask(1)
    for client in others[:8]:
        idle.packets += Wire(client=client).shake().ask(1).packets
    seen = idle.ask(2, 3).seen(tmp_path)
    assert seen.quality.count("idle") == 2  # each time another connection was opened
    assert len(seen.exchanges) == 9 + 2
    assert all(exchange.outcome is ANSWERED for _, exchange in seen.exchanges)


@pytest.mark.parametrize("syn_lost", (False, True))
def test_reused_ports_are_another_connection(tmp_path, syn_lost):
    wire = Wire().shake().ask(1).send(0, flags=FIN | ACK).send(1, flags=FIN | ACK).send(0)
    wire.next = [700_000, 900_000]
    if not syn_lost:
        wire.shake()
    wire.ask(1, 2)
    seen = wire.seen(tmp_path)
    assert [flow.close for flow in seen.flows] == ["fin", "open"]
    assert len({info.id for info, _ in seen.exchanges}) == 2
    assert [exchange.outcome for _, exchange in seen.exchanges] == [ANSWERED] * 3


def test_a_new_syn_ends_a_connection_whose_end_was_not_captured(tmp_path):
    wire = Wire().shake().ask(1)
    wire.next = [700_000, 900_000]
    seen = wire.shake().ask(7).seen(tmp_path)
    assert [flow.close for flow in seen.flows] == ["reused", "open"]


def test_retransmitted_syns_are_one_connection(tmp_path):
    wire = Wire().send(0, flags=SYN)
    wire.next[0] -= 1
    wire.send(0, flags=SYN).send(1, flags=SYN | ACK)
    wire.next[1] -= 1
    wire.send(1, flags=SYN | ACK).send(0).ask(1)
    seen = wire.seen(tmp_path)
    (flow,) = seen.flows
    assert flow.total("retransmissions") == 2
    assert len(seen.exchanges) == 1


@pytest.mark.parametrize("first", (0, 1))
@pytest.mark.parametrize("answered", (0, 1, 2))  # SYN-ACKs that follow; Linux sends both
def test_two_syns_at_the_same_time_are_one_connection(tmp_path, first, answered):
    wire = Wire().send(first, flags=SYN).send(1 - first, flags=SYN)
    for side in (0, 1)[:answered]:
        wire.next[side] -= 1
        wire.send(side, flags=SYN | ACK)
    seen = wire.ask(1, 2).seen(tmp_path)
    (flow,) = seen.flows
    assert (flow.close, flow.ends[flow.client], flow.total("retransmissions")) == ("open", ("10.0.0.1", 40000), 0)
    assert [exchange.outcome for _, exchange in seen.exchanges] == [ANSWERED] * 2


def test_failed_connects_are_reported_and_successful_ones_are_not(tmp_path):
    """Refused and unanswered connects, with their servers, among other connections without bytes."""
    packets = []
    for port, letters in (
        (1, "S r"),  # refused
        (2, "SSS"),  # unanswered
        (3, "SS r"),  # refused late
        (4, "S sAF f A"),  # a health check
        (5, "S sR"),  # another health check
        (6, "S sA"),  # still open
        (7, "S"),  # the capture ends
        (8, "A"),  # the capture begins
        (9, "SSS sA"),  # answered late
        (10, "S R"),  # the client gives up
        (11, "S s s s"),  # the SYN-ACK never arrives
        (12, "S s S s"),  # nor here, where both ends retransmit
        (13, "S s S s r"),  # until the server gives up, late
        (14, "S s s A"),  # it arrives late
        (15, "S s"),  # the capture ends
        (17, "S S s"),  # the same
        (16, "S s S R"),  # the client does not know the connection
        (18, "s s"),  # the SYN takes another way, and the SYN-ACK never arrives
        (19, "s"),  # the same way, and the capture ends
        (20, "s s R"),  # the client does not know the connection
        (21, "s s A"),  # it arrives late
    ):
        wire = Wire(client=(packet.CLIENT[0], 50000 + port))
        for letter in letters.replace(" ", ""):
            flags = {"S": SYN, "A": ACK, "F": FIN | ACK, "R": RST}[letter.upper()] | (ACK if letter in "sr" else 0)
            if letter == "S":
                wire.next[0] = 1000
            if letter == "s":
                wire.next[1] = 5000
            wire.send(int(letter.islower()), flags=flags)
        packets += wire.packets
    wire = Wire().shake().ask(1)
    wire.packets = packets + wire.packets
    seen = wire.seen(tmp_path)
    assert {(flow.ends[flow.client][1] - 50000, flow.close) for flow in seen.unconnected} == {
        *((1, "refused"), (2, "unanswered"), (3, "refused")),
        *((number, "unanswered") for number in (11, 12, 13, 18)),
    }
    assert len(seen.flows) == 1
    kinds = seen.kinds()
    assert (kinds["connect_refused"], kinds["connect_unanswered"], kinds["no_data"]) == (2, 5, 13)
    (row,) = (row for row in seen.quality if row.kind == "connect_refused")
    assert row.sentence.endswith("(10.0.0.2:9092 ×2)")


def connected(letters, port=1):
    """The packets of a connection from letters: S, A, F, R and D (data) of the client, lower case ones of the
    server."""
    wire = Wire(client=(packet.CLIENT[0], 50000 + port))
    for letter in letters.replace(" ", ""):
        flags = {"S": SYN, "A": ACK, "F": FIN | ACK, "R": RST, "D": ACK}[letter.upper()]
        flags |= ACK if letter in "sr" else 0
        wire.send(int(letter.islower()), b"data" * (letter in "Dd"), flags=flags)
    return wire.packets


@pytest.mark.parametrize(
    ("letters", "step_ns", "close"),
    (
        ("S s A f A F a", 1_000_000, "closed_at_once"),
        ("S s A f R", 1_000_000, "closed_at_once"),  # the client was about to write
        ("S s f", 1_000_000, "closed_at_once"),  # the capture ends before the client's FIN
        ("S s A r", 1_000_000, "closed_at_once"),
        ("S s r", 1_000_000, "closed_at_once"),
        ("S s A r", 2_000_000_000, None),  # after a while: the server ends idle connections
        ("S s A F f A", 1_000_000, None),  # a health check
        ("S s A R", 1_000_000, None),
        ("S s A D f", 1_000_000, None),
        ("S s A d f", 1_000_000, None),
        ("s A f", 1_000_000, "closed_at_once"),  # the SYN was not captured
        ("A f", 1_000_000, None),
    ),
)
def test_a_connection_that_its_server_closes_before_any_byte_is_a_failed_connect(tmp_path, letters, step_ns, close):
    wire = Wire()
    wire.packets = connected(letters)
    seen = wire.seen(tmp_path, step_ns)
    assert [flow.close for flow in seen.unconnected] == ([close] if close else [])
    kinds = seen.kinds()
    assert kinds.get("connect_closed_at_once", 0) == len(seen.unconnected)
    for flow in seen.unconnected:
        assert flow.columns()["end_seen"] and flow.info.broker_port == 9092
        (row,) = (row for row in seen.quality if row.kind == "connect_closed_at_once")
        assert row.sentence.endswith("(10.0.0.2:9092 ×1)")


@pytest.mark.parametrize(
    ("end", "unseen", "closed_by"),
    (
        ("F f A", (), "client"),
        ("f A F a", (), "broker"),
        ("f R", (), "broker"),  # the client's reset responds to the broker's FIN
        ("R", (), "client"),
        ("r", (), "broker"),
        ("f", (), "broker"),  # the capture ends before the client's FIN
        ("", (), None),
        ("F f A", (5,), None),  # the client's FIN was not captured
        ("f", (0, 2, 3), None),  # no packet of the client was captured
    ),
)
def test_the_end_that_closed_first_is_recorded(tmp_path, end, unseen, closed_by):
    wire = Wire().shake().ask(1)
    for letter in end.replace(" ", ""):
        wire.send(int(letter.islower()), flags={"A": ACK, "F": FIN | ACK, "R": RST}[letter.upper()])
    wire.packets = [data for index, data in enumerate(wire.packets) if index not in unseen]
    assert [flow.columns()["closed_by"] for flow in wire.seen(tmp_path, ports=(9092,)).flows] == [closed_by]


def undelivered(kind, code, syn, number=0):
    """A router's ICMP message about a packet on Ethernet, which it quotes as far as RFC 792 requires."""
    router = (b"\x0a\0\0\x63", 0)
    message = packet.icmp(kind, code, number, syn[14:42])
    return packet.ethernet(packet.ipv4(message, protocol=1, source=router, target=packet.CLIENT))


@pytest.mark.parametrize(
    ("code", "close"),
    ((0, "net_unreachable"), (1, "host_unreachable"), (3, "port_unreachable"), (10, "prohibited"), (13, "prohibited")),
)
def test_a_connect_that_icmp_reports_as_undelivered_has_the_reason(tmp_path, code, close):
    wire = Wire().send(0, flags=SYN)
    wire.packets.append(undelivered(3, code, wire.packets[0]))
    wire.packets += connected("S s A F f A", 2)
    seen = wire.seen(tmp_path)
    assert [flow.close for flow in seen.unconnected] == [close]
    assert seen.unconnected[0].columns()["end_seen"]
    kinds = seen.kinds()
    assert (kinds["undelivered"], kinds["connect_undelivered"], "not_tcp" in kinds) == (1, 1, False)
    (row,) = (row for row in seen.quality if row.kind == "connect_undelivered")
    assert row.sentence.endswith(f"(10.0.0.2:9092 {close.replace('_', ' ')} ×1)")


def test_an_unanswered_connect_expires_before_silent_connections(tmp_path):
    """As when `kproxy watch` expires them; an even later SYN is no further connect."""
    seen = Seen()
    waiting, silent = Wire().send(0, flags=SYN), Wire(client=(packet.CLIENT[0], 50001)).shake()
    frames = [*waiting.packets * 2, *silent.packets]
    path = tmp_path / "wire.pcap"
    path.write_bytes(packet.pcap([(number * 10**9, data) for number, data in enumerate(frames)]))
    for window in Capture([path], Quality()).windows():
        seen.reader.window(window)
    assert seen.reader.expire(0, 0) == 0
    assert seen.reader.expire(0, 10**9) == 1
    assert [flow.close for flow in seen.unconnected] == ["unanswered"]
    for window in Capture([path], Quality()).windows():
        seen.reader.window(window)
    assert len(seen.unconnected) == 1 and len(list(seen.reader.open)) == 1


def test_icmp_about_other_packets_does_not_affect_a_connect(tmp_path):
    """A connect that succeeds nevertheless, another sequence number, no connection at all."""
    answered = connected("S s A", 1)
    forged = Wire(client_isn=77).send(0, flags=SYN).packets[0]
    wire = Wire().send(0, flags=SYN)
    wire.packets += [
        undelivered(3, 1, forged),
        answered[0],
        undelivered(3, 1, answered[0]),
        *answered[1:],
        undelivered(3, 1, answered[2]),
        undelivered(3, 1, connected("S", 9)[0]),
    ]
    seen = wire.seen(tmp_path)
    assert not seen.unconnected and seen.kinds()["undelivered"] == 4


def test_the_mtu_reported_by_a_router_is_recorded(tmp_path):
    wire = Wire().shake().ask(1)
    too_big = wire.packets[-1]
    for mtu in (1400, 0, 67, 1280, 1500):  # no link has an MTU of 67
        wire.packets.append(undelivered(3, 4, too_big, mtu))
    wire.ask(2)
    seen = wire.seen(tmp_path)
    (flow,) = seen.flows
    assert flow.columns()["path_mtu"] == 1280 and len(seen.exchanges) == 2
    assert Wire().shake().ask(1).seen(tmp_path).flows[0].columns()["path_mtu"] is None


@pytest.mark.parametrize("settings, at_once", [({}, True), ({"apart": True}, False)])
def test_faults_are_counted_at_once_unless_another_reader_may_take_over(tmp_path, settings, at_once):
    """`kproxy watch` shows them when they occur."""
    path = tmp_path / "wire.pcap"
    wire = Wire().shake().ask(1).send(0, b"\xff" * 40)
    path.write_bytes(packet.pcap([(n * 1_000_000, data) for n, data in enumerate(wire.packets)]))
    quality = Quality()
    reader = Flows("test", quality, Handlers(lambda _: lambda _: None, lambda *_: None, lambda _: None), **settings)
    for window in Capture((path,), quality).windows():
        reader.window(window)
    assert bool(quality.count("fault")) == at_once
    reader.finish()
    assert quality.count("fault") == 1


def test_retransmissions_are_counted_in_the_exchange_in_flight(tmp_path):
    wire = Wire().shake().ask(1)
    for number, times in ((2, 1), (3, 0), (4, 2)):
        for _ in range(times):
            wire.send(0, request(number))
            wire.next[0] -= len(request(number))
        wire.ask(number)
    wire.send(0, request(5))
    wire.next[0] -= len(request(5))
    wire.send(0, request(5))  # and no response
    seen = wire.seen(tmp_path)
    (flow,) = seen.flows
    assert [flow.sent_again(exchange) for _, exchange in seen.exchanges] == [0, 1, 0, 2, 1]
    assert flow.total("retransmissions") == 4


@pytest.mark.parametrize("end", ("acknowledged", "reset", "the capture's"))
def test_a_response_delayed_by_loss_has_the_time_of_its_delay(tmp_path, end):
    """Retransmitted three times; copies, and retransmissions of acknowledged bytes, are not counted as late."""
    wire = Wire().shake().ask(1).send(0)
    begun = wire.next[1]
    wire.ask(2)
    stop, sent = wire.next[1], len(wire.packets) - 1
    for _ in range(3):
        wire.next[1] = begun
        wire.send(1, answer(2))
        wire.packets.append(wire.packets[-1])  # captured twice
    if end == "acknowledged":
        wire.send(0)
        late_ns = len(wire.packets) - 1 - sent
        wire.next[1] = begun
        wire.send(1, answer(2)).ask(3).send(0)
    else:
        wire.next[1] = stop
        if end == "reset":
            wire.send(0, flags=RST)
        late_ns = len(wire.packets) - 1 - sent
    seen = wire.seen(tmp_path, step_ns=100_000)
    (flow,) = seen.flows
    columns = flow.columns()
    late = [columns[name] for name in ("late_answers", "late_answer_ns", "late_answer_since_ns", "late_answer_times")]
    assert late == [1, late_ns * 100_000, sent * 100_000, 3]
    assert len(seen.exchanges) == 2 + (end == "acknowledged")


@pytest.mark.parametrize("window", (pcap.WINDOW, 300, 1))
def test_a_packet_captured_twice_is_not_a_retransmission(tmp_path, monkeypatch, window):
    """As on a bridge and its member: the copies come in bursts. A retransmission has another IP identification."""
    for module, name in ((pcap, "WINDOW"), (mapped, "PIECE_BYTES"), (mapped, "FIRST_RECORDS")):
        monkeypatch.setattr(module, name, window)
    wire = Wire().shake().ask(1, 2, 3)
    copies = wire.packets[3:6]
    wire.packets += copies  # three that were captured twice
    wire.next[1] -= len(answer(3))
    wire.send(1, answer(3))  # one that was sent twice
    seen = wire.seen(tmp_path, step_ns=100_000)
    assert len(seen.exchanges) == 3
    assert (seen.kinds()["duplicate_packets"], seen.kinds()["retransmissions"]) == (3, 1)
    assert wire.seen(tmp_path, step_ns=100_000_000).kinds()["duplicate_packets"] == 3
    late = wire.seen(tmp_path, step_ns=1_000_000_000).kinds()
    assert late["retransmissions"] == 4 and "duplicate_packets" not in late


def test_a_whole_capture_captured_twice_gives_the_same_exchanges(tmp_path):
    """Every packet again through a VLAN port a little later; loopback's TCP has timestamps, which the copies keep."""
    records = [(time_ns, frame) for time_ns, frame, _ in packet.records(captures.capture("k41_BASE").read_bytes())]
    copies = [(time_ns + 150_000, frame[:12] + b"\x81\0\0\7" + frame[12:]) for time_ns, frame in records]
    path = tmp_path / "twice.pcap"
    path.write_bytes(packet.pcap(sorted(records + copies, key=lambda record: record[0])))
    seen, base = Seen(path), Seen(captures.capture("k41_BASE"))
    assert Counter(map(identity, (e for _, e in seen.exchanges))) == Counter(
        map(identity, (e for _, e in base.exchanges))
    )
    assert seen.kinds()["duplicate_packets"] > 800
    assert seen.kinds()["retransmissions"] == base.kinds()["retransmissions"]
    assert seen.quality.size("kafka") == base.quality.size("kafka")


def test_the_client_is_found_without_a_syn(tmp_path):
    """Joined midstream, with the broker's bytes first: requests identify the client."""
    wire = Wire().send(1, answer(0)).ask(1, 2)
    seen = wire.seen(tmp_path)
    assert {(info.client_port, info.broker_port) for info, _ in seen.exchanges} == {(40000, 9092)}
    assert [exchange.correlation_id for _, exchange in seen.exchanges if exchange.outcome is ANSWERED] == [1, 2]
    assert not seen.flows[0].start_seen


@pytest.mark.parametrize("side", (0, 1))
@pytest.mark.parametrize("port", (40000, 1024))
def test_in_tls_joined_midstream_the_end_with_the_higher_port_is_the_client(tmp_path, port, side):
    """Whichever end is captured first."""
    record = b"\x17\3\3\0\5hello"
    seen = Wire(client=(packet.CLIENT[0], port)).send(side, record).send(1 - side, record).seen(tmp_path)
    assert seen.kinds()["tls"] == 1
    (flow,) = seen.flows
    assert (flow.info.client_port, flow.info.broker_port) == tuple(sorted((port, 9092), reverse=True))


def test_a_stream_is_named_from_client_to_broker_whichever_is_captured_first(tmp_path):
    (seen, other) = (Wire(client_isn=isn).send(1, answer(0)).ask(1, 2).seen(tmp_path) for isn in (1000, 77))
    keys = [key for each in (seen, other) for key, *_ in each.quality.counts() if key.startswith("stream ")]
    assert [key.split(" ", 2)[2] for key in keys] == ["10.0.0.1:40000 to 10.0.0.2:9092"] * 2
    assert keys[0] != keys[1]


def test_unrecognisable_bytes_are_undecided_or_not_kafka(tmp_path):
    assert Wire().shake().send(0, b"\0\0").seen(tmp_path).kinds()["undecided"] == 1
    middle = Wire().send(1, b"of a large response " * 70).seen(tmp_path)
    assert middle.kinds()["undecided"] == 1 and "the capture has no whole request" in verdict(middle.quality)
    assert Wire().shake().send(0, b"\xffSMBr").seen(tmp_path).kinds()["other_protocol"] == 1
    assert Wire().shake().send(0, b"\0\0\0\x40\xfeSMX" + bytes(60)).seen(tmp_path).kinds()["not_kafka"] == 1
    assert Wire().shake().send(0, b"GET / HTTP/1.1\r\n").seen(tmp_path).kinds()["http"] == 1
    assert Wire().shake().send(0, b"ruok").seen(tmp_path).kinds()["zookeeper"] == 1
    assert Wire().shake().seen(tmp_path).kinds()["no_data"] == 1


@pytest.mark.parametrize("ports", ((), (9092,)))
@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("MQTT", b"\x10\x16\0\4MQTT\4\2\0\x3c\0\x0aclient-123"),
        ("MQTT", b"\x10\x96\2\0\6MQIsdp\3\2\0\x3c" + bytes(270)),
        ("AMQP", b"AMQP\0\0\x09\1"),
        ("SSH", b"SSH-2.0-OpenSSH_9.2\r\n"),
        ("PostgreSQL", b"\0\0\0\x08\4\xd2\x16\x2f"),
        ("PostgreSQL", b"\0\0\0\x11\0\3\0\0user\0me\0\0"),
        ("SOCKS", b"\5\1\0\5\1\0\1\x0a\0\0\2\x23\x84"),
        ("SOCKS", b"\5\2\0\2"),
        ("SOCKS", b"\4\1\x23\x84\x0a\0\0\2user\0"),
        ("Cassandra", b"\4\0\0\0\5\0\0\0\0"),
        ("MongoDB", b"\x38\0\0\0\1\0\0\0\0\0\0\0\xdd\7\0\0" + bytes(40)),
        ("Pulsar", b"\0\0\0\x14\0\0\0\x10\x08\2\x12\x0c\x0a\x053.2.1\x20\x14\0\0"),
        ("Redis", b"*1\r\n$4\r\nPING\r\n"),
        ("HTTP CONNECT", b"CONNECT kafka-1:9092 HTTP/1.1\r\nHost: kafka-1:9092\r\n\r\n"),
        ("SMB", b"\0\0\0\xa4\xfeSMB\x40\0" + bytes(160)),
        ("SMB", b"\0\0\0\x45\xffSMB\x72\0" + bytes(63)),
        ("Oracle", b"\0\xc4\0\0\1\0\0\0\1\x36\1\x2c" + bytes(184)),
        ("SQL Server", b"\x12\1\0\x2f\0\0\1\0\0\0\x1a\0\6" + bytes(34)),
        ("MySQL", b"\x20\0\0\1\x8d\xaa\xff\x19\0\0\0\1\xff" + bytes(23)),
        ("LDAP", b"\x30\x0c\2\1\1\x60\7\2\1\3\4\0\x80\0"),
    ],
)
def test_other_protocols_on_a_brokers_port_are_named_and_no_port_is_advised(tmp_path, name, opening, ports):
    seen = Wire().shake().send(0, opening).send(1, b"\x20\2\0\0").seen(tmp_path, ports=ports)
    assert not {"kafka", "not_kafka"} & seen.kinds().keys()
    (row,) = (row for row in seen.quality if row.kind == "other_protocol")
    assert row.sentence.endswith(f"({name} at 10.0.0.2:9092 ×1)")
    assert "are of other protocols" in verdict(seen.quality)
    assert ("tunnel's server" in verdict(seen.quality)) == (name in content.TUNNELS)
    assert "--port" not in verdict(seen.quality)


def test_a_zookeeper_connect_is_no_produce():
    connect = (45).to_bytes(4) + bytes(12) + (18000).to_bytes(4) + bytes(8) + (16).to_bytes(4) + bytes(17)
    assert content.opening(connect, b"", None) == content.ZOOKEEPER
    assert content.opening(connect, b"", content.KAFKA) == content.ZOOKEEPER
    assert content.witness(connect) is None


def test_concatenated_captures_are_read_one_after_the_other(tmp_path):
    """Packets go back in time: no packet is taken for a copy of one in the previous capture."""
    copies = 9
    whole = captures.capture("k41_java_cluster").read_bytes()
    one, many = tmp_path / "one.pcap", tmp_path / "many.pcap"
    one.write_bytes(whole)
    many.write_bytes(whole[:24] + copies * whole[24:])
    found = [Seen(path) for path in (one, many)]
    assert found[1].quality.count("packets") == copies * found[0].quality.count("packets")
    assert len(found[1].exchanges) == len(found[0].exchanges)
    assert found[1].quality.count("clock_back") > 1000


def with_translated_address(data, address):
    """A packet of k41_BASE on the other side of a NAT of the broker's address."""
    place = 30 if data[36:38] == (9092).to_bytes(2) else 26
    return data[:place] + address + data[place + 4 :]


@pytest.mark.parametrize("late_ns", (20_000, 3_600_000_000_000))
def test_a_stream_under_two_addresses_is_reported(tmp_path, late_ns):
    """A ClusterIP and the address of its pod. An hour later equal sequence numbers belong to another stream."""
    packets = [(time_ns, data) for time_ns, data, _ in packet.records(captures.capture("k41_BASE").read_bytes())]
    copies = [(time_ns + late_ns, with_translated_address(data, bytes((10, 96, 0, 7)))) for time_ns, data in packets]
    path = tmp_path / "with_translated_address.pcap"
    path.write_bytes(packet.pcap(sorted(packets + copies)))
    one, whole = Seen(captures.capture("k41_BASE")), Seen(path)
    parts = Quality()
    for start in range(3):
        parts.add(Seen(path, shards=range(start, SHARDS, 3)).quality)
    assert len(whole.exchanges) == 2 * len(one.exchanges)
    rows = [[row for row in quality if row.kind == "same_stream"] for quality in (whole.quality, parts)]
    assert rows[0] == rows[1]
    if late_ns > SAME_STREAM_NS:
        assert not rows[0]
        return
    (row,) = rows[0]
    assert row.count == one.quality.count("kafka")
    assert row.bytes == one.quality.size("kafka")
    client, broker = one.flows[0].ends[one.flows[0].client], one.flows[0].ends[1 - one.flows[0].client]
    assert f"{client[0]}:{client[1]} to 10.96.0.7:9092 is {client[0]}:{client[1]} to {broker[0]}:9092" in row.sentence
    assert row.sentence.endswith(f" and {row.count - 3} more)")
