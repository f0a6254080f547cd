"""A report about a capture or tables, as one HTML file that opens anywhere and makes no request.

Duty: the sections in their order, each with its plots and lists, the commands for the same figures, and the figures
themselves as JSON at the end (`figures`). Text from the wire is escaped, made printable and cut.

Bounds: `analysis.questions.figures` bounds the figures; names have at most LONGEST characters, lists a dozen or so
rows. `report_page` has the style of the page.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import kproxy
from kproxy.analysis.questions.figures import Figure, Figures
from kproxy.analysis.questions.parties import NO_ERRORS
from kproxy.views import answers, drawing, findings, plots, report_page, summary, units, verdict
from kproxy.wording import counted

LONGEST = 90  # characters of a name or a text in a list
LONGEST_TEXT = 600
COMMAND = 1200
POINTS = 60  # rows of a plot that are shown as a table

# The parts of an exchange's time, with their colours.
_PARTS = {
    "sending_ns": ("sent", plots.COLOURS[2]),
    "queue_ns": ("behind earlier requests", plots.COLOURS[4]),
    "throttle_ns": ("throttled or muted", plots.COLOURS[3]),
    "network_ns": ("network", plots.COLOURS[5]),
    "round_trip_ns": ("round trip", plots.AXIS),
    "long_poll_ns": ("expected wait", plots.REST),
    "broker_ns": ("broker", plots.COLOURS[0]),
    "receiving_ns": ("sent back", plots.COLOURS[1]),
    "delivery_ns": ("sent again", plots.LATE),
    "unanswered_ns": ("no answer", plots.TEXT),
}
_SENTENCES = ("explanation", "sentence", "reason", "software", "this", "the_other")
_BESIDE = "Beside the other"
_NUMBERS = (int, float)


@dataclass
class Report:
    """The input of a report. places: captures or the folder of tables, as the user named them. options: of captures.

    before: by (connection, number) of a slow exchange, the rows of earlier requests on its connection.
    """

    figures: Figures
    places: Sequence[str]
    options: Sequence[str] = ()
    is_capture: bool = False
    other: str | None = None
    before: Mapping[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda what: None


def html(report: Report) -> str:
    """Return the HTML file as text. Raises the errors of vl-convert for a plot that it cannot draw."""
    title = f"kproxy report: {plots.short(', '.join(Path(place).name or place for place in report.places), 120)}"
    sections = [(name, head, text) for name, head, text in _sections(report) if text]
    contents = "".join(f'<a href="#{name}">{escape(head)}</a>' for name, head, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{escape(head)}</h2>{text}</section>' for name, head, text in sections)
    header = f"<h1>{escape(title)}</h1>{_verdict(report)}{_span(report)}{_losses(report)}"
    footer = (
        f'<p class="note">kproxy {escape(kproxy.__version__)}. All times are UTC. Requests that brokers send each '
        "other are left out, but in the counts of brokers. The figures of the plots are at the end of this file, as "
        "JSON (<code>id=&quot;figures&quot;</code>).</p>"
    )
    return report_page.page(title, header, contents, body, footer, _data(report.figures))


def _sections(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield (name, heading, HTML) of each section; a section without content has an empty text."""
    yield "findings", "Findings", _findings(report)
    yield "compared", "Compared", _compared(report)
    yield "latency", "Latency and requests", _latency(report)
    yield "slowest", "Slowest exchanges", _slowest(report)
    yield "load", "Load", _load(report)
    yield "errors", "Errors and throttles", _errors(report)
    yield "topics", "Topics and consumers", _topics(report)
    yield "groups", "Groups and leaders", _groups(report)
    yield "network", "Network", _network(report)
    yield "who", "Brokers and clients", _who(report)
    yield "quality", "What the capture shows", _quality(report)


# --- head of the page ------------------------------------------------------------------------------------------------


def _span(report: Report) -> str:
    (span,) = answers.dicts(report.figures.sections["span"][0])
    first, last = (str(span[name]).replace("T", " ").removesuffix("Z")[:23] for name in ("first", "last"))
    counts = ", ".join(counted(span[f"{what}s"], what) for what in ("exchange", "connection", "cluster"))
    text = f"{first} to {last} UTC, {units.duration(span['lasted_ns'])}: {counts}, {units.size(span['bytes'])}"
    return f'<p class="faint">{escape(text)}</p>'


def _verdict(report: Report) -> str:
    """Return the verdict: a sentence, and four figures."""
    conclusion = report.figures.verdict
    if conclusion is None:
        return ""
    tiles = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(figure)}</b>"
        f"<small><bdi>{escape(_cut(of, LONGEST_TEXT))}</bdi></small></div>"
        for name, figure, of in verdict.figures(conclusion)
    )
    text = escape(_cut(verdict.sentence(conclusion), COMMAND))
    return f'<p class="verdict"><bdi>{text}</bdi></p><div class="tiles">{tiles}</div>'


def _losses(report: Report) -> str:
    counts: dict[str, int] = {}
    for row in report.figures["quality"].to_pylist():
        counts[row["kind"]] = counts.get(row["kind"], 0) + (row["count"] or 0)
    lost = summary.lacking(counts)
    if not lost:
        return ""
    text = f"The capture is incomplete: {'; '.join(lost)}. {summary.MAYBE_ANSWERED}"
    return f'<p class="warn">{escape(text)} <a href="#quality">More</a></p>'


# --- sections --------------------------------------------------------------------------------------------------------


def _findings(report: Report) -> str:
    """Return the findings, the most severe first: evidence, reason, fix, and the command for details."""
    cards = []
    for one in report.figures.findings:
        details = [("Why", one.why), ("Change", one.change), ("Evidence", findings.evidence(one))]
        details += [("When", findings.since(one))] if one.since_ns is not None else []
        details += [("More", f"{one.more} further places of this kind")] if one.more else []
        details += [("Follows", text) for text in findings.followed(one)]
        lines = "".join(
            f"<dt>{name}</dt><dd><bdi>{escape(_cut(text, LONGEST_TEXT))}</bdi></dd>" for name, text in details
        )
        job = shlex.join(["kproxy", "analyze", one.job, *report.places, *report.options]) if one.job else ""
        cards.append(
            f'<figure class="card {escape(one.severity)}"><div><span class="level">{escape(one.severity)}</span> '
            f"<b>{escape(one.title)}</b>: {_name(findings.where(one))}</div>"
            f"<p>{escape(_cut(findings.sentence(one), LONGEST_TEXT))}.</p>"
            f"<dl>{lines}</dl>{f'<pre>{escape(job)}</pre>' if job else ''}</figure>"
        )
    conclusion = report.figures.verdict
    count = (
        f'<p class="note">{escape(verdict.counted(conclusion, conclusion.total))}</p>'
        if conclusion is not None and cards
        else ""
    )
    found = f'{count}<div class="figures">{"".join(cards)}</div>' if cards else f"<p>{findings.NOTHING}</p>"
    return found + _findings_of_both(report)


def _findings_of_both(report: Report) -> str:
    """Return the comparison with the findings of another dataset: only in this one, only in the other, in both."""
    if report.other is None:
        return ""
    sides = [
        {(one.kind, one.where): one for one in side}
        for side in (report.figures.findings, report.figures.other_findings)
    ]
    lines = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        ours, theirs = (side.get(key) for side in sides)
        one = ours or theirs
        assert one is not None
        found_in = "in both" if ours and theirs else "only here" if ours else "only in the other"
        lines.append({"finding": one.title, "where": findings.where(one), "found": found_in})
        lines[-1] |= {
            "this": findings.sentence(ours) if ours else "",
            "the_other": findings.sentence(theirs) if theirs else "",
        }
    shown = ("found", "finding", "where", "this", "the_other")
    note = (
        '<p class="note">A finding that only one of them has may be true of both: a capture that begins after a fault '
        "lacks what shows it. Compare the figures, too.</p>"
    )
    return f"<h3>{_BESIDE}</h3>{note + _table(lines, shown) if lines else f'<p>{findings.NOTHING}</p>'}"


def _latency(report: Report) -> str:
    figures = report.figures
    parts = []
    groups = (
        ("at_once", "", "From the last byte of a request to the first of its answer."),
        (
            "waiting",
            "Long polls",
            "A Fetch waits for data as long as its client allows (fetch.max.wait.ms), JoinGroup and SyncGroup for the "
            "other members of the group. These waits are expected.",
        ),
    )
    for name, head, text in groups:
        if f"spread_{name}" not in figures.by_name:
            continue
        over_time, spread = figures[f"latency_{name}_over_time"], figures[f"spread_{name}"]
        drawn: list[str] = []
        if name == "at_once":
            first = [
                _drawn(report, f"latency_{name}_over_time", "99th percentile by API", plots.latencies, over_time),
                _drawn(report, "talkers", "Requests", plots.requests),
            ]
            parts.append(_grid(first))
        rows = figures[f"latency_{name}"].to_pylist()
        shown = {row["api"] for row in over_time.to_pylist()}
        for api in sorted((row for row in rows if row["api"] in shown), key=lambda row: -row["exchanges"]):
            mine = [[row for row in table.to_pylist() if row["api"] == api["api"]] for table in (spread, over_time)]
            drawn.append(_drawn(report, f"spread_{name}", f"{api['api']}: spread", plots.heat_map, mine[0]))
            drawn.append(
                _drawn(report, f"latency_{name}_over_time", f"{api['api']}: percentiles", plots.percentiles, mine[1])
            )
        parts.append(f'{f"<h3>{head}</h3>" if head else ""}<p class="note">{text}</p>{_grid(drawn)}')
        parts.append(_list(report, f"latency_{name}", ("api", "exchanges", "p50_ns", "p90_ns", "p99_ns", "max_ns")))
    return "".join(parts)


def _slowest(report: Report) -> str:
    rows = report.figures["slow"].to_pylist()
    if not rows:
        return "<p>Nothing took longer than 100 ms, expected waits left out.</p>"
    keys = "".join(f"<span>{_square(colour)}{escape(text)}</span>" for text, colour in _PARTS.values())
    cards = "".join(_card(report, row) for row in rows)
    return f'<div class="keys">{keys}</div><div class="figures">{cards}</div>{_again(report, "slow")}'


def _card(report: Report, row: dict[str, Any]) -> str:
    total = max(row["total_ns"], 1)
    at, bars = 0.0, []
    for name, (text, colour) in _PARTS.items():
        share = max(row[name] or 0, 0) / total
        if share > 0:
            label = escape(f"{text}: {units.duration(row[name])}, {share:.0%}")
            place = f'x="{at * 1000:.1f}" width="{share * 1000:.1f}" height="12"'
            bars.append(f'<rect role="img" {place} fill="{colour}" aria-label="{label}"/>')
        at += share
    run = (
        f" ({row['exchanges']:,} in a row, {units.duration(row['all_total_ns'])} in all)"
        if row["exchanges"] > 1
        else ""
    )
    head = f"; before it: {_cut(row['head'], LONGEST_TEXT)}" if row["head"] else ""
    parts = ", ".join(f"{text} {units.duration(row[name])}" for name, (text, _) in _PARTS.items() if row[name])
    before = report.before.get((row["connection"], row["number"]), [])
    earlier = [each for each in before if each["number"] != row["number"]]
    names = ("number", "time", "api", "total_ns", "queue_ns", "muted_ns", "outcome", "in_flight")
    stood = (
        f"<details><summary>Before it on the connection</summary>{_table(earlier, names)}</details>" if earlier else ""
    )
    show = f"<pre>{escape(_show(report, row))}</pre>" if "live:" not in str(row["source"]) else ""
    return (
        f'<figure class="card"><div><b>{units.duration(row["total_ns"])} {escape(str(row["api"]))}</b> of '
        f"{_name(row['client'])} at {_name(row['broker'])}, {_when(row['time'])}{run}</div>"
        f'<svg class="parts" viewBox="0 0 1000 12" preserveAspectRatio="none" role="group"'
        f' aria-label="{escape(parts)}">'
        f"{''.join(bars)}</svg><p>{escape(_cut(row['explanation'], LONGEST_TEXT) + head)}</p>"
        f'<p class="note">{escape(parts)}</p>{stood}{show}</figure>'
    )


def _show(report: Report, row: dict[str, Any]) -> str:
    """Return the command that shows an exchange; if the report is about tables, from their capture."""
    captures = list(report.places) if report.is_capture else [str(row["source"])]
    key = ["--connection", str(row["connection"]), "--number", str(row["number"])]
    return shlex.join(["kproxy", "show", *captures, *key, *report.options])


def _load(report: Report) -> str:
    figures = report.figures
    drawn = [
        _drawn(report, "talkers", "Bytes, both ways", plots.traffic),
    ]
    if figures["batch_sizes"].num_rows:
        drawn.append(_drawn(report, "batch_sizes", "Records in a batch of a producer", plots.batch_sizes, timed=False))
    columns = ("client", "topic", "codec", "batches", "records", "bytes_per_record", "ratio", "single_share")
    head = "Batches of producers, by client and topic"
    lists = _list(report, "batching", (*columns, "records_p50", "bytes_p50"), head)
    return _grid(drawn) + lists + _beside(report, "batching", head)


def _errors(report: Report) -> str:
    figures = report.figures
    drawn = []
    if any(row["error"] not in NO_ERRORS for row in figures["errors"].to_pylist()):
        drawn.append(_drawn(report, "errors_over_time", "Errors", plots.errors))
    if "throttle_over_time" in figures.by_name:
        drawn.append(_drawn(report, "throttle_over_time", "Throttled clients", plots.throttles))
    columns = ("client", "exchanges", "throttled", "share", "throttle_ms", "max_throttle_ms")
    errors = ("api", "error", "exchanges", "codes", "clients", "brokers", "first", "last", "last_client")
    lists = _list(report, "errors", errors) + _list(report, "throttle", columns, "Throttled clients")
    both = _beside(report, "errors", "Errors") + _beside(report, "throttle", "Throttled clients")
    return _grid(drawn) + (lists or "<p>No errors, and no client was throttled.</p>") + both


def _topics(report: Report) -> str:
    figures = report.figures
    drawn = []
    if figures["skew"].num_rows:
        drawn.append(_drawn(report, "skew", "Partitions above an even share", plots.skew, timed=False))
    if "behind_over_time" in figures.by_name:
        drawn.append(_drawn(report, "behind_over_time", "Lag by fetches", plots.lag))
    lag = (
        *("group_id", "topic", "partition", "committed_offset", "end_offset", "lag_records", "fetch_lag_records"),
        *("growth_per_s", "catch_up_ns", "behind_ns", "commits", "last_commit"),
    )
    lists = _section(report, "topics", "Topics") + _list(report, "group_lag", lag, "Lag of groups, by their commits")
    return _grid(drawn) + lists + _beside(report, "topics", "Topics") + _beside(report, "group_lag", "Lag of groups")


def _groups(report: Report) -> str:
    figures = report.figures
    drawn = []
    if figures["rebalances"].num_rows:
        drawn.append(_drawn(report, "rebalances", "Rebalances", plots.rebalances, every=False))
    if figures["leader_changes"].num_rows:
        drawn.append(_drawn(report, "leader_changes", "Leaders and in-sync replicas", plots.leader_changes))
    heads = {
        "groups": "Groups",
        "coordinators": "Groups that no coordinator served for a while",
        "leaders": "Leaders and replicas that changed",
        "zookeeper": "ZooKeeper",
    }
    lists = "".join(_section(report, name, head) for name, head in heads.items())
    return _grid(drawn) + lists + _beside(report, "groups", "Groups") + _beside(report, "leaders", heads["leaders"])


def _network(report: Report) -> str:
    figures = report.figures
    rows = figures["connections"].to_pylist()
    drawn = []
    if any(row["retransmissions"] for row in figures["retransmissions"].to_pylist()):
        drawn.append(_drawn(report, "retransmissions", "Retransmissions", plots.retransmissions))
    if any(row["round_trip_p50_ns"] is not None for row in rows):
        drawn.append(_drawn(report, "connections", "Round trips of handshakes", plots.round_trips, timed=False))
    if any(row["zero_windows"] for row in rows):
        drawn.append(_drawn(report, "connections", "Closed windows", plots.closed_windows, timed=False))
    columns = ("broker", "connections", "per_minute", "round_trip_p50_ns", "round_trip_p99_ns", "retransmissions")
    more = ("out_of_order", "zero_windows", "resets", "unused", "gap_bytes")
    lists = _list(report, "connections", (*columns, *more))
    return _grid(drawn) + lists + _beside(report, "connections", "Connections, by broker")


def _who(report: Report) -> str:
    return (
        _section(report, "brokers", "Brokers")
        + _section(report, "clients", "Clients")
        + _section(report, "apis", "Requests")
        + _beside(report, "brokers", "Brokers")
        + _beside(report, "clients", "Clients")
    )


def _quality(report: Report) -> str:
    rows = report.figures["quality"].to_pylist()
    return _table(rows, ("source", "count", "bytes", "sentence")) + _beside(report, "quality", "All captures")


def _compared(report: Report) -> str:
    if "compare" not in report.figures.by_name:
        return ""
    rows = report.figures["compare"].to_pylist()
    what = (
        f"<p>This: {_name(', '.join(report.places))}. The other: {_name(report.other)}. In each cell "
        "this one's figure stands above, the other's below in grey; a change is this one's figure divided by the "
        f"other's: above 1, this one is slower. {answers.lengths(rows, ('The other', 'this'))} The other sections end "
        "with what both have; single exchanges and plots over time have no counterpart.</p>"
    )
    drawn = []
    if any(row["p99_ns"] and row["b_p99_ns"] for row in rows):
        drawn.append(
            _drawn(
                report,
                "compare",
                "99th percentile of both",
                partial(plots.compared, names=("the other", "this")),
                timed=False,
            )
        )
    numbers = [name.removeprefix("b_") for name in rows[0] if name.startswith("b_")] if rows else []
    columns = [name for name in (rows[0] if rows else ()) if not name.startswith("b_")]
    both = [
        (
            {**row, **{name: row[f"b_{name}"] for name in numbers}} if row["b_exchanges"] else None,
            row if row["exchanges"] else None,
        )
        for row in rows
    ]
    return what + _grid(drawn) + (_stacked(columns, numbers, both) + _again(report, "compare") if both else "")


# --- pieces ----------------------------------------------------------------------------------------------------------


def _drawn(
    report: Report, name: str, title: str, plot: Any, rows: Any = None, timed: bool = True, every: bool = True
) -> str:
    """Return a plot of a figure, or of the given rows of it, as HTML."""
    figures = report.figures
    report.progress(title)
    how: list[Any] = [figures.every] if timed and every else []
    if timed:
        how.append((figures.first_us, figures.last_us))
    shown = figures[name] if rows is None else rows
    chart = plot(shown, *how)
    return (
        f'<figure data-figure="{name}"><figcaption><b>{escape(title)}</b></figcaption>{drawing.svg(chart, title)}'
        f"{_as_table(shown)}{_again(report, name)}</figure>"
    )


def _as_table(plotted: Any) -> str:
    """Return the rows of a plot, the first POINTS of them, folded."""
    rows = plotted if isinstance(plotted, list) else plotted.to_pylist()
    if not rows:
        return ""
    more = counted(len(rows) - POINTS, "more row")
    left = f'<p class="note">and {more}</p>' if len(rows) > POINTS else ""
    table = _table(rows[:POINTS], list(rows[0]))
    return f"<details><summary>Show as table</summary>{table}{left}</details>"


def _grid(drawn: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(drawn)}</div>' if drawn else ""


def _again(report: Report, name: str) -> str:
    command = _command(report, report.figures.by_name[name])
    return f"<details><summary>The same figures</summary><pre>{escape(command)}</pre></details>" if command else ""


def _command(report: Report, figure: Figure) -> str:
    places, options = report.places, report.options
    if figure.question.job.name == "compare":
        if len(places) > 1:
            return ""  # one dataset is compared with one
        places, options = [str(report.other)], [*options, "--with", *places]
    found = figure.command(places, options)
    return found if len(found) <= COMMAND else ""


def _list(report: Report, name: str, columns: Sequence[str], head: str = "") -> str:
    rows = report.figures[name].to_pylist()
    if not rows:
        return ""
    return f"{f'<h3>{escape(head)}</h3>' if head else ''}{_table(rows, columns)}{_again(report, name)}"


def _beside(report: Report, name: str, head: str) -> str:
    """Return rows of this and of another dataset; numbers of the other are below, in grey, "-" if a row is missing."""
    both = report.figures.beside.get(name)
    if both is None or not both.pairs:
        return ""
    numbers = [
        each for each in both.numbers if any(row and row[each] is not None for pair in both.pairs for row in pair)
    ]
    return f"<h3>{_BESIDE}: {escape(head)}</h3>{_stacked([*both.keys, *numbers], numbers, both.pairs)}"


_Pair = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]


def _stacked(columns: Sequence[str], stacked: Sequence[str], pairs: Sequence[_Pair]) -> str:
    """Return a table of pairs of rows; in `stacked` columns the other's number is below in grey, "-" if missing."""
    numbers = {
        each
        for each in columns
        if each in stacked or any(isinstance(row[each], _NUMBERS) for pair in pairs for row in pair if row)
    }
    kinds = {each: "n" if each in numbers else "" for each in columns}
    head_row = "".join(f'<th class="{kinds[each]}">{escape(_heading(each))}</th>' for each in columns)
    lines = []
    for ours, theirs in pairs:
        one = ours or theirs or {}
        cells = []
        for each in columns:
            if each not in stacked:
                cells.append(_cell(each, one[each], kinds[each]))
                continue
            this, that = ("-" if row is None else answers.text(each, row[each]) for row in (ours, theirs))
            cells.append(f'<td class="n">{escape(this)}<br><span class="faint">{escape(that)}</span></td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    table = f"<table><thead><tr>{head_row}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _section(report: Report, name: str, head: str = "") -> str:
    """Return a section of the overview as a table."""
    frame, most = report.figures.sections[name]
    rows = list(answers.dicts(frame))
    if not rows:
        return ""
    more = '<p class="note">And more.</p>' if len(rows) > most else ""
    return f"{f'<h3>{escape(head)}</h3>' if head else ''}{_table(rows[:most], frame.columns)}{more}"


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return rows as a table, without columns that are empty in all rows, and without a cluster that all share."""
    shown = [name for name in columns if any(row[name] is not None for row in rows)]
    if len({row.get("cluster") for row in rows}) == 1:
        shown = [name for name in shown if name != "cluster"]
    numbers = {name for name in shown if all(isinstance(row[name], (*_NUMBERS, type(None))) for row in rows)}
    kinds = {name: "n" if name in numbers else "s" if name in _SENTENCES else "" for name in shown}
    head = "".join(f'<th class="{kinds[name]}">{escape(_heading(name))}</th>' for name in shown)
    lines = "".join(f"<tr>{''.join(_cell(name, row[name], kinds[name]) for name in shown)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _heading(name: str) -> str:
    for suffix in ("_ns", "_ms"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def _cell(name: str, value: Any, kind: str) -> str:
    if isinstance(value, datetime):
        return f'<td class="t">{_when(value)}</td>'
    text = answers.text(name, value)
    if isinstance(value, str):
        is_time = text.endswith("Z") and text[4:5] == "-" and "T" in text[:11]
        if is_time:
            return f'<td class="t">{escape(text.replace("T", " ").removesuffix("Z")[:23])}</td>'
        return f'<td class="{kind}"><bdi>{escape(_cut(text, LONGEST_TEXT if kind == "s" else LONGEST))}</bdi></td>'
    return f'<td class="{kind}">{escape(text)}</td>'


def _name(value: Any) -> str:
    return f"<bdi>{escape(plots.short(value, LONGEST))}</bdi>"


def _cut(text: Any, longest: int) -> str:
    return plots.short(text, longest) if text not in (None, "") else ""


def _when(time: datetime) -> str:
    return units.time(round(time.timestamp() * 1e6) * 1000)


def _square(colour: str) -> str:
    return f'<svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" fill="{colour}"/></svg>'


def _data(figures: Figures) -> str:
    """Return the figures as JSON that is safe in a script element; times are microseconds since the epoch."""

    def plain(value: Any) -> Any:
        if isinstance(value, datetime):
            return round(value.timestamp() * 1e6)
        return plots.short(value, LONGEST_TEXT) if isinstance(value, str) else value

    found = {}
    for name, figure in figures.by_name.items():
        columns = figure.rows.to_pydict()
        found[name] = {
            "columns": list(columns),
            "rows": [[plain(v) for v in row] for row in zip(*columns.values(), strict=True)],
        }
    text = json.dumps({"every": figures.every, "figures": found}, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
