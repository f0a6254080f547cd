"""Findings of a kproxy that runs, for its admin API: what happened in the last quarter of an hour.

Duty: a copy of the cells once a minute, made on a thread, KEPT of them; a question is judged against the oldest. Before
there is one: against the start. Refuses to know HTTP and what is counted.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kproxy.analysis.findings import live
from kproxy.analysis.findings.thresholds import limits
from kproxy.errors import KproxyError
from kproxy.metrics import Metrics

EVERY_S = 60.0
KEPT = 15  # copies: so many minutes


class Following:
    """counted(): what is counted now, of all processes."""

    def __init__(self, counted: Callable[[], Awaitable[Metrics]]) -> None:
        self._counted = counted
        self._kept: deque[live.Moment] = deque(maxlen=KEPT)

    async def follow(self) -> None:
        """Keep copies until this is cancelled."""
        while True:
            self._kept.append((await self._taken())[1])
            await asyncio.sleep(EVERY_S)

    async def _taken(self) -> tuple[Metrics, live.Moment]:
        metrics = await self._counted()
        return metrics, await asyncio.to_thread(live.taken, metrics)

    async def asked(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The findings as plain values; the query's parameters are thresholds. ValueError: one that is none."""
        try:
            chosen = limits(dict(query))
        except KproxyError as fault:
            raise ValueError(str(fault)) from None
        metrics, now = await self._taken()
        before = self._kept[0] if self._kept else live.began(metrics)
        found = await asyncio.to_thread(live.found_between, before, now, chosen)
        return {
            "from_ns": before.now_ns,
            "to_ns": now.now_ns,
            "findings": [one.as_dict() for one in found],
        }
