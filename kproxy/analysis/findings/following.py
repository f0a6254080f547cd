"""Findings of a running kproxy, for its admin API: about the last quarter of an hour.

Duty: a copy of the cells once a minute, made on a thread, KEPT of them; findings compare the present with the oldest,
or with the start before there is one. `tell` gets the findings once a minute. Refuses to know HTTP, the meaning of
counters, and the use of findings.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kproxy.analysis.findings import of_metrics
from kproxy.analysis.findings.finding import Finding
from kproxy.analysis.findings.thresholds import Limits, limits
from kproxy.errors import KproxyError
from kproxy.metrics import Metrics

EVERY_S = 60.0
KEPT = 15  # copies: so many minutes

log = logging.getLogger("kproxy.findings")


class Following:
    """counted(): the counters now, of all processes. tell(findings): called once a minute."""

    def __init__(
        self,
        counted: Callable[[], Awaitable[Metrics]],
        tell: Callable[[Sequence[Finding]], Awaitable[None]] | None = None,
    ) -> None:
        self._counted = counted
        self._tell = tell
        self._kept: deque[of_metrics.Moment] = deque(maxlen=KEPT)

    async def follow(self) -> None:
        """Keep copies until this is cancelled."""
        while True:
            metrics, now = await self._taken()
            if self._tell is not None:
                try:
                    await self._tell((await self._found(metrics, now, limits({})))[1])
                except Exception:  # a defect must not end the copies
                    log.exception("nobody is told of findings")
            self._kept.append(now)
            await asyncio.sleep(EVERY_S)

    async def _found(
        self, metrics: Metrics, now: of_metrics.Moment, chosen: Limits
    ) -> tuple[of_metrics.Moment, list[Finding]]:
        """(the moment of the copy to compare with, the findings)"""
        before = self._kept[0] if self._kept else of_metrics.began(metrics)
        return before, await asyncio.to_thread(of_metrics.found_between, before, now, chosen)

    async def _taken(self) -> tuple[Metrics, of_metrics.Moment]:
        metrics = await self._counted()
        return metrics, await asyncio.to_thread(of_metrics.taken, metrics)

    async def asked(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The findings as plain values; the query's parameters are thresholds. Raises ValueError for an unknown one."""
        try:
            chosen = limits(dict(query))
        except KproxyError as fault:
            raise ValueError(str(fault)) from None
        metrics, now = await self._taken()
        before, found = await self._found(metrics, now, chosen)
        return {
            "from_ns": before.now_ns,
            "to_ns": now.now_ns,
            "findings": [one.as_dict() for one in found],
        }
