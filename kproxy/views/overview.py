"""An overview of tables: a heading and a small table for each section, and commands for further questions; or JSON."""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import click

from kproxy.analysis.verdict import Verdict
from kproxy.views import answers, summary, units, verdict
from kproxy.views.terminal import printable
from kproxy.wording import counted

_HEADINGS = {
    "brokers": "Brokers",
    "clients": "Clients",
    "apis": "Requests of clients",
    "topics": "Topics",
    "errors": "Errors",
    "throttles": "Throttled",
    "slowest": "Slowest, expected waits left out",
    "groups": "Groups",
    "coordinators": "Groups that no coordinator served for a while",
    "leaders": "Leaders and replicas that changed",
    "zookeeper": "ZooKeeper",
    "quality": "What the captures show",
}
_NONE = {"errors": "No errors.", "throttles": "No client was throttled.", "slowest": "Nothing took longer than 100 ms."}

WIDTH = 120  # of the verdict, without a terminal

Rows = list[dict[str, Any]]


def show(
    frames: Mapping[str, Any],
    found: Mapping[str, tuple[Rows, int]],
    conclusion: Verdict,
    most_findings: int,
    commands: Sequence[str],
    shown: str,
    file: TextIO,
    is_checked: bool = True,
    why_nothing: str = "",
) -> None:
    """Print the verdict, then sections. frames: the frame of each section. found: (rows, number of rows shown) of each.

    most_findings: number of findings shown; the verdict has the number of all. is_checked: findings were looked for.
    why_nothing: why there is no exchange, in sentences.
    """
    rows = {name: some for name, (some, _) in found.items()}
    findings = conclusion.findings[:most_findings]
    lost = summary.lacking({row["kind"]: row["count"] or 0 for row in rows["quality"]})
    apis, events = [row["api"] for row in rows["apis"]], verdict.timeline(conclusion)
    if shown == "json":
        limited_rows = {name: rows[name][:most] for name, (_, most) in found.items()}
        lists: dict[str, Any] = {"timeline": [{"time": at, "event": event} for at, event in events]}
        lists["more_events"] = verdict.more_events(conclusion)
        lists |= {"not_found": conclusion.not_found(apis)} if is_checked else {}
        first = {"verdict": verdict.as_dict(conclusion) | lists | {"incomplete": lost}}
        rest = {"findings": [one.as_dict() for one in findings], "next": list(commands)}
        print(json.dumps({**first, **limited_rows, **rest}), file=file)
        return
    (span,) = rows["span"]
    if not span["exchanges"]:
        for line in answers.wrapped(f"No exchanges. {why_nothing}".rstrip(), file):
            click.echo(line, file=file)
    else:
        for line in _wrapped(verdict.sentence(conclusion), file):
            click.echo(click.style(line, bold=True), file=file)
        for name, figure, of in verdict.figures(conclusion):
            for line in answers.wrapped(f"  {name:13}{figure}{f': {of}' if of else ''}", file, 15):
                click.echo(line, file=file)
        click.echo("", file=file)
        for line in answers.wrapped(_span(span), file):
            click.echo(line, file=file)
        if lost:
            for line in answers.wrapped(f"The capture is incomplete: {'; '.join(lost)}.", file):
                click.echo(line, file=file)
    if findings:
        head = f"{click.style('What stands out', bold=True)} ({verdict.counted(conclusion, len(findings))})"
        click.echo(f"\n{head}", file=file)
        for one in findings:
            more = f", and {one.more:,} more" if one.more else ""
            for line in answers.wrapped(f"{one.severity:8}  {one.title}: {printable(one.where)}{more}", file, 10):
                click.echo(line, file=file)
    if is_checked and span["exchanges"] and (checked := verdict.not_found(conclusion, apis)):
        click.echo("", file=file)
        for line in _wrapped(checked, file):
            click.echo(line, file=file)
    if len(events) > 1:
        click.echo(f"\n{click.style('Timeline, UTC', bold=True)}", file=file)
        for at, event in events:
            for line in answers.wrapped(f"{at}  {event}", file, 23):
                click.echo(line, file=file)
        if left := verdict.more_events(conclusion):
            asks = next((f": {command}" for command in commands if " findings " in command), "")
            click.echo(f"and {left:,} more{asks}", file=file)
    for name, heading in _HEADINGS.items():
        frame, most = frames[name], found[name][1]
        if not rows[name]:
            if name in _NONE and span["exchanges"]:
                click.echo(f"\n{_NONE[name]}", file=file)
            continue
        click.echo(f"\n{click.style(heading, bold=True)}", file=file)
        for line in answers.lines_of(frame, rows[name][:most], file):
            click.echo(line, file=file)
        if len(rows[name]) > most:
            click.echo("...", file=file)
    if commands:
        click.echo("\n".join(["", click.style("Ask next", bold=True), *commands]), file=file)


def brief(found: Mapping[str, tuple[Rows, int]]) -> list[str]:
    """Return an overview in some ten lines; empty without exchanges. found: (rows, rows shown) of each section."""
    rows = {name: rows[:most] for name, (rows, most) in found.items()}
    (span,) = rows["span"]
    if not span["exchanges"]:
        return []

    def line(name: str, title: str, text: Callable[[dict[str, Any]], str], join: str = ", ") -> list[str]:
        if not rows[name]:
            return []
        more = " and more" if len(found[name][0]) > found[name][1] else ""
        texts = (answers.cropped(text(row), _WIDEST) for row in rows[name])
        return [f"{title:10}{printable(join.join(texts))}{more}"]

    return [
        _span(span),
        *line("brokers", "brokers", _broker),
        *line("clients", "clients", lambda row: _named(row["client"], row["software"])),
        *line("topics", "topics", _topic),
        *_apis(rows["apis"]),
        *line(
            "errors",
            "errors",
            lambda row: f"{row['api']}: {answers.text('error', row['error'])} ×{row['exchanges']:,}",
            "; ",
        ),
        *line("throttles", "throttled", _throttle),
        *line("groups", "groups", _group, "; "),
        *line("leaders", "leaders", _leader, "; "),
        *(f"{'slowest':10}{printable(_slowest(row))}" for row in rows["slowest"]),
    ]


_WIDEST = 120  # cells of one client, topic or group: a client id may have 32 kB
_NO_TIME = "1970-01-01 00:00:00.000"  # the time of packets without time stamps


def _wrapped(text: str, file: TextIO) -> list[str]:
    """Return a paragraph in lines, in a pipe too."""
    return textwrap.wrap(text, answers.width_of(file) or WIDTH, break_on_hyphens=False)


def _span(span: Mapping[str, Any]) -> str:
    first, last = (str(span[name]).replace("T", " ").removesuffix("Z")[:23] for name in ("first", "last"))
    when = f"{first} to {last} UTC, {units.duration(span['lasted_ns'])}"
    if last == _NO_TIME:
        when = "At times that are not known"
    return (
        f"{when}: {counted(span['exchanges'], 'exchange')}, {units.size(span['bytes'])}, "
        f"{counted(span['connections'], 'connection')}, {counted(span['sources'], 'source')}"
    )


def _named(name: Any, more: Any) -> str:
    return f"{name} ({more})" if more else str(name)


def _broker(row: Mapping[str, Any]) -> str:
    return row["broker"] if row["broker_id"] is None else f"broker {row['broker_id']} at {row['listeners']}"


def _topic(row: Mapping[str, Any]) -> str:
    sizes = [f"{units.size(row[f'{what}_bytes'])} {what}" for what in ("written", "read") if row[f"{what}_bytes"]]
    return _named(row["topic"], ", ".join(sizes))


def _throttle(row: Mapping[str, Any]) -> str:
    return f"{row['client']} {row['api']} ×{row['throttled']:,}, {units.duration(row['throttle_ms'] * 1e6)} in all"


def _group(row: Mapping[str, Any]) -> str:
    worst = f", worst cause {row['worst_cause']}" if row["worst_cause"] else ""
    return f"{row['group_id']}: {counted(row['rebalances'], 'rebalance')}{worst}"


def _leader(row: Mapping[str, Any]) -> str:
    changes = [f"{row[what]:,} {what}" for what in ("elections", "shrunk", "grown", "moved", "offline") if row[what]]
    return _named(row["topic"], ", ".join(changes))


def _slowest(row: Mapping[str, Any]) -> str:
    more = f" (the longest of {row['exchanges']:,})" if row["exchanges"] > 1 else ""
    client = answers.cropped(str(row["client"]), _WIDEST)
    return f"{units.duration(row['total_ns'])}, {row['api']} of {client}{more}: {row['explanation']}"


def _apis(rows: Rows) -> list[str]:
    """Return the lines of requests by API: counts, errors and latencies."""
    cells = [["", "exchanges", "errors", "unanswered", "p50", "p99", "max"]]
    for row in rows:
        times = (units.duration(row[name]) if row[name] is not None else "" for name in ("p50_ns", "p99_ns", "max_ns"))
        failed = (f"{row[name]:,}" if row[name] else "" for name in ("errors", "unanswered"))
        cells.append([str(row["api"]), f"{row['exchanges']:,}", *failed, *times])
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["requests"]
    for first, *rest in cells:
        figures = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([f"  {first:{widths[0]}}", *figures]))
    return lines
