"""Plots: the answer of a question -> a chart of Altair, for notebooks and for `kproxy report`.

    with Tables("tables") as tables:
        plots.heat_map(jobs.spread(tables["exchanges"], every="10 seconds").arrow(), "10 seconds")

Duty: charts with units on axes, times marked as UTC, names cut to the length of a label, and colours that colour-blind
people can distinguish (Okabe and Ito's). `every` is the step of time of the question: a step without a row is a gap in
a line. `span`: first and last moment in microseconds since the epoch, so that plots have the same axis; without it, the
span of the rows.

Bounds: SERIES lines or colours of a plot, and one for the counts of all others; in other plots the BARS largest.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import altair as alt

from kproxy.analysis.questions.parties import NO_ERRORS
from kproxy.analysis.questions.pieces import span_us
from kproxy.views import units
from kproxy.views.terminal import printable
from kproxy.wording import counted

WIDTH, HEIGHT = 440, 220  # pixels of a whole plot, including its labels
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LATE = "#882255"  # answers that were retransmitted
REST = "#8c8c8c"  # for names that are counted together
HEAT = ("#dbe9f6", "#bad6eb", "#89bedc", "#539ecd", "#2b7bba", "#0b559f")
TEXT, FAINT, GRID, AXIS = "#333333", "#666666", "#e3e3e3", "#999999"
SERIES = len(COLOURS)
BARS = 12
LONGEST = 34  # characters of a name in a plot

Row = dict[str, Any]
Span = tuple[int, int] | None
_PERCENTILES = ("p50", "p90", "p99", "max")
_DURATION = (
    "datum.value >= 1000 ? format(datum.value / 1000, '~g') + ' s' : datum.value >= 1 ? format(datum.value, '~g') + "
    "' ms' : format(datum.value * 1000, '~g') + ' µs'"
)


def rows_of(data: Any) -> list[Row]:
    """Return the rows of an Arrow table, a frame of either engine, a DataFrame of pandas, or a list of dicts."""
    if hasattr(data, "arrow"):
        data = data.arrow()
    elif hasattr(data, "toPandas"):
        data = data.toPandas()
    if hasattr(data, "to_pylist"):
        return list(data.to_pylist())
    return list(data.to_dict("records") if hasattr(data, "to_dict") else data)


def short(name: Any, longest: int = LONGEST) -> str:
    """Return a name for a plot: printable, without its middle if it is long."""
    text = printable(str(name)[: 4 * longest]) if name not in (None, "") else "(none)"
    if len(str(name)) <= longest and len(text) <= longest:
        return text
    tail = printable(str(name)[-longest // 3 :])[-(longest // 3) :]
    return f"{text[: longest - len(tail) - 1]}…{tail}"


# --- over time -------------------------------------------------------------------------------------------------------


def heat_map(data: Any, every: str, span: Span = None) -> alt.Chart:
    """Return a heat map of latencies over time, from `spread`: a darker cell has more exchanges."""
    rows = [row for row in rows_of(data) if row["time"] is not None]
    found: dict[tuple[float, int, int | None], int] = {}
    for row in rows:  # groups of the same time and latency class share a cell
        key = (_ms(row["time"]), row["from_ns"], row["to_ns"])
        found[key] = found.get(key, 0) + row["exchanges"]
    step = span_us(every) / 1000
    cells: list[Row] = [
        {
            "time": at,
            "until": at + step,
            "from": (from_ns or 5_000) / 1e6,
            "to": (to_ns or 2 * from_ns) / 1e6,
            "exchanges": count,
            "label": f"{_at(at)}: {count:,} of {_between(from_ns, to_ns)}",
        }
        for (at, from_ns, to_ns), count in found.items()
    ]
    bounds = _bounds(max((cell["exchanges"] for cell in cells), default=1))
    ends = [value for cell in cells for value in (cell["from"], cell["to"])]
    return (
        _chart(cells)
        .mark_rect()
        .encode(
            x=_time(rows, step, span),
            x2="until:T",
            y=_duration_axis("from:Q", ends, "latency", padded=False),
            y2="to:Q",
            color=alt.Color(
                "exchanges:Q",
                scale=alt.Scale(type="threshold", domain=bounds, range=list(HEAT[-len(bounds) - 1 :])),
                legend=_legend(f"exchanges per {_step(every)}"),
            ),
            **_label_channels(),
        )
    )


def percentiles(data: Any, every: str, span: Span = None) -> alt.LayerChart:
    """Return a chart of percentiles of the latency over time, from `latency` with a step of time."""
    rows = rows_of(data)
    values = [
        {
            "time": row["time"],
            "name": name,
            "value": row[f"{name}_ns"] / 1e6,
            "label": f"{_at(_ms(row['time']))}: {name} {units.duration(row[f'{name}_ns'])} of {row['exchanges']:,}",
        }
        for row in rows
        for name in _PERCENTILES
        if row.get(f"{name}_ns") is not None
    ]
    y = _duration_axis("value:Q", [value["value"] for value in values], "latency")
    return _lines(values, [name for name in _PERCENTILES if rows], y, every, span)


def latencies(data: Any, every: str, span: Span = None) -> alt.LayerChart:
    """Return a chart of the 99th percentile of each API, from `latency` by API with a step of time."""
    rows = rows_of(data)
    names = _largest(rows, "api", "exchanges")
    values = [
        {
            "time": row["time"],
            "name": short(row["api"]),
            "value": row["p99_ns"] / 1e6,
            "label": f"{_at(_ms(row['time']))}: {row['api']}, p99 {units.duration(row['p99_ns'])} "
            f"of {row['exchanges']:,}",
        }
        for row in rows
        if row["api"] in names and row["p99_ns"] is not None
    ]
    y = _duration_axis("value:Q", [value["value"] for value in values], "p99 of the latency")
    return _lines(values, [short(name) for name in names], y, every, span)


def requests(data: Any, every: str, span: Span = None) -> alt.Chart:
    """Return a chart of requests per second by API, from `talkers` by API with a step of time."""
    seconds = span_us(every) / 1e6
    return _stacked(
        data,
        "api",
        lambda row: row["exchanges"] / seconds,
        lambda value: f"{units.number(value)}/s",
        "requests per second",
        every,
        span,
    )


def traffic(data: Any, every: str, span: Span = None) -> alt.Chart:
    """Return a chart of bytes per second by API, both directions, from `talkers` by API with a step of time."""
    seconds = span_us(every) / 1e6
    return _stacked(
        data, "api", lambda row: row["bytes"] / seconds, units.rate, "bytes per second", every, span, format="~s"
    )


def errors(data: Any, every: str, span: Span = None) -> alt.Chart:
    """Return a chart of errors by API and error, from `errors` with a step of time; without requests in flight."""
    rows = [row for row in rows_of(data) if row["error"] not in NO_ERRORS]
    for row in rows:
        row["what"] = f"{row['api']} {row['error']}"
    return _stacked(
        rows,
        "what",
        lambda row: row["exchanges"],
        lambda value: f"{value:,.0f}",
        f"errors per {_step(every)}",
        every,
        span,
    )


def throttles(data: Any, every: str, span: Span = None) -> alt.Chart:
    """Return a chart of throttled time by client, from `throttle` by client with a step of time."""
    return _stacked(
        data,
        "client",
        lambda row: row["throttle_ms"] / 1000,
        lambda value: units.duration(value * 1e9),
        f"seconds of throttle per {_step(every)}",
        every,
        span,
    )


def lag(data: Any, every: str, span: Span = None) -> alt.LayerChart:
    """Return a chart of the lag of clients in records by topic, from `behind` with a step of time."""
    rows = [row for row in rows_of(data) if row["lag_records"] is not None]
    for row in rows:
        row["what"] = f"{short(row['client'], 24)}, {short(row['topic'], 24)}"
    names = _largest(rows, "what", "lag_records")
    values = [
        {
            "time": row["time"],
            "name": row["what"],
            "value": row["lag_records"],
            "label": f"{_at(_ms(row['time']))}: {row['what']}: {counted(row['lag_records'], 'record')} behind",
        }
        for row in rows
        if row["what"] in names
    ]
    y = alt.Y("value:Q", axis=alt.Axis(title="records behind, worst partition", format="~s", tickCount=5))
    return _lines(values, names, y, every, span)


def leader_changes(data: Any, every: str, span: Span = None) -> alt.Chart:
    """Return a chart of changes of leaders and in-sync replicas by kind, from `leader-changes` with a step of time."""
    return _stacked(
        data,
        "change",
        lambda row: row["changes"],
        lambda value: f"{value:,.0f}",
        f"changes per {_step(every)}",
        every,
        span,
    )


def retransmissions(data: Any, every: str, span: Span = None) -> alt.Chart:
    """Return a chart of retransmitted segments by broker, from `retransmissions` with a step of time."""
    return _stacked(
        [row for row in rows_of(data) if row["retransmissions"]],
        "broker",
        lambda row: row["retransmissions"],
        lambda value: f"{value:,.0f}",
        f"segments sent again per {_step(every)}",
        every,
        span,
    )


def rebalances(data: Any, span: Span = None) -> alt.LayerChart:
    """Return a chart with a bar for each rebalance (group, duration, cause), from `rebalances`."""
    rows = [row for row in rows_of(data) if row["time"] is not None]
    for row in rows:
        row["lasted_ns"] = row["took_ns"] or 0
    names = _largest(rows, "group_id", "lasted_ns", BARS)
    causes = _largest([{**row, "one": 1} for row in rows], "cause", "one")
    bars = [
        {
            "time": _ms(row["time"]),
            "until": _ms(row["time"]) + row["lasted_ns"] / 1e6,
            "group": short(row["group_id"], 20),
            "cause": row["cause"] if row["cause"] in causes else "others",
            "label": f"{_at(_ms(row['time']))}: {short(row['group_id'])}, generation {row['generation']}: "
            f"{row['cause']}, {units.duration(row['lasted_ns'])}, "
            f"{row['members_before']} to {row['members_after']} members",
        }
        for row in rows
        if row["group_id"] in names
    ]
    last = max((bar["until"] for bar in bars), default=0.0)
    x = _time(rows, 1, (span[0], max(span[1], int(last * 1000))) if span else None)
    y = alt.Y("group:N", sort=[short(name, 20) for name in names], axis=alt.Axis(title=None, labelLimit=140))
    colour = _colour("cause:N", causes, any(bar["cause"] == "others" for bar in bars))
    base = _chart(bars).encode(x=x, y=y, color=colour, **_label_channels())
    return (base.mark_bar(height=10).encode(x2="until:T") + base.mark_tick(size=16, thickness=2, opacity=1)).properties(
        width=WIDTH, height=_height(len(names), 40)
    )


# --- at once ---------------------------------------------------------------------------------------------------------


def skew(data: Any) -> alt.LayerChart:
    """Return a chart of partitions furthest above an even share, from `skew`: bytes, and a mark at the even share."""
    bars = []
    for row in rows_of(data)[:BARS]:
        even = row["bytes"] / row["times_even"] if row["times_even"] else 0
        what = f"{short(row['topic'], 22)}-{row['partition']} {row['api']}"
        label = f"{what}: {units.size(row['bytes'])}, {row['times_even'] or 0:.2f} times an even share of "
        bars.append({"what": what, "bytes": row["bytes"], "even": even, "label": f"{label}{units.size(even)}"})
    y = alt.Y("what:N", sort=None, axis=alt.Axis(title=None, labelLimit=190))
    x = alt.X("bytes:Q", axis=alt.Axis(title="bytes (mark: an even share)", format="~s", tickCount=4))
    base = _chart(bars).encode(y=y, **_label_channels())
    return (
        base.mark_bar(color=COLOURS[0], height=11).encode(x=x)
        + base.mark_tick(color=COLOURS[1], thickness=3, size=15, opacity=1).encode(x="even:Q")
    ).properties(width=WIDTH, height=_height(len(bars)))


def batch_sizes(data: Any) -> alt.Chart:
    """Return a histogram of batches by number of records and codec, from `batch-sizes`."""
    rows = rows_of(data)
    codecs = sorted({str(row["codec"]) for row in rows})[:SERIES]
    total = sum(row["batches"] for row in rows) or 1
    values: list[Row] = []
    order: list[str] = []
    reached: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: (row["from_records"] is None, row["from_records"] or 0)):
        name = _class(row["from_records"], row["to_records"])
        order.append(name)
        low = reached.get(name, 0)
        reached[name] = low + row["batches"]
        label = f"{row['batches']:,} batches of {name} records, {row['codec']}: {row['batches'] / total:.1%} of all"
        values.append({"records": name, "codec": str(row["codec"]), "low": low, "high": reached[name], "label": label})
    return (
        _chart(values)
        .mark_bar()
        .encode(
            x=alt.X(
                "records:O",
                sort=list(dict.fromkeys(order)),
                axis=alt.Axis(title="records in a batch", labelAngle=0, labelOverlap=True),
            ),
            y=alt.Y("low:Q", axis=alt.Axis(title="batches", format="~s", tickCount=5)),
            y2="high:Q",
            color=_colour("codec:N", codecs, False),
            **_label_channels(),
        )
    )


def round_trips(data: Any) -> alt.LayerChart:
    """Return a chart of round-trip times of handshakes, median and p99, from `connections` by broker or host."""
    bars: list[Row] = []
    for row in rows_of(data):
        if row["round_trip_p50_ns"] is None or len(bars) == BARS:
            continue
        name = short(" ".join(str(row[each]) for each in ("host", "broker") if each in row), 28)
        low, high = row["round_trip_p50_ns"], row["round_trip_p99_ns"]
        connections = counted(row["connections"], "connection")
        label = f"{name}: median {units.duration(low)}, p99 {units.duration(high)}, {connections}"
        bars.append({"broker": name, "low": max(low, 1) / 1e6, "high": max(high, 1) / 1e6, "label": label})
    y = alt.Y("broker:N", sort=None, axis=alt.Axis(title=None, labelLimit=170))
    ends = [value for bar in bars for value in (bar["low"], bar["high"])]
    scale, values = _log(ends)
    x = alt.X(
        "low:Q", scale=scale, axis=alt.Axis(title="round trip: median to p99", values=values, labelExpr=_DURATION)
    )
    base = _chart(bars).encode(y=y, x=x, **_label_channels())
    return (
        base.mark_rule(color=COLOURS[0], strokeWidth=3).encode(x2="high:Q")
        + base.mark_point(color=COLOURS[0], filled=True, size=50, opacity=1)
        + base.mark_tick(color=COLOURS[0], thickness=3, size=12, opacity=1).encode(x=alt.X("high:Q", scale=scale))
    ).properties(width=WIDTH, height=_height(len(bars)))


def closed_windows(data: Any) -> alt.Chart:
    """Return a chart of closed receive windows, from `connections` by broker or host."""
    bars: list[Row] = []
    for row in sorted(rows_of(data), key=lambda row: -(row["zero_windows"] or 0))[:BARS]:
        if row["zero_windows"]:
            name = short(" ".join(str(row[each]) for each in ("host", "broker") if each in row), 28)
            times, connections = counted(row["zero_windows"], "time"), counted(row["connections"], "connection")
            label = f"{name}: closed {times}, {connections}"
            bars.append({"broker": name, "times": row["zero_windows"], "label": label})
    y = alt.Y("broker:N", sort=None, axis=alt.Axis(title=None, labelLimit=170))
    x = alt.X("times:Q", axis=alt.Axis(title="times that a receiver closed its window", format="~s", tickCount=4))
    return (
        _chart(bars)
        .mark_bar(color=COLOURS[1], height=11)
        .encode(x=x, y=y, **_label_channels())
        .properties(width=WIDTH, height=_height(len(bars)))
    )


def compared(data: Any, names: tuple[str, str] = ("this", "the other")) -> alt.LayerChart:
    """Return a chart of the 99th percentile of each API in two captures, from `compare`."""
    rows = [row for row in rows_of(data) if row["p99_ns"] and row["b_p99_ns"]]
    rows = sorted(rows, key=lambda row: -(row["exchanges"] or 0))[:BARS]
    points = []
    for row in rows:
        label = f"{row['api']}: p99 {units.duration(row['p99_ns'])}, then {units.duration(row['b_p99_ns'])}"
        both = zip(names, (row["p99_ns"], row["b_p99_ns"]), strict=True)
        points += [
            {"api": row["api"], "name": name, "value": ns / 1e6, "to": row["b_p99_ns"] / 1e6, "label": label}
            for name, ns in both
        ]
    scale, values = _log([point["value"] for point in points])
    x = alt.X("value:Q", scale=scale, axis=alt.Axis(title="p99 of the latency", values=values, labelExpr=_DURATION))
    y = alt.Y("api:N", sort=None, axis=alt.Axis(title=None, labelLimit=150))
    base = _chart(points).encode(y=y, x=x, **_label_channels())
    return (
        base.mark_rule(color=REST, strokeWidth=2).encode(x2="to:Q")
        + base.mark_point(filled=True, size=70, opacity=1).encode(color=_colour("name:N", list(names), False))
    ).properties(width=WIDTH, height=_height(len(rows)))


# --- pieces ----------------------------------------------------------------------------------------------------------


def _chart(values: list[Row]) -> alt.Chart:
    return alt.Chart(alt.Data(values=values)).properties(width=WIDTH, height=HEIGHT)


def _height(bars: int, more: int = 0) -> int:
    return 60 + more + 20 * max(bars, 2)


def _label_channels() -> Mapping[str, Any]:
    """Return the channels with the label of a mark: tooltip (notebooks) and description (drawings)."""
    return {"tooltip": alt.Tooltip("label:N", title=" "), "description": alt.Description("label:N")}


def _ms(time: datetime) -> float:
    return time.timestamp() * 1000


def _at(ms: float) -> str:
    return f"{units.time(round(ms * 1e6)).split()[1]} UTC"


def _step(every: str) -> str:
    number, _, unit = every.partition(" ")
    return unit.removesuffix("s") if number == "1" and unit != "ms" else every


def _between(from_ns: int, to_ns: int | None) -> str:
    if not from_ns:
        return f"less than {units.duration(to_ns or 0)}"
    return (
        f"{units.duration(from_ns)} or more"
        if to_ns is None
        else f"{units.duration(from_ns)} to {units.duration(to_ns)}"
    )


def _class(low: int | None, high: int | None) -> str:
    if low is None:
        return "unknown"
    if high is None:
        return f"{_count(low)}+"
    return _count(low) if high - low == 1 else f"{_count(low)}–{_count(high - 1)}" if high < 1000 else f"{_count(low)}+"


def _count(value: int) -> str:
    return f"{value // 1000}k" if value % 1000 == 0 and value else str(value)


def _largest(rows: Iterable[Row], name: str, value: str, count: int = SERIES) -> list[Any]:
    """Return the names with the largest sums of values, the largest first."""
    sums: dict[Any, float] = {}
    for row in rows:
        sums[row[name]] = sums.get(row[name], 0) + (row[value] or 0)
    return sorted(sums, key=lambda each: (-sums[each], str(each)))[:count]


def _time(rows: Sequence[Row], step: float, span: Span) -> alt.X:
    """Return the axis of time in whole steps, with its date and zone."""
    times = [_ms(row["time"]) for row in rows] or [0.0]
    first, last = (span[0] / 1000, span[1] / 1000) if span else (min(times), max(times))
    first, last = min(first - first % step, *times), max(last - last % step + step, *times)
    days = [datetime.fromtimestamp(ms / 1000, UTC).date() for ms in (first, last)]
    date = f"{days[0]}" if days[0] == days[1] else f"{days[0]} to {days[1]}"
    lasted = last - first
    form = (
        "%H:%M:%S.%L" if lasted < 5000 else "%H:%M:%S" if lasted < 1_800_000 else "%H:%M" if lasted < 2e8 else "%m-%d"
    )
    axis = alt.Axis(title=f"UTC, {date}", format=form, tickCount=5, labelOverlap=True, labelSeparation=14, grid=False)
    return alt.X("time:T", scale=alt.Scale(type="utc", domain=[first, last], nice=False), axis=axis)


def _log(values: Sequence[float]) -> tuple[alt.Scale, list[float]]:
    """Return a logarithmic scale of milliseconds around values, and its ticks."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    low, high = max(low, 1e-4), max(high, 1e-4)
    steps = (1,) if high / low > 50 else (1, 2, 5)
    every = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks = [float(f"{step}e{power}") for power in every for step in steps]
    low, high = low / 1.25, high * 1.25
    return alt.Scale(type="log", domain=[low, high], nice=False), [tick for tick in ticks if low <= tick <= high]


def _duration_axis(column: str, values: Sequence[float], title: str, padded: bool = True) -> alt.Y:
    positive = [max(value, 1e-4) for value in values]
    scale, ticks = _log(positive)
    if not padded and positive:
        scale = alt.Scale(type="log", domain=[min(positive), max(positive)], nice=False)
    return alt.Y(column, scale=scale, axis=alt.Axis(title=title, values=ticks, labelExpr=_DURATION))


def _bounds(most: int) -> list[int]:
    """Return round counts that divide 1 to `most` into classes of growing size."""
    factor = max(2.0, most ** (1 / len(HEAT)))
    found: list[int] = []
    for power in range(1, len(HEAT)):
        exact = factor**power
        size = 10 ** int(math.log10(exact))
        rounded = max(int(size * min((1, 2, 5, 10), key=lambda step: abs(step * size - exact))), 2)
        if rounded <= most and (not found or rounded > found[-1]):
            found.append(rounded)
    return found or [2]


def _legend(title: str | None = None, longest: int = 0) -> alt.Legend:
    columns = 4 if longest < 14 else 3 if longest < 22 else 2
    return alt.Legend(
        title=title, orient="top", columns=columns, labelLimit=(WIDTH - 60) // columns - 24, titleLimit=WIDTH - 60
    )


def _colour(field: str, names: Sequence[str], rest: bool) -> alt.Color:
    domain = [*names, *(["others"] if rest else [])]
    colours = [*COLOURS[: len(names)], *([REST] if rest else [])]
    legend = _legend(longest=max(map(len, map(str, domain)), default=0))
    return alt.Color(field, scale=alt.Scale(domain=domain, range=colours), legend=legend)


def _lines(values: list[Row], names: Sequence[str], y: alt.Y, every: str, span: Span) -> alt.LayerChart:
    """Return a chart with a line for each name, a gap for a step without value, and a point for each value."""
    step = span_us(every) / 1000
    x = _time(values, step, span)
    for value in values:
        value["time"] = _ms(value["time"])
    filled: list[Row] = []
    for name in names:
        mine = sorted((value for value in values if value["name"] == name), key=lambda value: float(value["time"]))
        for before, value in zip([None, *mine], mine, strict=False):
            if before is not None and value["time"] - before["time"] > step * 1.5:
                filled.append({"time": before["time"] + step, "name": name, "value": None})
            filled.append(value)
    base = _chart(filled).encode(x=x, y=y, color=_colour("name:N", names, False), order="time:T")
    return base.mark_line(strokeWidth=1.5, invalid="break-paths-show-path-domains", aria=False) + base.transform_filter(
        "isValid(datum.value)"
    ).mark_point(filled=True, size=14, opacity=1).encode(**_label_channels())


def _stacked(
    data: Any,
    by: str,
    value: Callable[[Row], float],
    written: Callable[[float], str],
    title: str,
    every: str,
    span: Span,
    format: str = "~s",
) -> alt.Chart:
    """Return a chart of stacked bars over time, one part for each name."""
    step = span_us(every) / 1000
    rows = [{"time": row["time"], "name": row[by], "value": value(row)} for row in rows_of(data)]
    names = _largest(rows, "name", "value")
    parts: dict[float, dict[str, float]] = {}
    for row in rows:
        name = short(row["name"]) if row["name"] in names else "others"
        found = parts.setdefault(_ms(row["time"]), {})
        found[name] = found.get(name, 0) + row["value"]
    shown = list(dict.fromkeys(name for name in map(short, names) if name != "others"))
    bars: list[Row] = []
    for at, found in sorted(parts.items()):
        low = 0.0
        for name in (*shown, "others"):
            if name in found:
                high = low + found[name]
                label = f"{_at(at)}: {name} {written(found[name])}"
                bars.append({"time": at, "until": at + step, "name": name, "low": low, "high": high, "label": label})
                low = high
    rest = any(bar["name"] == "others" for bar in bars)
    return (
        _chart(bars)
        .mark_rect()
        .encode(
            x=_time(rows, step, span),
            x2="until:T",
            y=alt.Y("low:Q", axis=alt.Axis(title=title, format=format, tickCount=5), scale=alt.Scale(zero=True)),
            y2="high:Q",
            color=_colour("name:N", shown, rest),
            **_label_channels(),
        )
    )
