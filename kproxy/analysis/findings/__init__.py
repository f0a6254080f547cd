"""Findings in a capture, in tables or in a running kproxy: ranked, with evidence, reasons, and settings to change.

    from kproxy.analysis.duck import Tables
    from kproxy.analysis.findings import findings
    with Tables("tables") as tables:
        for found in findings(tables):
            print(found.severity, found.kind, found.where, dict(found.evidence))

Duty: ask every probe its question, judge the rows, fold consequences into their cause (`causes`), take those of
one matter together (`together`), and rank.
Refuses to know engines, and how findings look (`views.findings`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType

from kproxy.analysis.engine import Frame, first_rows, kept, rows
from kproxy.analysis.findings.absences import PROBES as ABSENCES
from kproxy.analysis.findings.balance import PROBES as BALANCE
from kproxy.analysis.findings.causes import folded
from kproxy.analysis.findings.clients import PROBES as CLIENTS
from kproxy.analysis.findings.compression import measured
from kproxy.analysis.findings.connects import PROBES as CONNECTS
from kproxy.analysis.findings.consuming import PROBES as CONSUMING
from kproxy.analysis.findings.deletions import PROBES as DELETIONS
from kproxy.analysis.findings.failures import PROBES as FAILURES
from kproxy.analysis.findings.finding import SEVERITIES, Finding, Moment, Probe, ranked
from kproxy.analysis.findings.followers import PROBES as FOLLOWERS
from kproxy.analysis.findings.given_up import PROBES as GIVEN_UP
from kproxy.analysis.findings.groups import PROBES as GROUPS
from kproxy.analysis.findings.kinds import KINDS, Kind
from kproxy.analysis.findings.leaders import PROBES as LEADERS
from kproxy.analysis.findings.losses import PROBES as LOSSES
from kproxy.analysis.findings.network import PROBES as NETWORK
from kproxy.analysis.findings.outages import PROBES as OUTAGES
from kproxy.analysis.findings.producing import PROBES as PRODUCING
from kproxy.analysis.findings.redundancy import PROBES as REDUNDANCY
from kproxy.analysis.findings.sessions import PROBES as SESSIONS
from kproxy.analysis.findings.silences import PROBES as SILENCES
from kproxy.analysis.findings.standstills import PROBES as STANDSTILLS
from kproxy.analysis.findings.thresholds import THRESHOLDS, Limits, Threshold, limits
from kproxy.analysis.findings.together import together
from kproxy.analysis.findings.transactions import PROBES as TRANSACTIONS
from kproxy.errors import KproxyError

__all__ = ["KINDS", "PROBES", "SEVERITIES", "TABLES", "THRESHOLDS", "Finding", "Kind", "Limits", "Probe", "Threshold"]
__all__ += ["findings", "limits"]

MAX_ROWS = 1000  # per question, those with the most weight first: bounds the rows to judge

PROBES: tuple[Probe, ...] = (
    *OUTAGES,
    *ABSENCES,
    *SILENCES,
    *FOLLOWERS,
    *REDUNDANCY,
    *CONNECTS,
    *FAILURES,
    *DELETIONS,
    *PRODUCING,
    *LOSSES,
    *GIVEN_UP,
    *STANDSTILLS,
    *CONSUMING,
    *CLIENTS,
    *BALANCE,
    *LEADERS,
    *GROUPS,
    *SESSIONS,
    *TRANSACTIONS,
    *NETWORK,
)
TABLES = tuple(dict.fromkeys(name for probe in PROBES for name in probe.tables))


def findings(
    tables: Mapping[str, Frame],
    given: Limits | None = None,
    kinds: Sequence[str] | None = None,
    known: Mapping[str, Frame] = MappingProxyType({}),
) -> list[Finding]:
    """The findings in these tables, the most severe first; `given`: thresholds; `kinds`: only these kinds.

    known: frames of `Probe.shared` by name that are computed already.

    The tables are frames of one engine, by name; TABLES are required, `records` is optional: some of its whole values
    are compressed, to find out whether compression pays.
    """
    chosen = limits() if given is None else given
    found: list[tuple[Finding, Sequence[Moment]]] = []
    with ExitStack() as stack:
        shared = dict(known)
        for probe in PROBES:
            if kinds is not None and not set(kinds) & set(probe.kinds):
                continue
            read = {name: tables[name] for name in probe.tables}
            for name, make in probe.shared.items():
                if name not in shared:
                    shared[name] = stack.enter_context(kept(make(read)))
                read[name] = shared[name]
            for values in rows(first_rows(probe.ask(read, chosen), MAX_ROWS)):
                row = probe.row(*values)
                moments = () if probe.moments is None else probe.moments(row)
                found += ((one, moments) for one in probe.judge(row, chosen))
    if any(one.kind == "no_compression" for one, _ in found) and (records := records_of(tables)) is not None:
        found = [(one, moments) for each, moments in found for one in _compressed(each, records, chosen)]
    alone = folded([each for each in found if kinds is None or each[0].kind in kinds])
    return ranked(together(alone), chosen)


def records_of(tables: Mapping[str, Frame]) -> Frame | None:
    """The table of records, if there is one: it is made only on request."""
    with suppress(KproxyError, KeyError):
        return tables["records"]
    return None


def _compressed(one: Finding, records: Frame, limits: Limits) -> Iterator[Finding]:
    """The finding, with its ratio, if compression pays by the records at hand."""
    topic = dict(one.place).get("topic")
    ratio = measured(records, topic) if one.kind == "no_compression" and topic is not None else None
    if ratio is None:
        yield one
    elif ratio >= limits.compression_ratio:
        yield one._replace(evidence=(*one.evidence, ("measured_ratio", ratio)))
