"""The severity of a finding by its effect on users: failed requests, standstills, records behind.

Duty: one rule for all findings, and its numbers from the thresholds. Refuses to know single kinds.
"""

from kproxy.analysis.findings.finding import CRITICAL, WARNING
from kproxy.analysis.findings.thresholds import Limits


def severity(
    limits: Limits,
    *,
    failed: int = 0,
    asked: int | None = None,
    stood_still_ns: int | None = None,
    behind_records: int | None = None,
    is_retried: bool = False,
) -> str:
    """The severity of an effect on users. asked: all requests, including the `failed` ones.

    is_retried: clients retry these by themselves, so that users do not feel the number alone.

    Critical: many requests failed, or most requests of a client; a standstill is longer than clients wait; readers are
    far behind.
    """
    share = failed / asked if asked else 0.0
    is_most = share >= limits.felt_failed_share and failed >= limits.felt_failed_few
    stood_s = (stood_still_ns or 0) / 1e9
    is_behind = (behind_records or 0) >= limits.felt_behind_records
    if (
        (failed >= limits.felt_failed and not is_retried)
        or is_most
        or stood_s >= limits.felt_stood_still_s
        or is_behind
    ):
        return CRITICAL
    return WARNING
