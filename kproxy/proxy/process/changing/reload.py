"""Reload of the settings of a running kproxy: read completely, compared, and applied completely or not at all.

Duty: run one reload at a time, and report its outcome: a log line, an answer for the API, cells for metrics. The
settings in force are always those of one complete configuration, so that a restart changes nothing: if one of several
changes needs a restart, none is applied. Refuses to know how a change is made.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kproxy.errors import ConfigError
from kproxy.metrics.process import Metrics
from kproxy.proxy.config.settings import Config
from kproxy.proxy.process.changing.changes import Changes, changes

log = logging.getLogger("kproxy.reload")

Load = Callable[[], Config]


class Outcome(NamedTuple):
    """The outcome of a reload: `applied`, `unchanged` or `refused`."""

    outcome: str
    changes: Sequence[str] = ()
    faults: Sequence[tuple[str, str]] = ()  # (place, fault and its remedy)

    def as_json(self) -> dict[str, Any]:
        """Return the answer of the admin API."""
        faults = [{"place": place, "text": text} for place, text in self.faults]
        return {"outcome": self.outcome, "changes": list(self.changes), "faults": faults}


class Reconfigurable(Protocol):
    """A running kproxy."""

    config: Config
    metrics: Metrics

    async def reconfigure(self, new: Config, differing: Changes) -> None: ...


class Reloader:
    """Reloads a kproxy's settings."""

    def __init__(self, server: Reconfigurable) -> None:
        self._server = server
        self._load: Load | None = None
        self._one = asyncio.Lock()
        self._closed = ""

    def reads(self, load: Load | None) -> None:
        """Set the function that reads the settings again: file, environment and flags. None: there is no file."""
        self._load = load

    def close(self, reason: str) -> None:
        """Refuse reloads, for that reason; "": accept them again."""
        self._closed = reason

    async def settled(self) -> None:
        """Return when the current reload, if any, has ended."""
        async with self._one:
            return

    async def reload(self, asker: str) -> Outcome:
        """Read and apply the settings. Never raises because of a configuration."""
        async with self._one:
            outcome = await self._reload()
            metrics = self._server.metrics
            metrics.reloads.count(outcome.outcome, metrics.now_ns())
        if outcome.outcome == "refused":
            text = "; ".join(f"{place}: {text}" if place else text for place, text in outcome.faults)
            log.error("reload by %s refused, nothing has changed: %s", asker, text)
        elif outcome.outcome == "unchanged":
            log.info("reload by %s: the settings are those that run", asker)
        else:
            log.info("reload by %s: %s", asker, "; ".join(outcome.changes))
        return outcome

    async def _reload(self) -> Outcome:
        if self._closed:
            return Outcome("refused", faults=[("", self._closed)])
        if self._load is None:
            reason = "there is no file to reload: this kproxy was started without --config"
            return Outcome("refused", faults=[("--config", reason)])
        try:
            new = await asyncio.to_thread(self._load)
            differing = changes(self._server.config, new)
            if not differing:
                return Outcome("unchanged")
            if differing.restart:
                text = "needs a restart, or an upgrade in place (SIGUSR2); none of the changes was applied"
                return Outcome("refused", faults=[(each, text) for each in differing.restart])
            await self._server.reconfigure(new, differing)
        except ConfigError as fault:
            return Outcome("refused", faults=fault.faults)
        except Exception as fault:
            log.exception("a defect of kproxy: please report these lines")
            return Outcome("refused", faults=[("", f"a defect of kproxy: {fault!r}")])
        return Outcome("applied", differing.lines())
