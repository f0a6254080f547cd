"""GetTelemetrySubscriptions and PushTelemetry in the broker's place, over any split of the bytes."""

import asyncio
import tracemalloc
from uuid import UUID

import pytest

from kproxy.metrics import Metrics
from kproxy.metrics.pushed import telemetry as of_pushes
from kproxy.metrics.pushed.pushed_pieces import PIECE_BYTES
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.protocol.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD, compress
from kproxy.proxy.config.telemetry import Telemetry
from kproxy.proxy.filters import telemetry
from kproxy.proxy.filters.chain import Chain, Filter
from kproxy.proxy.filters.telemetry import ERRORS_OF, MAX_WAITING_BYTES, AnswerTelemetry, Receiver, wants
from kproxy.wire.decisions.authorizer import Close, Hold
from kproxy.wire.events import ANSWERED_BY_PROXY, BROKER, CLIENT
from kproxy.wire.interest import Interest
from tests.pushed import counter, gauge, pushed
from tests.wire.playbook import Dialogue, foreign_request, request, response

GET, PUSH = 71, 72
S = 10**9
NO_ID = UUID(int=0)
BODY = pushed(counter("org.apache.kafka.producer.connection.creation.total", 3))


class Cluster:
    """The telemetry of one cluster; pushes are read when the test calls `read`."""

    def __init__(self, **settings) -> None:
        self.now_ns = 1000 * S
        self.metrics = Metrics()
        self.cells, self.pushes = self.metrics.cluster("default").takes_pushes(ERRORS_OF)
        self.reading = []
        settings = Telemetry(push_interval_s=10, **settings)
        self.receiver = Receiver("default", settings, self.cells, self.pushes, self.reading.append, lambda: self.now_ns)

    def __del__(self) -> None:
        for work in self.reading:
            work.close()

    def read(self) -> None:
        for work in self.reading:
            asyncio.run(work)
        self.reading.clear()

    def values(self) -> dict[str, float]:
        self.read()
        return {
            series.name: value
            for client in self.pushes.clients.values()
            for series, value in (client.values | client.sums).items()
        }

    def answered(self) -> dict[tuple[str, str], int]:
        return {key: count for key, count in self.cells.answers.items() if count}


class Talk(Dialogue):
    """A client's connection to it."""

    def __init__(
        self, cluster: Cluster | None = None, software=("librdkafka", "2.6"), client_id="app", principal="", before=()
    ) -> None:
        self.cluster = cluster or Cluster()
        self.client_id = client_id
        self.filter = AnswerTelemetry(self.cluster.receiver, "10.0.0.1:5000", principal, software)
        super().__init__(Interest(authorizes=wants), authorizer=Chain([*before, self.filter]).authorizer)
        self.instance, self.subscription = NO_ID, 0
        self._number = 0

    def ask(self, key: int, body: dict, chunks=()) -> dict:
        """The answer to a request, which the broker does not get."""
        self._number += 1
        before = len(self.sent[CLIENT])
        self.client(request(key, 0, self._number, body, self.client_id), chunks)
        assert not self.faults and self.sent[BROKER] == b""
        header, answer = codec.decode_response(self.sent[CLIENT][before + 4 :], key, 0)
        assert header["correlationId"] == self._number
        return answer

    def subscribe(self) -> dict:
        answer = self.ask(GET, {"clientInstanceId": self.instance})
        if not answer["errorCode"]:
            self.instance, self.subscription = answer["clientInstanceId"], answer["subscriptionId"]
        return answer

    def push(self, metrics: bytes = BODY, compression: int = NONE, chunks=(), **other) -> str:
        """The error of the answer."""
        body = {
            "clientInstanceId": self.instance,
            "subscriptionId": self.subscription,
            "terminating": False,
            "compressionType": compression,
            "metrics": metrics,
            **other,
        }
        code = self.ask(PUSH, body, chunks)["errorCode"]
        return {code: name for name, code in telemetry.CODES.items()}[code]

    def later(self, seconds: float = 10) -> "Talk":
        self.cluster.now_ns += int(seconds * S)
        return self


def test_a_client_subscribes_and_pushes_as_brokers_let_it():
    talk = Talk()
    answer = talk.subscribe()
    assert answer["errorCode"] == 0 and answer["pushIntervalMs"] == 10_000 and answer["telemetryMaxBytes"] == 1 << 20
    assert answer["acceptedCompressionTypes"] == [ZSTD, LZ4, GZIP, SNAPPY] and answer["requestedMetrics"] == ["*"]
    assert not answer["deltaTemporality"] and talk.instance != NO_ID
    assert talk.push() == "NONE"
    assert talk.cluster.values() == {"producer_connection_creation": 3.0}
    client = talk.cluster.pushes.clients[talk.instance]
    assert (client.client_id, client.software) == ("app", ("librdkafka", "2.6"))
    assert [exchange.outcome for exchange in talk.exchanges] == [ANSWERED_BY_PROXY] * 2
    assert talk.cluster.answered() == {("GetTelemetrySubscriptions", "NONE"): 1, ("PushTelemetry", "NONE"): 1}


@pytest.mark.parametrize("compression", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
@pytest.mark.parametrize("chunks", [[], [3], [12], [20, 40], range(1, 90, 7)])
def test_every_compression_over_any_split(compression, chunks):
    talk = Talk()
    talk.subscribe()
    assert talk.push(compress(compression, BODY), compression, chunks) == "NONE"
    assert talk.cluster.values() == {"producer_connection_creation": 3.0}


def test_the_pace_is_kept():
    talk = Talk()
    talk.subscribe()
    assert talk.subscribe()["errorCode"] == telemetry.CODES["THROTTLING_QUOTA_EXCEEDED"]
    assert talk.push() == "NONE"  # the first comes early
    assert talk.later(9).push() == "THROTTLING_QUOTA_EXCEEDED"
    assert talk.later(1).push() == "NONE"
    assert talk.push(terminating=True) == "NONE"  # the last may come at any time
    assert talk.later(10).push() == "INVALID_REQUEST"
    assert talk.subscribe()["errorCode"] == 0


def test_a_client_asks_again_at_once_after_an_unknown_subscription():
    talk = Talk()
    talk.subscribe()
    known = talk.subscription
    assert talk.push(subscriptionId=known + 1) == "UNKNOWN_SUBSCRIPTION_ID"
    assert talk.subscribe()["subscriptionId"] == known and talk.push() == "NONE"


def test_any_process_knows_a_subscription_until_the_settings_change():
    talk = Talk()
    talk.subscribe()
    for settings, error in (({}, "NONE"), ({"metrics": ["org.apache.kafka.consumer."]}, "UNKNOWN_SUBSCRIPTION_ID")):
        other = Talk(Cluster(**settings))
        other.instance, other.subscription = talk.instance, talk.subscription
        assert other.push() == error


@pytest.mark.parametrize(
    ("error", "body"),
    [
        ("INVALID_REQUEST", {"clientInstanceId": NO_ID}),
        ("UNSUPPORTED_COMPRESSION_TYPE", {"compressionType": 5}),
        ("UNSUPPORTED_COMPRESSION_TYPE", {"compressionType": -1}),
        ("TELEMETRY_TOO_LARGE", {"metrics": bytes(5000)}),
        ("TELEMETRY_TOO_LARGE", {"metrics": compress(ZSTD, bytes(1 << 26)), "compressionType": ZSTD}),
        ("TELEMETRY_TOO_LARGE", {"metrics": compress(GZIP, bytes(1 << 20)), "compressionType": GZIP}),
        ("TELEMETRY_TOO_LARGE", {"metrics": compress(LZ4, bytes(1 << 20)), "compressionType": LZ4}),
        ("TELEMETRY_TOO_LARGE", {"metrics": compress(SNAPPY, bytes(1 << 16)), "compressionType": SNAPPY}),
        ("INVALID_RECORD", {"metrics": b"garbage"}),
        ("INVALID_RECORD", {"metrics": BODY, "compressionType": ZSTD}),
        ("INVALID_RECORD", {"metrics": compress(GZIP, BODY)[:-9], "compressionType": GZIP}),
    ],
)
def test_refusals_are_those_of_brokers(error, body, caplog):
    talk = Talk(Cluster(max_push_bytes=4096))
    talk.subscribe()
    assert talk.push(**body) == error
    assert talk.cluster.answered()["PushTelemetry", error] == 1
    assert not talk.cluster.reading
    assert ("10.0.0.1:5000" in caplog.text) == (error != "INVALID_REQUEST")
    assert talk.exchanges[-1].error_code == telemetry.CODES[error]


def test_a_push_far_beyond_the_limit_is_answered_and_not_kept_in_memory():
    talk = Talk(Cluster(max_push_bytes=1024))
    talk.subscribe()
    tracemalloc.start()
    large = talk.push(bytes(8 << 20), chunks=range(1000, 8 << 20, 100_000))
    assert large == "TELEMETRY_TOO_LARGE" and tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert talk.later().push() == "NONE"  # and the connection lives on


def test_all_clients_share_one_rate_limit_and_the_queue_of_pushes_has_a_bound():
    cluster = Cluster(max_clients=1000)
    data = pushed(*(gauge(f"g{number}", 1, topic="t" * 200) for number in range(1500)))
    errors = []
    for _ in range(20):
        talk = Talk(cluster)
        talk.subscribe()
        errors.append(talk.push(compress(ZSTD, data), ZSTD))
    waiting = errors.count("NONE")
    assert waiting == -(-MAX_WAITING_BYTES // len(data)) and errors[waiting:] == ["THROTTLING_QUOTA_EXCEEDED"] * (
        20 - waiting
    )
    cluster.read()
    taken = waiting
    while cluster.receiver._credit_bytes > 0:
        talk = Talk(cluster)
        talk.subscribe()
        assert talk.push(compress(ZSTD, data), ZSTD) == "NONE"
        cluster.read()
        taken += 1
    assert taken == -(-telemetry.MAX_BURST_BYTES // len(data))
    talk = Talk(cluster)
    talk.subscribe()
    assert talk.push() == "THROTTLING_QUOTA_EXCEEDED"
    assert talk.later().push() == "NONE"


def test_a_push_that_fails_to_decompress_is_charged_like_a_whole_one():
    cluster = Cluster()
    bomb = compress(GZIP, bytes(1 << 20))[:-1]
    errors = []
    for _ in range(6):
        talk = Talk(cluster)
        talk.subscribe()
        errors.append(talk.push(bomb, GZIP))
    assert errors == ["INVALID_RECORD"] * 4 + ["THROTTLING_QUOTA_EXCEEDED"] * 2


def test_clients_beyond_max_clients_are_asked_for_deltas_until_a_place_is_free(caplog):
    cluster = Cluster(max_clients=1)
    first, second = Talk(cluster), Talk(cluster)
    assert not first.subscribe()["deltaTemporality"] and first.push() == "NONE"
    assert second.subscribe()["deltaTemporality"] and second.push() == "NONE"
    assert "all places of max_clients (1) are taken" in caplog.text
    second.later(31)  # the first has not pushed meanwhile
    assert second.push() == "UNKNOWN_SUBSCRIPTION_ID"
    assert not second.subscribe()["deltaTemporality"] and second.push() == "NONE"


def test_a_push_takes_a_place_and_a_subscription_does_not():
    """Connections that only subscribe, or push nothing, take no place from a client that has metrics."""
    cluster = Cluster(max_clients=2)
    for number in range(5):
        idle = Talk(cluster, client_id=f"idle-{number}")
        assert not idle.subscribe()["deltaTemporality"]
        assert idle.push(metrics=b"") == "NONE"
    talk = Talk(cluster)
    assert not talk.subscribe()["deltaTemporality"] and talk.push() == "NONE"
    assert list(cluster.pushes.clients) == [talk.instance]
    assert cluster.values() == {"producer_connection_creation": 3}


@pytest.mark.parametrize("thief", [{"client_id": "thief"}, {"principal": "User:thief"}])
def test_an_instance_id_belongs_to_its_first_user_while_it_is_in_use(thief, caplog):
    cluster = Cluster()
    owner, other = Talk(cluster), Talk(cluster, **thief)
    owner.subscribe()
    assert owner.push() == "NONE"
    other.instance, other.subscription = owner.instance, owner.subscription  # as /metrics shows, and as follows from it
    more = pushed(counter("org.apache.kafka.producer.connection.creation.total", 666))
    assert other.push(more) == other.push(b"", terminating=True) == "INVALID_REQUEST"
    assert other.subscribe()["errorCode"] == telemetry.CODES["INVALID_REQUEST"]
    assert "under an instance id that another client uses is refused" in caplog.text
    assert cluster.values() == {"producer_connection_creation": 3}
    assert owner.later().push() == "NONE"
    again = Talk(cluster)  # the same client, on another connection
    again.instance, again.subscription = owner.instance, owner.subscription
    assert again.later().push() == "NONE"
    other.later(31)
    assert other.subscribe()["errorCode"] == 0 and other.push(more) == "NONE"  # it is not in use any more


def test_a_connection_that_invents_clients_gets_the_series_of_one(monkeypatch):
    monkeypatch.setattr(telemetry, "MAX_INSTANCES", 100)
    talk = Talk()
    for number in range(110):
        talk.instance = UUID(int=1000 + number)
        talk.subscribe()
        assert talk.push() == "NONE"
        assert talk.push(metrics=b"", terminating=True) == "NONE"
    assert list(talk.cluster.pushes.clients) == [UUID(int=1000)]
    assert len(talk.cluster.receiver._instances) == 100


def test_brokers_that_take_pushes_get_them_unless_kproxy_always_answers():
    for answer, forwards in (("missing", True), ("always", False)):
        talk = Talk(Cluster(answer=answer))
        talk.filter.broker_answers = True
        sent = request(GET, 0, 1, {"clientInstanceId": NO_ID})
        talk.client(sent)
        assert talk.sent[BROKER] == (sent if forwards else b"")


def test_the_software_of_a_client_is_what_it_names_in_api_versions():
    talk = Talk(software=None)
    asked = request(API_VERSIONS, 3, 1, {"clientSoftwareName": "apache-kafka-java", "clientSoftwareVersion": "4.1.0"})
    talk.client(asked, [9, 20])
    assert talk.sent[BROKER] == asked
    talk.broker(response(API_VERSIONS, 3, 1))
    talk.sent = {CLIENT: b"", BROKER: b""}
    talk.subscribe()
    talk.push()
    assert talk.cluster.pushes.clients[talk.instance].software == ("apache-kafka-java", "4.1.0")


def test_an_answer_waits_for_older_ones():
    talk = Talk()
    talk.client(request(METADATA, 9, 1) + request(GET, 0, 2, {"clientInstanceId": NO_ID}))
    assert talk.sent[CLIENT] == b"" and talk.sent[BROKER] == request(METADATA, 9, 1)
    older = response(METADATA, 9, 1)
    talk.broker(older)
    assert talk.sent[CLIENT].startswith(older) and len(talk.sent[CLIENT]) > len(older)


def test_a_request_that_does_not_decode_closes_the_connection_and_a_newer_version_is_forwarded():
    talk = Talk()
    talk.client(foreign_request(PUSH, 0, 1, b"\x00\x01a\x00" + b"\xff" * 30))
    (fault,) = talk.faults
    assert fault.fatal and "PushTelemetry v0 does not decode" in fault.text
    talk = Talk()
    newer = foreign_request(PUSH, 99, 1, bytes(30))
    assert talk.client(newer).sent[BROKER] == newer


TAGS = {"_tags": dict.fromkeys(range(20_000), b"")}


@pytest.mark.parametrize(("key", "version"), [(GET, 0), (PUSH, 0)])
def test_tagged_fields_without_end_are_not_read(key, version):
    talk = Talk().client(request(key, version, 1, TAGS))
    (fault,) = talk.faults
    assert fault.fatal and "more tagged fields than its API has" in fault.text and talk.sent[BROKER] == b""


@pytest.mark.parametrize("chunks", [[], [20], [100_000]])
def test_an_api_versions_request_that_is_too_large_to_name_software_passes_unread(chunks):
    """A broker may understand it; reading it could take a second for each 4 MiB."""
    talk = Talk(software=None)
    named = {"clientSoftwareName": "x", "clientSoftwareVersion": "1"}
    for number, sent in enumerate((request(API_VERSIONS, 3, 1, named | TAGS), request(API_VERSIONS, 3, 1, named)), 1):
        talk.client(sent, [cut for cut in chunks if cut < len(sent)]).broker(response(API_VERSIONS, 3, 1))
        assert not talk.faults and len(talk.exchanges) == number
        assert talk.filter._software == (("", ""), ("x", "1"))[number - 1]


class Strict(Filter):
    """A policy in front of it."""

    def __init__(self, decision) -> None:
        self.decision = decision

    def at_header(self, exchange):
        return self.decision

    def decide(self, exchange, frame):
        return None if isinstance(self.decision, Hold) else self.decision


def test_a_filter_before_it_decides_first():
    talk = Talk(before=[Strict(Close("no"))])
    talk.client(request(GET, 0, 1, {"clientInstanceId": NO_ID}))
    assert talk.faults[0].text == "no" and talk.sent == {CLIENT: b"", BROKER: b""}


LARGE = pushed(*(counter(f"c{number}.total", number, topic="t" * 200) for number in range(3000)))


def test_a_large_push_is_parsed_in_pieces_and_the_event_loop_runs_in_between(monkeypatch):
    parsed = []

    def parsing(data):
        parsed.append(len(data))
        return of_a_piece(data)

    of_a_piece = of_pushes._parsed
    monkeypatch.setattr(of_pushes, "_parsed", parsing)
    talk = Talk(Cluster(max_series_per_client=5000))
    talk.subscribe()
    assert len(LARGE) > 600_000 and talk.push(compress(ZSTD, LARGE), ZSTD) == "NONE" and not parsed

    async def read() -> int:
        turns = 0
        reading = asyncio.ensure_future(talk.cluster.reading.pop())
        while not reading.done():
            before = sum(parsed)
            await asyncio.sleep(0)
            turns += 1
            assert sum(parsed) - before <= 2 * PIECE_BYTES
        return turns

    assert asyncio.run(read()) > len(LARGE) // PIECE_BYTES
    assert max(parsed) < 2 * PIECE_BYTES and sum(parsed) >= len(LARGE)
    assert talk.cluster.values() == {f"c{number}": float(number) for number in range(3000)}


def test_the_error_of_a_large_malformed_push_answers_the_next_push(caplog):
    talk = Talk()
    talk.subscribe()
    assert talk.push(LARGE[:-1]) == "NONE"
    assert talk.cluster.values() == {} and "refused" in caplog.text
    assert talk.later().push() == "INVALID_RECORD"
    assert talk.later().push() == "NONE"
    assert talk.cluster.answered()["PushTelemetry", "INVALID_RECORD"] == 1
    assert talk.cluster.values() == {"producer_connection_creation": 3.0}


def test_changed_settings_reach_a_connected_client():
    talk = Talk(Cluster(max_clients=2))
    others = [Talk(talk.cluster) for _ in range(2)]
    for each in (talk, *others):
        each.subscribe()
        assert each.push() == "NONE"
    talk.cluster.read()
    assert len(talk.cluster.pushes.clients) == 2
    settings = Telemetry(push_interval_s=30, metrics=["a."], max_clients=1, max_push_bytes=2048)
    talk.cluster.receiver.change(settings, talk.cluster.reading.append)
    assert list(talk.cluster.pushes.clients) == [talk.instance]
    assert talk.later().push() == "UNKNOWN_SUBSCRIPTION_ID"
    answer = talk.subscribe()
    assert (answer["pushIntervalMs"], answer["requestedMetrics"]) == (30_000, ["a."])
    assert answer["telemetryMaxBytes"] == 2048 and not answer["deltaTemporality"]
    assert talk.push(bytes(3000)) == "TELEMETRY_TOO_LARGE"
    assert others[0].push() == "UNKNOWN_SUBSCRIPTION_ID" and others[0].subscribe()["deltaTemporality"]


def test_without_settings_kproxy_asks_clients_for_nothing_until_the_settings_are_back():
    talk = Talk()
    talk.subscribe()
    assert talk.push() == "NONE"
    settings = talk.cluster.receiver.settings
    talk.cluster.receiver.change(None, talk.cluster.reading.append)
    assert talk.later().push() == "UNKNOWN_SUBSCRIPTION_ID"
    assert talk.subscribe()["requestedMetrics"] == []
    talk.cluster.receiver.change(settings, talk.cluster.reading.append)
    assert talk.later().subscribe()["requestedMetrics"] == ["*"]
    assert talk.push() == "NONE"


@pytest.mark.parametrize("kind", [counter, gauge])
def test_of_metrics_whose_names_are_one_here_the_first_is_kept_and_others_are_counted(kind):
    """Each has its characters replaced: the last one would take the value of the first, push by push."""
    talk = Talk()
    for _ in range(2):
        talk.subscribe()
        assert talk.push(pushed(kind("a.b", 1), kind("a-b", 2), kind("a b", 3), kind("a.b", 4, topic="t"))) == "NONE"
        talk.later()
    talk.cluster.read()
    (client,) = talk.cluster.pushes.clients.values()
    assert sorted(client.values.values()) == [1, 4]
    assert talk.cluster.cells.left_out == {"clients": 0, "series": 0, "kind": 4}


def test_an_empty_push_ends_the_series_of_the_previous_push():
    talk = Talk()
    talk.subscribe()
    assert talk.push() == "NONE" and talk.cluster.values()
    assert talk.later().push(b"", compression=ZSTD) == "NONE" and not talk.cluster.values()


def test_settings_of_a_reload_that_fails_change_nothing():
    talks = [Talk(cluster) for cluster in [Cluster()] * 3]
    for talk in talks:
        talk.subscribe()
    cluster = talks[0].cluster
    Receiver("default", Telemetry(max_clients=1), cluster.cells, cluster.pushes, cluster.reading.append, lambda: 0)
    assert [talk.push() for talk in talks] == ["NONE"] * 3
    cluster.read()
    assert len(cluster.pushes.clients) == 3
