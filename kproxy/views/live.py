"""The screen of the demo: summaries of the metrics' cells in, a screen or a line of text out.

The screen fits into 80x24 and shows more where there is room. All figures but the curve are of the last WINDOW_S
seconds. Refuses to know terminals, and where summaries come from. Memory: _HISTORY summaries.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kproxy.metrics.bounds import DURATION_NS
from kproxy.metrics.summary import Summary, Totals
from kproxy.views import units

WINDOW_S = 10.0
_HISTORY = 240  # summaries, one a second
_WIDE = 110  # columns from which on there is room for more
_NAME = 20  # characters of a name at least, where there is room, so that the tables keep still

_BARS = " ▁▂▃▄▅▆▇█"
_HINT = "A Fetch waits for data, up to its max_wait_ms: that is no slowness."
_ACCENT = "cyan"
_DIM = "bright_black"


class View:
    """The screen. `where`: addresses shown at its foot, as (label, address)."""

    def __init__(self, title: str, where: Sequence[tuple[str, str]]) -> None:
        self._title = title
        self._where = where
        self._summaries: deque[Summary] = deque(maxlen=_HISTORY)

    def add(self, summary: Summary) -> None:
        self._summaries.append(summary)

    @property
    def recent(self) -> Summary:
        """The last WINDOW_S seconds, or less where there is not so much yet."""
        now = self._summaries[-1]
        for summary in self._summaries:
            if now.now_ns - summary.now_ns <= WINDOW_S * 1e9:
                return now.since(summary)
        return now.since(now)

    def line(self) -> str:
        """One line for logs and pipes."""
        now, recent = self._summaries[-1], self.recent
        everything = Totals()
        for totals in recent.apis.values():
            everything.request_bytes += totals.request_bytes
            everything.response_bytes += totals.response_bytes
            everything.throttled += totals.throttled
            everything.errors += totals.errors
        seconds = recent.seconds or 1.0
        busiest = sorted(recent.apis.items(), key=lambda item: -item[1].requests)[:3]
        apis = "  ".join(
            f"{api} {totals.requests / seconds:.0f}/s p50 {_duration(totals.duration_s(0.5))} "
            f"p99 {_duration(totals.duration_s(0.99))}"
            for api, totals in busiest
            if totals.requests
        )
        return (
            f"{(now.now_ns - self._summaries[0].now_ns) / 1e9:5.0f} s"
            f"  {recent.requests / seconds:6.0f} requests/s"
            f"  to brokers {units.rate(everything.request_bytes / seconds)}"
            f"  to clients {units.rate(everything.response_bytes / seconds)}"
            f"  throttled {everything.throttled}  errors {everything.errors.total()}"
            f"  connections {sum(now.connections.values())}"
            f"  in kproxy p99 {_duration(recent.inside_s(0.99))}" + (f"  |  {apis}" if apis else "")
        )

    def screen(self, width: int, height: int) -> RenderableType:
        now, recent = self._summaries[-1], self.recent
        apis = sorted(recent.apis.items(), key=lambda item: (-item[1].requests, item[0]))
        brokers = sorted(recent.brokers.items())
        parts: list[RenderableType] = [self._head(now, width)]
        taken = 4 + 2 + len(brokers) + 2  # head and three lines below the tables, and what stands around their rows
        apis = apis[: max(3, height - taken - 2)]
        free = height - taken - len(apis)
        hint = [Text(f" {_HINT}", _DIM)] if free > 9 else []
        gaps = [[Text()] if free > least else [] for least in (6, 4, 3, 5)]  # the curve keeps three lines
        curve = min(10, free - sum(map(len, gaps)) - len(hint))
        if curve > 0:
            parts += [*gaps[0], self._curve(width, curve)]
        longest = max(_NAME, *(len(name) for name, _ in apis), *(len(broker) for (_, broker), _ in brokers), 0)
        parts += [*gaps[1], _apis(apis, recent.seconds, width, longest)]
        parts += [*gaps[2], _brokers(brokers, now, recent.seconds, width, longest)]
        parts += [*gaps[3], _proxy(now, recent), _errors(recent, width), self._foot(width), *hint]
        return Group(*parts)

    def _head(self, now: Summary, width: int) -> Text:
        elapsed = int((now.now_ns - self._summaries[0].now_ns) / 1e9)
        left = Text.assemble((" kproxy ", f"bold black on {_ACCENT}"), (f" {self._title}", "bold"))
        right = Text(f"last {WINDOW_S:.0f} s of {elapsed // 60:02}:{elapsed % 60:02} · Ctrl-C ends ", _DIM)
        left.pad_right(max(1, width - left.cell_len - right.cell_len))
        return left + right

    def _curve(self, width: int, height: int) -> RenderableType:
        """Requests per second over time, the newest at the right."""
        label = 12
        columns = width - label - 1
        rates = [
            (b.requests - a.requests) / ((b.now_ns - a.now_ns) / 1e9)
            for a, b in pairwise(self._summaries)
            if b.now_ns > a.now_ns
        ][-columns:]
        top = max(rates, default=0.0) or 1.0
        lines = []
        for row in range(height):
            line = Text()
            if row == 0:
                line.append(f" {top:.0f}", _DIM)
            elif row == height - 1:
                line.append(f" {rates[-1] if rates else 0:.0f}", "bold")
                line.append(" req/s", _DIM)
            line.pad_right(label - line.cell_len)
            floor = 8 * (height - 1 - row)
            cells = (min(8, max(0, round(value / top * height * 8) - floor)) for value in rates)
            line.append("".join(_BARS[cell] for cell in cells).rjust(columns), _ACCENT)
            lines.append(line)
        return Group(*lines)

    def _foot(self, width: int) -> Text:
        text = Text()
        for label, value in self._where:
            text.append(f" {label} ", "bold")
            text.append(f"{value}  ", _ACCENT)
        text.truncate(width)
        return text


def _apis(apis: Sequence[tuple[str, Totals]], seconds: float, width: int, longest: int) -> Table:
    table = _table("api", longest, width, "throttle", "errors")
    for api, totals in apis:
        throttle = Text(_duration(totals.throttle_s()), "magenta" if totals.throttled else _DIM)
        errors = Text(str(totals.errors.total() or "–"), "red" if totals.errors else _DIM)
        _row(table, api, totals, seconds, width, throttle, errors)
    return table


def _brokers(
    brokers: Sequence[tuple[tuple[str, str], Totals]], now: Summary, seconds: float, width: int, longest: int
) -> Table:
    table = _table("broker", longest, width, "waiting", "clients")
    for key, totals in brokers:
        _row(table, key[1], totals, seconds, width, Text(str(now.inflight[key])), Text(str(now.connections[key])))
    return table


def _table(first: str, longest: int, width: int, *last: str) -> Table:
    """An empty table. Figures stand beside the names, however wide the terminal is; names that do not fit are cut."""
    wide = width >= _WIDE
    numbers = [("req/s", 6), ("p50", 7), ("p99", 7)]
    sizes = [*((name, 9) for name in ("to broker", "to client")), *((name, 8) for name in last)]
    beside = sum(least for _, least in numbers + sizes) + wide * (len(DURATION_NS) + 1)
    between = (1 + wide) * (len(numbers) + len(sizes) + wide) + wide
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0) if wide else 0, show_edge=False)
    table.header_style = table.border_style = _DIM
    table.add_column(f" {first}", no_wrap=True, width=max(8, min(longest + 2, width - 1 - beside - between)))
    for name, least in numbers:
        table.add_column(name, justify="right", no_wrap=True, width=least)
    if wide:
        table.add_column(_scale(), no_wrap=True, width=len(DURATION_NS) + 1)
    for name, least in sizes:
        table.add_column(name, justify="right", no_wrap=True, width=least)
    return table


def _row(table: Table, name: str, totals: Totals, seconds: float, width: int, *last: Text) -> None:
    seconds = seconds or 1.0
    cells = [
        Text(f" {name}", "bold"),
        Text(units.number(totals.requests / seconds)),
        Text(_duration(totals.duration_s(0.5))),
        Text(_duration(totals.duration_s(0.99))),
        *([_distribution(totals.duration)] if width >= _WIDE else []),
        Text(units.rate(totals.request_bytes / seconds)),
        Text(units.rate(totals.response_bytes / seconds)),
        *last,
    ]
    if not totals.requests:
        for cell in cells:
            cell.stylize(_DIM)
    table.add_row(*cells)


def _proxy(now: Summary, recent: Summary) -> Text:
    text = Text(" in kproxy", "bold")
    for q in (0.5, 0.99):
        text.append(f"  p{q * 100:.0f} ", _DIM)
        text.append(_duration(recent.inside_s(q)), "green")
    for label, value, style in (
        ("accepted", now.accepted, ""),
        ("unanswered", now.unanswered, "yellow"),
        ("faults", now.faults, "red"),
    ):
        text.append(f"   {label} ", _DIM)
        text.append(str(value), style if value else "")
    return text


def _errors(recent: Summary, width: int) -> Text:
    """Kafka's error codes by name, those of the most answers first."""
    text = Text(" errors", "bold")
    found = sorted(
        ((count, error, api) for api, totals in recent.apis.items() for error, count in totals.errors.items()),
        key=lambda item: (-item[0], *item[1:]),
    )
    if not found:
        text.append("  none", "green")
    for count, error, api in found:
        text.append(f"  {error}", "red")
        text.append(f" {api} ×{count}", _DIM)
    text.truncate(width, overflow="ellipsis")
    return text


def _scale() -> str:
    """The head of a distribution: where its first and its last bucket are."""
    first, last = _duration(DURATION_NS[0] / 1e9), _duration(DURATION_NS[-1] / 1e9)
    return first + "·" * (len(DURATION_NS) + 1 - len(first) - len(last)) + last


def _distribution(counts: Sequence[int]) -> Text:
    """A histogram in one line, a column per bucket; what happened at all is visible."""
    top = max(counts)
    return Text("".join(_BARS[-(-8 * count // top) if top else 0] for count in counts), _ACCENT)


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else units.duration(seconds * 1e9)
