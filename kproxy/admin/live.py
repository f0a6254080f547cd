"""GET /api/live: the current figures of a running kproxy, for the page and `kproxy top`; docs/admin.md has the format.

Duty: take a sample for the history every STEP_S, and answer with the changes since the client's last request. The part
that all clients share is computed once. Walks over cells are split into turns, between which the relays run. All
clients together use at most a hundredth of a core: an answer is reused for a time in proportion to its cost
(`interval_s`), and so the steps of the history grow.

Bounded: rows of each kind (MAX_*), the history (`kproxy.metrics.figures`). Refuses to know HTTP and the number of
processes: `gather` collects their cells.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping
from time import monotonic, process_time, thread_time, time_ns
from typing import Any, TypeVar

from kproxy import __version__
from kproxy.admin import parameters
from kproxy.metrics import Metrics, figures

MAX_TOTALS = 200
MAX_ROWS = 100  # for each of errors, topics, clients, groups and lags
LEAST_S = 1.0
SHARE = 100  # an answer is reused for this many times the CPU time that it took
LONGEST_S = 30.0
LAG_S = 5.0  # lag is computed less often, since it costs most

_SUMS = {"apis": figures.by_api, "of_brokers": figures.by_broker}

log = logging.getLogger("kproxy.admin")

Value = TypeVar("Value")
Gather = Callable[[bool], Awaitable[Metrics]]  # the argument: with consumers


class Encoded(str):
    """Text that is JSON already."""


class Live:
    """Answers for all clients. gather: returns the current cells of all processes. state: further fields of `state`."""

    def __init__(self, gather: Gather, state: Callable[[], Mapping[str, Any]], *, with_history: bool) -> None:
        self._gather = gather
        self._state = state
        self._history = figures.History() if with_history else None
        self._metrics: Metrics | None = None
        self._totals: figures.Totals = {}
        self._parts: dict[str, str] = {}  # JSON, by name
        self._made_at = -LONGEST_S
        self._lags_at = -LONGEST_S
        self._cost_s = 0.0
        self._lock = asyncio.Lock()

    @property
    def interval_s(self) -> float:
        """Seconds for which an answer is reused."""
        return min(LONGEST_S, max(LEAST_S, SHARE * self._cost_s))

    async def run(self) -> None:
        """Take samples, until cancelled."""
        while self._history is not None:
            cost = _Cost()
            try:
                async with self._lock:
                    metrics = await self._gather(False)
                    cost = _Cost()
                    totals = await cost.in_turns(figures.totals(metrics))
                    self._history.close(metrics, totals, metrics.now_ns())
                    cost.stop()
            except Exception:  # a defect must not end the history; the next sample has the missing counts
                log.exception("no sample for the history")
            await asyncio.sleep(max(figures.STEP_S, SHARE * cost.seconds))

    async def answer(self, query: Mapping[str, str]) -> Encoded:
        """The answer to /api/live. Raises ValueError for bad parameters.

        after, series, groups: the number of samples and names that the client has; slow_after: the time of its last
        slow exchange, in microseconds.
        """
        after = parameters.number(query, "after", 0, parameters.HIGHEST)
        series = parameters.number(query, "series", 0, figures.MAX_NAMES)
        groups = parameters.number(query, "groups", 0, figures.MAX_NAMES)
        slow_after_ns = parameters.number(query, "slow_after", 0, parameters.HIGHEST // 1000) * 1000
        async with self._lock:
            if monotonic() - self._made_at >= self.interval_s * 0.9:
                await self._make()
            parts = dict(self._parts)
        assert self._metrics is not None
        parts["slow"] = json.dumps(figures.slow_rows(self._metrics, slow_after_ns))
        history = self._history
        if history is not None:
            if after > history.last:
                after = series = groups = 0  # the client has samples of an earlier process
            parts["samples"] = f"[{','.join(text for number, text in history.samples if number > after)}]"
            parts["series"] = json.dumps(history.series.names[series:])
            parts["group_names"] = json.dumps(history.groups.names[groups:])
            parts["first_series"], parts["first_group"] = str(series), str(groups)
        return Encoded("{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}")

    async def _make(self) -> None:
        with_lags = monotonic() - self._lags_at >= LAG_S
        metrics = self._metrics = await self._gather(with_lags)
        cost = _Cost()
        totals = await cost.in_turns(figures.totals(metrics))
        largest = sorted(totals.items(), key=lambda item: -item[1].requests)[:MAX_TOTALS]
        parts = {
            "state": {
                **self._state(),
                "version": __version__,
                "now_ms": metrics.now_ns() // 1_000_000,
                "started_ms": metrics.started_ns // 1_000_000,
                "workers": metrics.workers,
                "cpu_s": round(process_time() + sum(ns for ns, _ in metrics.worker_usage.values()) / 1e9, 3),
            },
            "totals": [[*key, *total.row()] for key, total in largest],
        }
        if len(totals) > MAX_TOTALS:  # send the sums, since the rows are incomplete
            for name, key in _SUMS.items():
                sums = sorted(
                    (await cost.in_turns(figures.summed(totals, key))).items(), key=lambda item: -item[1].requests
                )
                parts[name] = [[*of, *total.row()] for of, total in sums[:MAX_TOTALS]]
        makers: list[tuple[str, Callable[[], Any]]] = [
            ("brokers", lambda: figures.broker_rows(metrics, MAX_ROWS)),
            ("errors", lambda: figures.error_rows(metrics, MAX_ROWS)),
            ("topics", lambda: figures.topic_rows(metrics, MAX_ROWS)),
            ("clients", lambda: figures.client_rows(metrics, MAX_ROWS)),
            ("groups", lambda: figures.group_rows(metrics, MAX_ROWS)),
        ]
        if with_lags:
            self._lags_at = monotonic()
            makers.append(("lags", lambda: figures.lag_rows(metrics, time_ns(), MAX_ROWS)))
        for name, make in makers:
            await cost.turn()
            parts[name] = make()
        made = {name: json.dumps(value, separators=(",", ":")) for name, value in parts.items()}
        await cost.turn()
        if self._history is not None:
            made["current"] = self._history.open(metrics, totals, metrics.now_ns())
            made["step_s"] = str(figures.STEP_S)
        made["bounds_s"] = json.dumps(figures.BOUNDS_S)
        made["slow_columns"] = json.dumps(figures.SLOW_COLUMNS)
        cost.stop()
        self._cost_s = cost.seconds
        made["interval_s"] = str(round(self.interval_s, 3))
        kept = self._parts if "apis" in made else {n: text for n, text in self._parts.items() if n not in _SUMS}
        self._parts = {**kept, **made}
        self._made_at = monotonic()


class _Cost:
    """CPU time of the loop's thread, all turns together."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = thread_time()

    def stop(self) -> None:
        self.seconds += thread_time() - self._since

    async def turn(self) -> None:
        self.stop()
        await asyncio.sleep(0)
        self._since = thread_time()

    async def in_turns(self, steps: Generator[None, None, Value]) -> Value:
        while True:
            try:
                next(steps)
            except StopIteration as end:
                value: Value = end.value
                return value
            await self.turn()
