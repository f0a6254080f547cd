"""Findings and the verdict over them, which both need the lags of groups: computed once."""

from collections.abc import Mapping

from kproxy.analysis.engine import Frame, kept
from kproxy.analysis.findings import TABLES as OF_FINDINGS
from kproxy.analysis.findings import findings
from kproxy.analysis.findings.consuming import GROUP_LAGS
from kproxy.analysis.findings.finding import Finding
from kproxy.analysis.verdict import TABLES as OF_VERDICT
from kproxy.analysis.verdict import Verdict, lags_of, verdict

TABLES = tuple(dict.fromkeys((*OF_FINDINGS, *OF_VERDICT)))


def conclusions(tables: Mapping[str, Frame], *, finds: bool = True) -> tuple[list[Finding], Verdict]:
    """Return (findings over TABLES, the verdict). finds: False: the verdict's figures alone, without findings."""
    with kept(lags_of(tables)) as lags:
        found = findings(tables, known={GROUP_LAGS: lags}) if finds else []
        return found, verdict(tables, found, lags)
