"""Output of findings: a list with severity, title and place, then each with evidence, reason and fix; json, csv.

Duty: the only place that writes a finding's numbers in a sentence. Text from the wire cannot move the cursor.
"""

import csv
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, TextIO

import click
from rich.console import Console

from kproxy.analysis.findings import KINDS, THRESHOLDS, Finding, Kind, Threshold
from kproxy.analysis.findings.kinds import LARGEST, SUMMED
from kproxy.analysis.findings.together import merged
from kproxy.views import answers, units

NOTHING = "Nothing stands out."
PLACES = 3  # places shown of consequences of one kind; further places are counted
BEFORE_NS = 2_000_000_000
WIDTH = 80  # without a terminal
_COLOURS = {"critical": "red", "warning": "yellow", "note": "cyan"}


def value(name: str, number: Any) -> str:
    """Return a number of the evidence as text; the suffix of its name is the unit."""
    if isinstance(number, float):
        words = name.split("_")
        if words[-1] in ("ns", "ms") or "bytes" in words:
            return answers.text(name, round(number)) + ("/s" if name == "bytes_per_s" else "")
        if words[-1] == "share":
            return f"{number:.0%}" if number >= 0.0995 or not number else f"{number:.1%}"
        return units.number(number)
    if name.endswith("_ns") and isinstance(number, int) and number >= answers.MOMENT_NS:
        return f"{units.time(number, decimals=0)[11:]} UTC"
    if name == "times_even":
        return units.number(number)
    return answers.text(name, number)


def sentence(finding: Finding) -> str:
    """Return the finding with its main numbers, in one line."""
    evidence = dict(finding.evidence)
    words = [_least(evidence)]
    kind = KINDS[finding.kind]
    says = kind.says if "asked" in evidence else kind.says_part
    if "times" in evidence and kind.says_again is not None:
        says = kind.says_again
    has_all = all(name in evidence for _, name, _, _ in Formatter().parse(says) if name is not None)
    words.append(_filled(says if has_all or kind.says_live is None else kind.says_live, evidence))
    if evidence.get("of_connections_time_share"):
        words.append(f" ({value('time_share', evidence['of_connections_time_share'])} of their time)")
    if evidence.get("away_ns") is not None:
        words.append(
            f"; known to be away for {value('away_ns', evidence['away_ns'])}: no client asked for it afterwards"
        )
    if evidence.get("deleted_by"):
        words.append(f"; deleted by client {evidence['deleted_by']}")
    if evidence.get("unknown_partitions"):
        of = f"{evidence['unknown_partitions']} of its partitions"
        words.append(f" at least: it is not known of {of}, since {evidence['unknown']}")
    if evidence.get("numbers_of"):
        words.append(f" on {evidence['numbers_of']}; others are slow too")
    if evidence.get("happened"):
        words.append(f"; {evidence['happened']}")
    if evidence.get("last_told_ns"):
        last_change = value("last_told_ns", evidence["last_told_ns"])
        words.append(f", by the last change reported of them, at {last_change}: not known afterwards")
    if evidence.get("compared_partitions"):
        words.append(
            f" in {evidence['compared_partitions']} of its {evidence['partitions']} partitions, whose lag was "
        )
        words.append(f"known at both moments; in all {_count(evidence, 'last_lag_records')}")
    if evidence.get("unsent_ns"):
        words.append(_unsent(evidence))
    if evidence.get("left_ns"):
        left = f"its consumer left at {value('left_ns', evidence['left_ns'])}"
        words.append(f"; {left}: unread at the end: {_count(evidence, 'end_lag_records')}")
    if evidence.get("no_request_ns"):
        words.append(f"; no request of the group for {value('no_request_ns', evidence['no_request_ns'])}")
    return "".join(words)


def _count(evidence: Mapping[str, Any], name: str) -> str:
    """Return a number of records with its noun."""
    return f"{value(name, evidence[name])} {'record' if evidence[name] == 1 else 'records'}"


def _filled(says: str, evidence: Mapping[str, Any]) -> str:
    """Return a sentence of `kinds` with its numbers, and the words that agree with them."""
    words = []
    for text, name, spec, _ in Formatter().parse(says):
        words.append(text)
        if name is None:
            continue
        number = evidence.get(name)
        one, _, several = (spec or "").partition("|")
        noun = one if number == 1 else several or f"{one}s"
        if not several:
            words.append("unknown" if number is None else value(name, number))
            words.append(f" {noun}" if spec else "")
        else:
            words.append(noun)
    return "".join(words)


def _least(evidence: Mapping[str, Any]) -> str:
    return "at least " if evidence.get("at_least_records") else ""


def _unsent(evidence: Mapping[str, Any]) -> str:
    """Return the evidence of a producer's new epochs for records that it never sent."""
    epochs = evidence["new_epochs"]
    begun = "a new epoch" if epochs == 1 else f"{epochs:,} new epochs"
    text = f"; its producer began {begun}, and {value('unsent_ns', evidence['unsent_ns'])} have no records: "
    if evidence.get("about_records"):
        text += f"about {units.number(evidence['about_records'])} at its rate before, if it had as many to send, "
    else:
        text += "what it had to send then, possibly far more, "
    return f"{text}expired in its queue"


def where(finding: Finding, has_cluster: bool = True) -> str:
    """Return the place of a finding, preceded by its cluster, unless that is `default` or not wanted."""
    of = "" if finding.cluster in (None, "default") or not has_cluster else f"{finding.cluster}: "
    return answers.text("where", f"{of}{finding.where}")


def evidence(finding: Finding) -> str:
    """Return all numbers by name, like "batches 400, single share 100%"."""
    return ", ".join(f"{_bare(name)} {value(name, number)}" for name, number in finding.evidence)


_SAID = {"not_in_log_records": "records that are not in the log"}  # names of evidence that read badly in words


def _bare(name: str) -> str:
    for suffix in ("_ns", "_ms"):
        name = name.removesuffix(suffix)
    if name in _SAID:
        return _SAID[name]
    return name.replace("_", " ")


def since(finding: Finding) -> str:
    """Return the span of time of a finding in UTC; "" if it has none."""
    if finding.since_ns is None:
        return ""
    until = "" if finding.until_ns is None else f" to {units.time(finding.until_ns, decimals=0)[11:]}"
    return f"{units.time(finding.since_ns, decimals=0)}{until} UTC"


def dicts(found: Sequence[Finding]) -> Iterator[dict[str, Any]]:
    """Yield findings for other programs: all fields, plain numbers, and the sentence as `says`."""
    for finding in found:
        yield {**finding.as_dict(), "says": sentence(finding)}


def show(
    found: Sequence[Finding], shown: str, file: TextIO, width: int | None = None, limit: int | None = None
) -> None:
    """Print findings as "table", "json" (a line each) or "csv". limit: the largest number of findings to print."""
    chosen = found if limit is None else found[:limit]
    if shown == "json":
        for row in dicts(chosen):
            print(json.dumps(row), file=file)
    elif shown == "csv":
        writer = csv.writer(file, lineterminator="\n")
        names = ("severity", "kind", "cluster", "where", "says", "since", "until", "why", "change")
        writer.writerow(names)
        for one in chosen:
            times = ("" if at is None else f"{units.time(at, decimals=6).replace(' ', 'T')}Z" for at in one[5:7])
            writer.writerow(
                (one.severity, one.kind, one.cluster, one.where, sentence(one), *times, one.why, one.change)
            )
    else:
        for line in lines(chosen, width or WIDTH):
            click.echo(line, file=file)
        if len(chosen) < len(found):
            click.echo(f"{len(found) - len(chosen)} more: --limit shows them.", file=file)


def show_live(answer: Mapping[str, Any], file: TextIO) -> None:
    """Print an answer of /api/findings."""
    first, last = (units.time(answer[name], decimals=0) for name in ("from_ns", "to_ns"))
    click.echo(f"{first} to {last[11:]} UTC", file=file)
    width = Console().width if file.isatty() else WIDTH
    for line in lines([Finding.of(row) for row in answer["findings"]], width):
        click.echo(line, file=file)


def lines(found: Sequence[Finding], width: int) -> Iterator[str]:
    """Yield first a line or two per finding, then each finding with its evidence, its reason and the fix."""
    if not found:
        yield NOTHING
        return
    yield from brief(found, width)
    for number, finding in enumerate(found, 1):
        yield ""
        for line in _paragraph(f"{number}. ", f"{finding.title}: {where(finding)}", width):
            yield click.style(line, bold=True)
        details = [("Found", f"{sentence(finding)}."), ("Evidence", evidence(finding)), ("When", since(finding))]
        details += [("Why", finding.why), ("Change", finding.change)]
        if finding.job is not None:
            details.append(("See", f"kproxy analyze {finding.job}"))
        details += [("Follows", text) for text in followed(finding)]
        if finding.more:
            details.append(("More", f"{finding.more} further places of this kind"))
        for name, text in details:
            if text:
                yield from _paragraph(f"   {name + ':':<10}", text, width)


def brief(found: Sequence[Finding], width: int) -> Iterator[str]:
    """Yield a line or two for each finding: severity, title, place."""
    for number, finding in enumerate(found, 1):
        head = f"{number:>2} {finding.severity:<8} "
        text = f"{finding.title}: {where(finding)}; {sentence(finding)}"
        if finding.consequences:
            count = len(finding.consequences)
            text += f"; {count} more {'finding follows' if count == 1 else 'findings follow'} from it"
        first, *rest = _wrapped(text, width - len(head))
        yield click.style(f"{head}", fg=_COLOURS[finding.severity]) + first
        yield from (" " * len(head) + line for line in rest)


def followed(finding: Finding) -> Iterator[str]:
    """Yield the consequences of a finding, a line for each kind: times, places and numbers, the first first.

    Counts of several places are summed; with `says_each`, each place has its own numbers, the
    largest first.
    """
    of: dict[str, list[Finding]] = {}
    for one in sorted(finding.consequences, key=lambda one: one.since_ns or 0):
        of.setdefault(one.kind, []).append(one)
    for kind, several in of.items():
        placed: dict[str, list[Finding]] = {}
        for one in several:
            placed.setdefault(one.where, []).append(one)
        more = len(placed) - PLACES
        if len(placed) > 1 and KINDS[kind].says_each is not None:
            merged = sorted(map(_together, placed.values()), key=_size, reverse=True)
            shown = "; ".join(f"{one.where}: {_each(one)}" for one in merged[:PLACES])
            text = f"{shown}; and {more} more" if more > 0 else shown
        else:
            places = ", ".join([*placed][:PLACES])
            text = f"{places}{f' and {more} more' if more > 0 else ''}; {sentence(_together(several))}"
        yield answers.text("where", f"{_when(several, finding.since_ns)}{several[0].title}: {text}")


def _each(finding: Finding) -> str:
    """Return the text about one of several places."""
    evidence = dict(finding.evidence)
    text = _least(evidence) + _filled(KINDS[finding.kind].says_each or "", evidence)
    return f"{text}{_unsent(evidence)}" if evidence.get("unsent_ns") else text


def _size(finding: Finding) -> int:
    """Return the largest count or time of a finding, to compare places of one kind."""
    return max((number for name, number in finding.evidence if name in SUMMED | LARGEST and number), default=0)


def _when(several: Sequence[Finding], cause_ns: int | None) -> str:
    """Return the time of day from the first to the last of some findings, with a comma; "" if they have none.

    cause_ns: when their cause began. Another observer saw it up to BEFORE_NS late: nothing that follows is earlier.
    """
    times = [at for one in several for at in (one.since_ns, one.until_ns) if at is not None]
    if not times:
        return ""
    if cause_ns is not None:
        times = [cause_ns if cause_ns - BEFORE_NS < at < cause_ns else at for at in times]
    first, last = (units.time(at, decimals=0)[11:] for at in (min(times), max(times)))
    return f"{first}, " if first == last else f"{first} to {last}, "


def _together(several: Sequence[Finding]) -> Finding:
    return several[0]._replace(evidence=tuple(merged(several).items()))


def _paragraph(head: str, text: str, width: int) -> Iterator[str]:
    first, *rest = _wrapped(text, width - len(head))
    yield head + first
    yield from (" " * len(head) + line for line in rest)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(20, width), break_long_words=True, break_on_hyphens=False) or [""]


def kinds(known: Mapping[str, Kind], thresholds: Mapping[str, Threshold]) -> Iterator[str]:
    """Yield lines with all kinds, then all thresholds with their reasons."""
    yield click.style("Kinds", bold=True)
    for kind in known.values():
        live = " (also of a running kproxy)" if kind.is_live else ""
        yield f"  {kind.name}: {kind.title}{live}"
    yield ""
    yield click.style("Thresholds", bold=True)
    for threshold in thresholds.values():
        yield f"  {threshold.name} = {threshold.value:,g} {threshold.unit}"
        yield from textwrap.wrap(threshold.reason, WIDTH - 6, initial_indent="      ", subsequent_indent="      ")


def document() -> str:
    """Return the kinds and thresholds as Markdown, for docs/findings.md."""
    lines = ["\n## Kinds\n"]
    for kind in KINDS.values():
        lines += [
            f"### {kind.name}",
            f"\n{kind.title}{', live too' if kind.is_live else ''}.\n",
            f"- Evidence: {kind.evidence}.",
            f"- Why: {kind.why}",
            f"- Change: {kind.change}",
            f"- Settings: {', '.join(f'`{name}`' for name in kind.settings)}.",
        ]
        if kind.thresholds:
            lines.append(f"- Thresholds: {', '.join(f'`{name}`' for name in kind.thresholds)}.")
        if kind.job is not None:
            lines.append(f"- More: `kproxy analyze {kind.job}`.")
        lines.append("")
    lines += ["## Thresholds\n", "| name | default | unit | reason |", "|---|---|---|---|"]
    lines += [f"| `{one.name}` | {one.value:,.10g} | {one.unit} | {one.reason} |" for one in THRESHOLDS.values()]
    return "\n".join(lines) + "\n"
