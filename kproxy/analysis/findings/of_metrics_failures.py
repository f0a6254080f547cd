"""Failures in the metrics' cells of a running kproxy: requests refused, unanswered, brokers out of reach.

Duty: the counts of one cluster at one moment, and the findings from their increments since another. Cells name no
client: the place of a failure is an API or a broker, and durations are unknown. Refuses to know HTTP and processes.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kproxy.analysis.findings import failures
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import NOTE, WARNING, Finding, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import LONG_POLLS
from kproxy.metrics.counters.cells import ClusterCells
from kproxy.protocol.error_codes import error_name

Counts = dict[str, int]
Key = TypeVar("Key", bound=Hashable)
# Why a TLS handshake failed, by the result that is counted.
_REASONS = {
    "plaintext": "no TLS but Kafka in clear",
    "http": "no TLS but HTTP",
    "timeout": "not done in time",
    "version": "no version, cipher or key type in common",
    "server_name": "a server name (SNI) that this listener does not have",
    "no_certificate": "no client certificate",
    "certificate": "a certificate that kproxy does not accept",
    "principal": "a certificate without a principal",
    "rejected": "an alert: kproxy's certificate is not accepted",
    "name": "a certificate of another name",
    "other": "another fault, which kproxy's log names",
}
_LOST = ("unreachable", "broker_reset", "broker_closed")  # causes of disconnects that indicate a broker's failure


@dataclass
class Failed:
    """Failures of one cluster since kproxy began."""

    errors: dict[tuple[str, str], int] = field(default_factory=dict)  # by API and kind of finding
    names: dict[tuple[str, str], set[str]] = field(default_factory=dict)  # names of errors, by the same
    unanswered: Counts = field(default_factory=dict)  # by API
    logins: dict[tuple[str, str], int] = field(default_factory=dict)  # clients' logins, by mechanism and outcome
    handshakes: dict[tuple[str, str], int] = field(default_factory=dict)  # TLS handshakes, by side and result
    lost: dict[tuple[str, str], int] = field(default_factory=dict)  # connections by broker and cause
    offline: int = 0  # partitions, now
    shrunk: int = 0


def counted_failures(cells: ClusterCells) -> Failed:
    """A copy of the counters of failures."""
    of = Failed()
    for name, broker in list(cells.brokers.items()):
        for (_, cause), count in broker.disconnects.copy().items():
            if cause in _LOST:
                of.lost[name, cause] = of.lost.get((name, cause), 0) + count
        for (api, _), each in list(broker.apis.items()):
            for code, count in each.errors.copy().items():
                error = error_name(code)
                kind = failures.KIND_OF.get(error)
                if kind is not None:
                    of.errors[api, kind] = of.errors.get((api, kind), 0) + count
                    of.names.setdefault((api, kind), set()).add(error)
    for (api, cause), count in cells.unanswered.copy().items():
        if cause == "gap":  # packets are missing: nobody knows whether there was an answer
            continue
        of.unanswered[api] = of.unanswered.get(api, 0) + count
    for (side, mechanism, outcome), count in cells.authentications.copy().items():
        if side == "client":
            of.logins[mechanism, outcome] = of.logins.get((mechanism, outcome), 0) + count
    for side, of_tls in cells.tls.copy().items():
        of.handshakes |= {(side, result): count for result, count in of_tls.results.copy().items()}
    insight = cells.insight() if cells.insight is not None else None
    if insight is not None:
        of.offline, of.shrunk = insight.offline, insight.shrunk
    return of


def gained(now: int, then: int) -> int:
    """What a counter grew by; one that fell began anew at 0 in between: a cluster was removed, and added again."""
    return now - then if now >= then else now


def gained_each(now: Mapping[Key, int], then: Mapping[Key, int]) -> dict[Key, int]:
    """The same of each that there is now."""
    return {name: gained(count, then.get(name, 0)) for name, count in now.items()}


def found_since(
    cluster: str, then: Failed, now: Failed, requests: Mapping[str, int], limits: Limits, times: tuple[int, int]
) -> Iterator[Finding]:
    """The failures between two moments. requests: by API, in between."""
    yield from _refused(cluster, then, now, requests, limits, times)
    yield from _unanswered(cluster, then, now, requests, limits, times)
    yield from _logins(cluster, then, now, limits, times)
    yield from _handshakes(cluster, then, now, limits, times)
    for broker in sorted({name for name, _ in now.lost}):
        count = gained(now.lost.get((broker, "unreachable"), 0), then.lost.get((broker, "unreachable"), 0))
        if count >= limits.unanswered_min and broker != "bootstrap":
            evidence = {"unreachable": count}
            place = {"broker": broker, "broker_id": int(broker) if broker.isdecimal() else None}
            felt = severity(limits, failed=count)
            yield found("broker_gone", felt, count / 1e4, cluster, f"broker {broker}", place, times, evidence)
    for kind, count in (("offline_partitions", now.offline), ("under_replicated", now.shrunk)):
        if count:
            felt = severity(limits, failed=count, asked=count) if kind == "offline_partitions" else WARNING
            yield found(kind, felt, count / 1e3, cluster, "the cluster", {}, times, {"partitions": count})


def _refused(
    cluster: str, then: Failed, now: Failed, requests: Mapping[str, int], limits: Limits, times: tuple[int, int]
) -> Iterator[Finding]:
    for (api, kind), failed in sorted(gained_each(now.errors, then.errors).items()):
        if failed >= limits.refused_min:
            asked = max(requests.get(api, 0), failed)  # an answer may have several errors
            names = ", ".join(sorted(now.names[api, kind]))
            row = failures.Refused(cluster, None, api, kind, failed, asked, names, 0, None, None, None, None, *times)
            yield from failures.judge_refused(row, limits)


def _unanswered(
    cluster: str, then: Failed, now: Failed, requests: Mapping[str, int], limits: Limits, times: tuple[int, int]
) -> Iterator[Finding]:
    """Findings about connections that brokers ended: a client that ends its own may leave a long poll behind."""
    counts = {
        api: count for api, count in gained_each(now.unanswered, then.unanswered).items() if api not in LONG_POLLS
    }
    failed = sum(counts.values())
    if failed >= limits.unanswered_min:
        asked = sum(count for api, count in requests.items() if api not in LONG_POLLS) + failed
        apis = ", ".join(sorted(api for api, count in counts.items() if count))
        evidence = {"failed": failed, "asked": asked, "apis": apis}
        felt = severity(limits, failed=failed, asked=asked)
        yield found("unanswered", felt, failed / 1e4, cluster, "all clients", {}, times, evidence)


def _logins(cluster: str, then: Failed, now: Failed, limits: Limits, times: tuple[int, int]) -> Iterator[Finding]:
    """Findings about clients that kproxy itself authenticates."""
    logins = gained_each(now.logins, then.logins)
    for mechanism in sorted({name for name, _ in logins}):
        counts = {outcome: count for (name, outcome), count in logins.items() if name == mechanism}
        failed = {
            outcome: count for outcome, count in counts.items() if count and outcome not in ("success", "renewed")
        }
        if sum(failed.values()) >= limits.refused_min:
            evidence = {
                "failed": sum(failed.values()),
                "asked": sum(counts.values()),
                "api": f"{mechanism} logins at kproxy",
                "errors": ", ".join(sorted(failed)),
            }
            felt = severity(limits, failed=evidence["failed"], asked=evidence["asked"])  # type: ignore[arg-type]
            yield found("login_failed", felt, 0.01, cluster, f"kproxy, {mechanism}", {}, times, evidence)


def _handshakes(cluster: str, then: Failed, now: Failed, limits: Limits, times: tuple[int, int]) -> Iterator[Finding]:
    """Findings about TLS with clients and with brokers. Closes by clients do not count: health checks close, too."""
    handshakes = gained_each(now.handshakes, then.handshakes)
    for side, where in (("client", "TLS of clients with kproxy"), ("broker", "TLS of kproxy with brokers")):
        counts = {
            result: count
            for (of, result), count in handshakes.items()
            if of == side and (result != "closed" or side == "broker")
        }
        failed = {result: count for result, count in counts.items() if count and result != "ok"}
        count, asked = sum(failed.values()), sum(counts.values())
        if failed and count >= limits.tls_failed_min:
            most = max(failed, key=lambda result: (failed[result], result))
            reason = _REASONS.get(most, "closed by the peer")
            is_rare = count < limits.unanswered_min and count < asked
            felt = NOTE if is_rare else severity(limits, failed=count, asked=asked)
            evidence = {"failed": count, "asked": asked, "reason": reason, "reasons": len(failed)}
            yield found("tls_failed", felt, count / 1e4, cluster, where, {}, times, evidence)
