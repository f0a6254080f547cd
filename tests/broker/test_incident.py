"""An incident before three real brokers, with a log of the real events:
the conclusions that kproxy must and must not draw.

One run provokes most kinds of failures with real clients; in its first part all clients work as they should.
"""

import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import TABLES, Finding, findings
from kproxy.analysis.question import chosen_by_time
from kproxy.analysis.verdict import TABLES as OF_VERDICT
from kproxy.analysis.verdict import Verdict, verdict
from kproxy.convert.processes import convert
from kproxy.views.verdict import sentence
from tests.incident.run import Plan, events, run

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("tcpdump") is None or os.geteuid() != 0, reason="capturing needs root"),
]
PLAN = Plan(calm_s=12, down_s=10, still_s=6, stopped_s=0, between_s=6, rate=60)
# Findings that a well-behaved client must not get; a busy machine's slow responses are not its fault.
FAILURES = {
    *("broker_gone", "coordinator_lost", "offline_partitions", "under_replicated", "controller_changes"),
    *("unanswered", "client_timeouts", "no_leader", "not_enough_replicas", "refused_authorization", "login_failed"),
    *("refused_too_large", "unknown_topic", "fenced", "refused_records", "reconnect_storm", "doubtful_records"),
    *("resent_not_idempotent", "timed_out", "growing_lag", "open_transaction", "stuck_stable_offset", "throttled"),
}


class Seen(NamedTuple):
    found: list[Finding]
    calm: list[Finding]
    verdict: Verdict
    times: dict[str, int]

    def every(self) -> Iterator[tuple[Finding, Finding]]:
        """Each finding with the one that it is folded into, or with itself."""
        for root in self.found:
            for one in (root, *root.consequences):
                yield one, root

    def of(self, kind: str, **place: Any) -> list[Finding]:
        return [one for one, _ in self.every() if one.kind == kind and place.items() <= dict(one.place).items()]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder: Path = tmp_path_factory.mktemp("incident")
    capture = run(folder, PLAN)
    convert([capture], folder / "tables")
    times = events(folder)
    since, until = (
        datetime.fromtimestamp(times[what] / 1e9, UTC).isoformat() for what in ("calm begins", "ill clients begin")
    )
    with Tables(folder / "tables") as tables:
        found = findings(tables)
        names = dict.fromkeys((*TABLES, *OF_VERDICT))
        calm = findings({name: chosen_by_time(name, tables, since, until) for name in names})
        return Seen(found, calm, verdict(tables, found), times)


def test_clients_that_work_raise_no_failure(seen: Seen) -> None:
    told = {one.kind for root in seen.calm for one in (root, *root.consequences)}
    assert not told & FAILURES


def test_brokers_that_stopped_or_froze_are_named_with_their_times(seen: Seen) -> None:
    (gone,) = [
        one for one in seen.of("broker_gone", broker_id=2) if dict(one.evidence)["silent_ns"] > PLAN.down_s * 1e9
    ]
    assert abs(gone.since_ns - seen.times["broker 2 killed (SIGKILL)"]) < 2e9  # type: ignore[operator]
    assert gone.until_ns <= seen.times["broker 2 is back"] + 30e9  # type: ignore[operator]
    still = seen.of("broker_standing_still", broker_id=3)
    assert any(abs(one.since_ns - seen.times["broker 3 stands still (SIGSTOP)"]) < 2e9 for one in still)  # type: ignore[operator]
    assert not seen.of("broker_gone", broker_id=1)


def test_each_refused_client_is_named_with_its_refusal(seen: Seen) -> None:
    refused = {
        "login_failed": "mallory",
        "refused_authorization": "nosy",
        "refused_too_large": "bulky",
        "unknown_topic": "typo",
        "not_enough_replicas": "strict",
        "throttled": "greedy",
    }
    for kind, client in refused.items():
        assert {dict(one.place)["client"] for one in seen.of(kind)} == {client}, kind
    assert dict(seen.of("unknown_topic")[0].place)["topic"] == "ordres"
    assert dict(seen.of("refused_authorization")[0].place)["topic"] == "secret"
    (large,) = seen.of("refused_too_large")
    assert dict(large.evidence)["failed"] == dict(large.evidence)["asked"]


def test_consequences_of_a_broker_failure_are_no_findings_of_their_own(seen: Seen) -> None:
    (gone,) = [one for one in seen.found if one.kind == "broker_gone" and dict(one.place)["broker_id"] == 2]
    kinds = {one.kind for one in gone.consequences}
    assert {"offline_partitions", "not_enough_replicas"} <= kinds
    assert all(not one.change for root in seen.found for one in root.consequences)
    roots = {one.kind for one in seen.found}
    assert not roots & {"offline_partitions", "not_enough_replicas", "stuck_stable_offset"}
    (opened,) = [one for one in seen.found if one.kind == "open_transaction"]
    assert dict(opened.place)["topics"] == ["ledger"]
    assert "stuck_stable_offset" in {one.kind for one in opened.consequences}
    assert gone.severity == "critical" and gone.change


def test_retries_without_idempotence_may_have_doubled_records(seen: Seen) -> None:
    doubled = {
        dict(one.place)["client"] for kind in ("resent_not_idempotent", "doubtful_records") for one in seen.of(kind)
    }
    assert doubled and doubled <= {"pay-writer", "strict", "aio-writer"}


def test_the_verdict_names_the_cause_first(seen: Seen) -> None:
    verdict = sentence(seen.verdict)
    assert "roker 2 was gone for" in verdict and "requests failed" in verdict
    figures = seen.verdict.figures
    assert figures.unanswered > 0 and figures.refused > 20
    assert figures.longest_ns is not None and figures.longest_ns >= PLAN.down_s * 1e9
    assert seen.verdict.total == len(seen.found) + sum(one.more for one in seen.found)
