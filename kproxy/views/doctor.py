"""Output of `kproxy doctor` as text, within 80 columns."""

from collections.abc import Iterator
from textwrap import wrap

from kproxy.checks.findings import Finding, Report
from kproxy.views.terminal import printable

WIDTH = 80


def lines(report: Report, *, verbose: bool = False) -> Iterator[str]:
    """Yield the lines of a report, the most severe findings first, each with its evidence and its fix."""
    for finding in report.by_level():
        yield from _finding(finding)
        yield ""
    if verbose:
        for mark, some in (("ok", report.passed), ("skipped", report.skipped)):
            for one in some:
                yield from _wrapped(f"{mark}: ", f"{one.check}: {one.subject}: {one.text}")
        yield ""
    yield _summary(report)


def _finding(finding: Finding) -> Iterator[str]:
    yield from _wrapped(f"{finding.level}: ", f"{finding.check}: {finding.subject}")
    yield from _wrapped("  ", finding.found)
    yield from _wrapped("  fix: ", finding.fix)


def _wrapped(mark: str, text: str) -> list[str]:
    rest = " " * (len(mark) if len(mark) < 9 else 2)
    return wrap(printable(text), WIDTH, initial_indent=mark, subsequent_indent=rest, break_long_words=False)


def _summary(report: Report) -> str:
    counts = {level: sum(one.level == level for one in report.findings) for level in ("error", "warning", "note")}
    found = ", ".join(f"{count} {level}{'s' * (count > 1)}" for level, count in counts.items() if count)
    return f"{found or 'nothing found'}; {len(report.passed)} checks passed, {len(report.skipped)} skipped"
