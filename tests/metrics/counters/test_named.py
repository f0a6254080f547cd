"""Names from peers: topics by name and by id, clients, and the limits of both."""

from base64 import urlsafe_b64encode
from collections import Counter
from uuid import UUID

from kproxy.metrics import Metrics
from kproxy.metrics.counters.named import EXPIRY_NS, MAX_CLIENTS, OTHER, Top, TopicCells, Topics
from kproxy.protocol.apis import API_VERSIONS, FETCH, METADATA, PRODUCE
from kproxy.protocol.compression import GZIP, ZSTD
from kproxy.protocol.records import Record, write_batch, write_message_set
from kproxy.wire.bodies import TOPICS, Found, Sums
from kproxy.wire.events import BROKER, CLIENT, ClientNamed, Exchange
from kproxy.wire.interest import ApiPlan, Interest
from tests.metrics.test_metrics import info, labels, scrape
from tests.wire.playbook import Dialogue, request, response

ORDERS, INVOICES = UUID(int=1), UUID(int=2)
RECORDS = [Record(number, 1_700_000_000_000, None, b"v" * 50) for number in range(3)]
PLAIN, ZIPPED, SMALL = write_batch(RECORDS), write_batch(RECORDS, codec=ZSTD), write_batch(RECORDS[:1], codec=GZIP)


def conversation(interest):
    """One connection that produces by topic name and id and fetches; the name of an id comes last."""
    talk = Dialogue(interest)
    metrics = Metrics()
    talk.now = metrics.now_ns()
    connection = metrics.connection(info(), "main", "1", topics=bool(interest.detail))

    def produce(version, number, acks=-1, **topic):
        topic["partitionData"] = [{"index": 0, "records": topic.pop("records")}]
        return request(PRODUCE, version, number, {"acks": acks, "timeoutMs": 1, "topicData": [topic]})

    software = {"clientSoftwareName": "a-client", "clientSoftwareVersion": "1.2"}
    talk.client(request(API_VERSIONS, 3, 0, software, client="shop"))
    talk.broker(response(API_VERSIONS, 3, 0))
    talk.client(produce(9, 1, name="orders", records=PLAIN) + produce(13, 2, topicId=ORDERS, records=SMALL))
    talk.broker(response(PRODUCE, 9, 1) + response(PRODUCE, 13, 2))
    talk.client(produce(9, 3, acks=0, name="orders", records=PLAIN * 2))
    talk.client(produce(3, 4, name="old", records=write_message_set(RECORDS, magic=1, codec=GZIP)))
    talk.client(request(FETCH, 16, 5, {"maxWaitMs": 500}))
    fetched = [
        {"topicId": topic, "partitions": [{"partitionIndex": 0, "records": records}]}
        for topic, records in ((ORDERS, PLAIN + ZIPPED), (INVOICES, ZIPPED + ZIPPED[:70]))
    ]
    talk.broker(response(PRODUCE, 3, 4) + response(FETCH, 16, 5, {"responses": fetched}), [90, 200])
    talk.client(request(METADATA, 12, 6))
    talk.broker(response(METADATA, 12, 6, {"topics": [{"name": "orders", "topicId": ORDERS}]}))
    connection.events(talk.events)
    return talk, metrics, connection


def test_topics_are_counted_by_name_even_if_the_name_comes_last():
    _, metrics, _ = conversation(Interest(detail=TOPICS))
    found = scrape(metrics)
    unnamed = urlsafe_b64encode(INVOICES.bytes).decode().rstrip("=")

    def topic(name, direction, **more):
        return labels(cluster="default", topic=name, direction=direction, **more)

    assert found["kproxy_topic_bytes_total"] == {
        topic("orders", "request"): 3 * len(PLAIN) + len(SMALL),
        topic("orders", "response"): len(PLAIN) + len(ZIPPED),
        topic("old", "request"): len(write_message_set(RECORDS, magic=1, codec=GZIP)),
        topic(unnamed, "response"): len(ZIPPED) + 70,
    }
    assert found["kproxy_topic_records_total"] == {
        topic("orders", "request"): 10,
        topic("orders", "response"): 6,
        topic("old", "request"): 0,  # a compressed message set has no record count
        topic(unnamed, "response"): 3,
    }
    assert found["kproxy_topic_batches_total"] == {
        topic("orders", "request", codec="none"): 3,
        topic("orders", "request", codec="gzip"): 1,
        topic("orders", "response", codec="mixed"): 2,
        topic("old", "request", codec="gzip"): 1,
        topic(unnamed, "response", codec="zstd"): 1,
    }


def test_bodies_are_read_only_at_a_sufficient_detail():
    talk, metrics, _ = conversation(Interest())
    assert not any("topic" in name for name in scrape(metrics))
    assert {(e.request_body, e.response_body) for e in talk.exchanges} == {(None, None)}
    talk, _, _ = conversation(Interest(detail=TOPICS))  # metrics: only bodies with records, consumers, or names
    read = Counter(
        (e.plan.api, side)
        for e in talk.exchanges
        for side, body in (("request", e.request_body), ("response", e.response_body))
        if body is not None
    )
    assert read == {
        ("Produce", "request"): 4,
        ("Produce", "response"): 3,
        ("Fetch", "request"): 1,
        ("Fetch", "response"): 1,
        ("Metadata", "response"): 1,
    }


def test_a_client_is_shown_while_it_is_connected_and_for_the_expiry_time():
    talk, metrics, connection = conversation(Interest())
    client = labels(cluster="default", client_id="shop", software_name="a-client", software_version="1.2")
    assert scrape(metrics)["kproxy_client_info"] == {client: 1}
    talk.events.clear()
    talk.now += 2 * EXPIRY_NS
    assert [key for key, _ in metrics.cluster("default").clients.top.shown(talk.now)] == [("shop", "a-client", "1.2")]
    connection.events(talk.close(CLIENT).close(BROKER).events)
    assert [key for key, _ in metrics.cluster("default").clients.top.shown(talk.now)] == [("shop", "a-client", "1.2")]
    assert not list(metrics.cluster("default").clients.top.shown(talk.now + 2 * EXPIRY_NS))


def test_invented_clients_share_a_series():
    metrics = Metrics()
    connection = metrics.connection(info(), "main", "1")
    now_ns = metrics.now_ns()
    connection.events([ClientNamed(f"c{number}" * 999, "n", "1", now_ns) for number in range(3 * MAX_CLIENTS)])
    shown = scrape(metrics)["kproxy_client_info"]
    assert MAX_CLIENTS < len(shown) <= 1.1 * MAX_CLIENTS + 1  # replaced clients are shown a little longer
    assert labels(cluster="default", client_id=OTHER, software_name=OTHER, software_version=OTHER) in shown
    assert max(len(value) for pairs in shown for _, value in pairs) < 300


def produced(topic, size, now_ns):
    exchange = Exchange(ApiPlan(0, 9, "Produce", True), 1, 0, 0, size, now_ns)
    exchange.request_body = Found()
    exchange.request_body.sums = [Sums(topic, None, size, batches=1, records=1, codecs=1)]
    return exchange


def test_an_expired_topic_frees_its_place_and_its_counter_continues_if_it_returns():
    topics = Topics()
    topics.top = Top(2, TopicCells)
    topics.events([produced("a", 900, 0), produced("b", 10, EXPIRY_NS)])
    later = 2 * EXPIRY_NS
    assert {topic for topic, _ in topics.top.shown(later)} == {"b"}
    topics.events([produced("a", 1, later)])
    assert dict(topics.top.shown(later))["a"].request.bytes == 901
    much_later = 4 * EXPIRY_NS
    topics.events([produced("c", 5, much_later)])  # a and b expire although both were larger
    assert [topic for topic, _ in topics.top.shown(much_later)] == ["c"]
