"""One problem of several clients or APIs, or at several times, is one finding; a problem elsewhere is another."""

import pytest

from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import findings, limits
from kproxy.analysis.findings.finding import Finding, found
from kproxy.analysis.findings.together import together
from kproxy.analysis.verdict import verdict
from kproxy.views.findings import sentence
from kproxy.views.verdict import sentence as verdict_of
from tests.analysis.findings import made

NS = 10**9


def refused(kind: str, client: str, api: str, topic: str, failed: int, severity: str = "warning") -> Finding:
    place = {"client": client, "api": api, "topic": topic}
    evidence = {"failed": failed, "asked": 2 * failed, "errors": "SOME_ERROR", "api": api}
    where = f"client {client}, {api}, topic {topic}"
    return found(kind, severity, failed / 1e4, "default", where, place, (10**6 * failed, 2 * 10**6 * failed), evidence)


def test_a_missing_topic_is_one_finding_for_all_its_clients():
    several = [
        refused("unknown_topic", "w", "Produce", "typo", 30),
        refused("unknown_topic", "w", "Metadata", "typo", 20, "critical"),
        refused("unknown_topic", "r", "Fetch", "typo", 10),
        refused("unknown_topic", "r", "Fetch", "other", 5),
    ]
    first, other = together(several)
    assert (first.where, first.severity, first.since_ns, first.until_ns) == (
        "topic typo, 2 clients",
        "critical",
        10 * NS,
        60 * NS,
    )
    assert dict(first.place) == {"topic": "typo"} and dict(first.evidence)["clients"] == 2
    assert sentence(first) == (
        "60 of 120 Fetch, Metadata, Produce requests name a topic that does not exist: SOME_ERROR"
    )
    assert other == several[3]


def test_denied_requests_of_one_client_are_one_finding_for_all_topics():
    several = [refused("refused_authorization", "nosy", "Produce", topic, 4) for topic in ("a", "b")]
    several += [refused("refused_authorization", "other", "Produce", "a", 4)]
    first, other = together(several)
    assert first.where == "client nosy, topic a and 1 more" and dict(first.evidence)["failed"] == 8
    assert other == several[2]


def test_the_lag_of_a_client_is_a_consequence_of_the_lag_of_its_group():
    def lag(place: dict) -> Finding:
        return found("growing_lag", "warning", 0.1, "default", "somewhere", place, (1, 2), {"last_lag_records": 9})

    group = lag({"group_id": "g", "topic": "t", "clients": ["a", "b"]})
    client, elsewhere = lag({"client": "a", "topic": "t"}), lag({"client": "a", "topic": "u"})
    first, second = together([client, group, elsewhere])
    assert first.consequences == (client._replace(change="", settings=()),) and dict(first.place) == dict(group.place)
    assert second == elsewhere


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("brokers", "where", "said"),
    [
        ((2, 2, 2), "broker 2 (10.0.1.2:9092)", "Broker 2 paused three times for up to 1.5"),
        ((2, 1, 2), "broker 2 (twice), broker 1 (once)", "Broker 2 (twice), broker 1 (once) paused for up to 1.5"),
        ((2,), "broker 2 (10.0.1.2:9092)", "Broker 2 paused for 1.5"),
    ],
)
def test_repeated_pauses_are_one_finding_with_their_consequences(tmp_path, brokers, where, said):
    """A writer with acks=all is slow during each pause: no single pause has most of its slow requests."""
    table = made.Made()
    for turn, broker in enumerate(brokers):
        made.pause(table, 1.5, paused=(broker,), after_s=70 * turn)
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = findings(tables, limits({"very_slow_produce_ms": 500, "slow_produces_min": 10}))
        told = verdict_of(verdict(tables, answer))
    (one,) = [each for each in answer if each.kind == "broker_paused"]
    assert one.where == where and dict(one.evidence).get("times") == (len(brokers) if len(brokers) > 1 else None)
    assert ("paused 3 times, " in sentence(one)) == (len(brokers) == 3)
    assert told.startswith(said)
    assert "slow_broker" not in {each.kind for each in answer}
