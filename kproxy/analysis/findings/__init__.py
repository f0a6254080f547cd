"""What stands out in a capture, in tables or in a running kproxy: ranked, with evidence, why, and what to change.

    from kproxy.analysis.duck import Tables
    from kproxy.analysis.findings.balance import PROBES as BALANCE
from kproxy.analysis.findings.clients import PROBES as CLIENTS
from kproxy.analysis.findings.consuming import PROBES as CONSUMING
from kproxy.analysis.findings.groups import PROBES as GROUPS
from kproxy.analysis.findings.network import PROBES as NETWORK
from kproxy.analysis.findings.producing import PROBES as PRODUCING
from kproxy.analysis.findings.transactions import PROBES as TRANSACTIONS
    with Tables("tables") as tables:
        for found in findings(tables):
            print(found.severity, found.kind, found.where, dict(found.evidence))

Duty: ask every probe its question, judge the rows, and rank what is found. Refuses to know engines, and how findings
look (`views.findings`).
"""

from collections.abc import Mapping, Sequence

from kproxy.analysis.engine import Frame, first_rows, rows
from kproxy.analysis.findings.balance import PROBES as BALANCE
from kproxy.analysis.findings.clients import PROBES as CLIENTS
from kproxy.analysis.findings.consuming import PROBES as CONSUMING
from kproxy.analysis.findings.finding import SEVERITIES, Finding, Probe, ranked
from kproxy.analysis.findings.groups import PROBES as GROUPS
from kproxy.analysis.findings.kinds import KINDS, Kind
from kproxy.analysis.findings.network import PROBES as NETWORK
from kproxy.analysis.findings.producing import PROBES as PRODUCING
from kproxy.analysis.findings.thresholds import THRESHOLDS, Limits, Threshold, limits
from kproxy.analysis.findings.transactions import PROBES as TRANSACTIONS
from kproxy.tables import schema

__all__ = ["KINDS", "PROBES", "SEVERITIES", "TABLES", "THRESHOLDS", "Finding", "Kind", "Limits", "Probe", "Threshold"]
__all__ += ["findings", "limits"]

MAX_ROWS = 1000  # of one question, those that weigh most first: bounds what is judged

PROBES: tuple[Probe, ...] = (
    *PRODUCING,
    *CONSUMING,
    *CLIENTS,
    *BALANCE,
    *GROUPS,
    *TRANSACTIONS,
    *NETWORK,
)
TABLES = tuple(name for name in schema.BY_NAME if any(name in probe.tables for probe in PROBES))


def findings(
    tables: Mapping[str, Frame], given: Limits | None = None, kinds: Sequence[str] | None = None
) -> list[Finding]:
    """What stands out in these tables, the gravest first; `given`: thresholds; `kinds`: only of these.

    The tables are frames of one engine, by name; those in TABLES are needed.
    """
    chosen = limits() if given is None else given
    found: list[Finding] = []
    for probe in PROBES:
        if kinds is not None and not set(kinds) & set(probe.kinds):
            continue
        answer = probe.ask({name: tables[name] for name in probe.tables}, chosen)
        for values in rows(first_rows(answer, MAX_ROWS)):
            found += probe.judge(probe.row(*values), chosen)
    return ranked([one for one in found if kinds is None or one.kind in kinds], chosen)
