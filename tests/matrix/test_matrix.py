"""The matrix in short: a few clients of each language, before the broker of now, by every kind of security.

`./dev matrix` runs all of it. Here a client of Go takes part where `./dev matrix` has built its driver, which takes
minutes, and one of Node where Node is installed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker.jvm import JARS
from tests.matrix import brokers, cases, clients, report, setup, ways
from tests.matrix.records import fault, records

SHORT = ("confluent-kafka", "aiokafka", "4.1.0", "kcat", "Sarama", "KafkaJS")


def short(chosen: list[clients.Client]) -> Iterator[tuple[clients.Client, ways.Way]]:
    """The first client by every way, the others without security and by two ways, each by others."""
    secured = ways.WAYS[1:]
    for place, client in enumerate(chosen):
        yield client, ways.WAYS[0]
        for number in range(len(secured) if place == 0 else 2):
            yield client, secured[(2 * place + number) % len(secured)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[brokers.Brokers]:
    """The brokers of now, without share groups."""
    (release,) = (release for release in brokers.RELEASES if release.name == "4.1")
    with brokers.running(release, tmp_path_factory.mktemp("matrix") / "brokers", share=False) as cluster:
        yield cluster


@pytest.mark.ring2
@pytest.mark.timeout(600)  # the first run fetches what the drivers need
def test_the_short_matrix(cluster: brokers.Brokers, tmp_path: Path) -> None:
    chosen = [
        client
        for client in clients.CLIENTS
        if client.library in SHORT
        and client.mode == "groups"
        and setup.available(client.family)
        and (client.family != "go" or setup.go_is_built())
    ]
    assert {client.family for client in chosen} >= {"python3", "java", "kcat"} and (JARS / "stamp").exists()
    wanted = [cases.Case(client, cluster.release, way) for client, way in short(chosen)]
    outcomes = list(cases.run_release(cluster, wanted, tmp_path, jobs=2))
    assert len(outcomes) == len(wanted)
    report.write(tmp_path / "page.md", outcomes, [cluster.release], chosen, ways.WAYS)
    failed = {(one.case.client.name, one.case.way.name): one.reason for one in outcomes if one.state != "works"}
    # kcat makes its token itself, unsigned; Debian's librdkafka repeats the nonce of SCRAM, which Kafka 4 refuses
    of_kcat = ("OAUTHBEARER", "OAUTHBEARER by kproxy", "SCRAM")
    assert all(name.startswith("kcat") and way in of_kcat for name, way in failed), failed
    print((tmp_path / "page.md").read_text())


@pytest.mark.ring2
def test_what_a_release_lacks_is_told_by_a_run_without_kproxy(cluster: brokers.Brokers, tmp_path: Path) -> None:
    """A share group wants `share.version`, which this cluster does not turn on."""
    (client,) = (one for one in clients.CLIENTS if one.mode == "share")
    (outcome,) = cases.run_release(cluster, [cases.Case(client, cluster.release, ways.WAYS[0])], tmp_path, jobs=1)
    assert outcome.state == "cannot" and "nsupported" in outcome.reason


def outcomes(*reasons: str) -> Iterator[cases.Outcome]:
    case = cases.Case(clients.CLIENTS[0], brokers.RELEASES[0], ways.WAYS[4])
    for reason in reasons:
        yield cases.Outcome(case, "fails" if reason else "works", reason)


@pytest.mark.parametrize(
    "directs,state",
    [
        pytest.param([""], "fails", id="works without kproxy"),
        pytest.param(["UnsupportedVersionException: The version of API is not supported."], "cannot", id="version"),
        pytest.param(["[33] Unsupported SASL Mechanism: the broker does not support"], "cannot", id="mechanism"),
        pytest.param(["CorruptRecordException", "CorruptRecordException"], "cannot", id="twice"),
        pytest.param(["kafka: client has run out of available brokers to talk to", ""], "fails", id="once"),
        pytest.param(["nothing happened for 180 s"], "open", id="hangs"),
        pytest.param(["CorruptRecordException", "context deadline exceeded"], "open", id="then out of time"),
        pytest.param(["TimeoutException: Topic t not present in metadata after 30000 ms."], "open", id="Java"),
        pytest.param(["RuntimeError: 10 records not acknowledged, []"], "open", id="librdkafka"),
        pytest.param(["IllegalStateException: 14 records after 45 s"], "open", id="Java, of its records"),
        pytest.param(["KafkaTimeoutError: Unable to bootstrap from 127.0.3.1:21161"], "open", id="kafka-python"),
    ],
)
def test_a_case_cannot_exist_only_if_that_is_certain(directs: list[str], state: str) -> None:
    runs = outcomes(*directs)
    (failed,) = outcomes("ConnectionError: reset")
    found = cases.judged(failed, lambda: next(runs))
    assert found.state == state and next(runs, None) is None
    assert found.reason == (failed.reason if state == "fails" else directs[-1])


def test_an_open_case_is_tried_by_the_next_run(tmp_path: Path) -> None:
    (failed,) = outcomes("nothing happened for 180 s")
    results = cases.Results(tmp_path / "results")
    results.add(cases.judged(failed, lambda: failed))
    assert cases.Results(tmp_path / "results").of(failed.case) is None
    results.add(failed)
    assert cases.Results(tmp_path / "results").of(failed.case) == failed


SENT = records(1, ("none", "gzip"), headers=True, text=False)


def received(sent: list[dict[str, object]]) -> list[dict[str, object]]:
    """What a client without fault writes."""
    places = dict.fromkeys(range(3), 0)
    lines = []
    for number, record in enumerate(sent):
        partition = int(str(record["partition"]))
        lines.append({**record, "part": 1 if number < 10 else 2, "offset": places[partition]})
        places[partition] += 1
    return lines


def judge(lines: list[dict[str, object]], *, ordered: bool = True) -> str | None:
    return fault(SENT, lines, ordered=ordered, dense=ordered)


def test_a_client_without_fault_is_found_so() -> None:
    assert judge(received(SENT)) is None
    assert judge([*reversed(received(SENT))], ordered=False) is None


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda lines: lines[:-1], id="lost"),
        pytest.param(lambda lines: [*lines, lines[-1]], id="doubled"),
        pytest.param(lambda lines: [*lines[:-6], lines[-3], *lines[-5:-3], lines[-6], *lines[-2:]], id="order"),
        pytest.param(lambda lines: [{**lines[0], "value": "00"}, *lines[1:]], id="value"),
        pytest.param(lambda lines: [{**lines[0], "key": ""}, *lines[1:]], id="key"),
        pytest.param(lambda lines: [*lines[:1], {**lines[1], "headers": []}, *lines[2:]], id="headers"),
        pytest.param(lambda lines: [{**line, "part": 1} for line in lines], id="nothing resumed"),
        pytest.param(lambda lines: [{**lines[0], "offset": 7}, *lines[1:]], id="offset"),
    ],
)
def test_each_kind_of_fault_is_seen(spoil) -> None:  # type: ignore[no-untyped-def]
    assert judge(spoil(received(SENT))) is not None
