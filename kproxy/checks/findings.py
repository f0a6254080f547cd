"""The findings of `kproxy doctor`: plain data, which `views` formats.

A finding is about one subject and has the evidence and the fix. An error keeps clients from working, a warning may; a
note is for information. Refuses to know how anything is checked and how it is shown.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


class Finding(NamedTuple):
    level: Level
    check: str  # kind of check: "ports", "names", ...
    subject: str  # a cluster, an address, a file
    found: str  # the evidence
    fix: str


class Passed(NamedTuple):
    """A check that passed, or that was skipped, and why."""

    check: str
    subject: str
    text: str


class Report:
    """All results, in their order."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.passed: list[Passed] = []
        self.skipped: list[Passed] = []

    def error(self, check: str, subject: object, found: str, fix: str) -> None:
        self._add(Finding("error", check, str(subject), found, fix))

    def warn(self, check: str, subject: object, found: str, fix: str) -> None:
        self._add(Finding("warning", check, str(subject), found, fix))

    def note(self, check: str, subject: object, found: str, fix: str) -> None:
        self._add(Finding("note", check, str(subject), found, fix))

    def ok(self, check: str, subject: object, text: str) -> None:
        self.passed.append(Passed(check, str(subject), text))

    def skip(self, check: str, subject: object, why: str) -> None:
        self.skipped.append(Passed(check, str(subject), why))

    def _add(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    @property
    def is_sound(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def by_level(self) -> Iterator[Finding]:
        """The findings, the gravest first."""
        return iter(sorted(self.findings, key=lambda finding: LEVELS.index(finding.level)))

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.is_sound,
            "findings": [{**finding._asdict(), "mend": finding.fix} for finding in self.by_level()],  # mend: until 0.2
            "passed": [one._asdict() for one in self.passed],
            "skipped": [one._asdict() for one in self.skipped],
        }
