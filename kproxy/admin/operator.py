"""The operator's part of the admin API: questions about a running kproxy, and actions.

They call methods of the server. Those about connections go through `operate`, which runs an operation (`operating.py`)
in each process that has connections, so the code is the same for one process and for several. Each action logs a line.
Refuses to know HTTP and authorization (`guard.py`).
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from kproxy import __version__
from kproxy.admin.following import follow
from kproxy.admin.live import Encoded
from kproxy.admin.parameters import needed_number
from kproxy.metrics import Metrics
from kproxy.proxy import log_lines
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.flight import Flight
from kproxy.proxy.config.policy import default_of
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.connection.operating import LEVELS
from kproxy.proxy.filters.flight import ASKED, folder_name
from kproxy.proxy.filters.policy.audit import timestamp

Query = Mapping[str, str]
Json = dict[str, Any]
Answer = tuple[int, Any]  # HTTP status, and the value to send as JSON

_DUMP_POLL_S = 0.05
_SAME_WINDOW_NS = 6 * 10**9  # rows of exchanges are forgotten in portions of 5 s, frames one by one
_DUMP_SILENT = 40

log = logging.getLogger("kproxy.operator")


class Kproxy(Protocol):
    """The part of a server that the operator uses."""

    config: Config
    metrics: Metrics

    @property
    def addresses(self) -> dict[str, Address]: ...
    @property
    def is_draining(self) -> bool: ...
    @property
    def connections(self) -> int: ...
    def not_ready(self) -> list[str]: ...
    async def operate(self, operation: str, *arguments: Any) -> list[Any]: ...


class Operator:
    """reads: GET /api/<name>; actions: POST /api/<name>; streams: the same, answered line by line."""

    def __init__(self, kproxy: Kproxy) -> None:
        self._kproxy = kproxy
        self._shown: tuple[Config, Encoded] | None = None  # the answer to /api/policy, and its configuration
        self.reads: Mapping[str, Callable[[Query], Any]] = {
            "status": self._status,
            "policy": self._policy,
            "requests": self._requests,
            "log-level": self._log_level,
        }
        self.actions: Mapping[str, Callable[[Query], Awaitable[Answer]]] = {
            "close": self._close,
            "drain": self._drain,
            "log-level": self._set_log_level,
            "dump": self._dump,
        }
        self.streams: Mapping[str, Callable[[Query], AsyncIterator[Json | None]]] = {
            "trace": lambda query: follow(query, kproxy.operate),
        }

    # --- questions ---------------------------------------------------------------------------------------------------

    def _status(self, _: Query) -> Json:
        kproxy = self._kproxy
        reasons = kproxy.not_ready()
        return {
            "version": __version__,
            "started_ns": kproxy.metrics.started_ns,
            "ready": not reasons,
            "not_ready": reasons,
            "draining": kproxy.is_draining,
            "connections": kproxy.connections,
            "connection_limit": kproxy.metrics.connection_limit,
            "log_level": log_lines.level(),
            "clusters": {name: str(address) for name, address in kproxy.addresses.items()},
        }

    def _policy(self, _: Query) -> Encoded:
        """The rules in force of each cluster, in the order of evaluation, and its limits.

        Computed once for each configuration: a thousand rules take 8 ms.
        """
        config = self._kproxy.config
        if self._shown is None or self._shown[0] is not config:
            self._shown = config, Encoded(json.dumps(self._rules_of(config)))
        return self._shown[1]

    def _rules_of(self, config: Config) -> list[Json]:
        return [
            {
                "cluster": cluster.name,
                "read_only": getattr(cluster, "read_only", False),
                "policy": [rule.model_dump(mode="json", exclude_unset=True) for rule in _rules(cluster)],
                "policy_default": default_of(_rules(cluster), getattr(cluster, "policy_default", None)),
                "limits": cluster.limits.model_dump(mode="json", exclude_defaults=True),
            }
            for cluster in config.clusters
        ]

    async def _requests(self, query: Query) -> list[Json]:
        """The requests in flight of a connection."""
        number = needed_number(query, "connection")
        found: list[list[Json]] = [rows for rows in await self._kproxy.operate("requests", number) if rows is not None]
        if not found:
            raise ValueError(f"connection={number} is not open: `kproxy ctl connections` lists those that are")
        return found[0]

    def _log_level(self, _: Query) -> Json:
        return {"level": log_lines.level()}

    # --- actions -----------------------------------------------------------------------------------------------------

    async def _close(self, query: Query) -> Answer:
        number = needed_number(query, "connection")
        closed = sum(await self._kproxy.operate("close", number))
        log.warning("operator closed=%d connection=%d", closed, number)
        return (200 if closed else 404), {"closed": closed}

    async def _drain(self, query: Query) -> Answer:
        scope = [name for name in ("connection", "cluster", "all") if query.get(name)]
        if len(scope) != 1 or len(query) != 1:
            raise ValueError("say what is drained: connection=NUMBER, cluster=NAME, or all=yes")
        number = needed_number(query, "connection") if "connection" in query else None
        cluster = query.get("cluster")
        if cluster is not None and cluster not in self._kproxy.addresses:
            raise ValueError(f"cluster={cluster[:60]!r} is none of {', '.join(self._kproxy.addresses)}")
        drained = sum(await self._kproxy.operate("drain", number, cluster))
        log.warning("operator draining=%d connection=%s cluster=%s", drained, number, cluster)
        return (200 if drained or number is None else 404), {"draining": drained}

    async def _dump(self, _: Query) -> Answer:
        """Write the content of the flight recorder, and answer when that is done.

        A process that is writing a dump for a trigger joins after it.
        """
        kproxy = self._kproxy
        if kproxy.config.flight is None:
            raise ValueError("this kproxy has no flight recorder: start it with --flight DIR, or [flight] in its file")
        name = folder_name(ASKED)
        begun = [one for one in await kproxy.operate("dump_start", name) if one is not None]
        if not any(begun):
            return 409, {"error": "a dump is being written: try again when it is done"}
        log.warning("operator dump=%s", name)
        silent = 0  # polls without a process that still writes
        while silent < _DUMP_SILENT:
            await asyncio.sleep(_DUMP_POLL_S)
            if not all(begun):
                begun = [one for one in await kproxy.operate("dump_start", name, True) if one is not None]
            known = [one for one in await kproxy.operate("dump_result", name) if one is not None]
            told = [one for one in known if "writing" not in one]
            if len(told) >= len(begun) and all(begun):
                break
            silent = silent + 1 if len(told) == len(known) and all(begun) else 0
        faults = [one["error"] for one in told if "error" in one]
        if len(told) < len(begun):
            faults.append(f"{len(begun) - len(told)} of {len(begun)} processes ended before they had written theirs")
        if faults:
            return 500, {"error": "; ".join(faults)}
        return 200, {
            "folder": str(kproxy.config.flight.folder / name),
            "files": sorted(one["file"] for one in told),
            **{key: sum(one[key] for one in told) for key in ("exchanges", "frames", "left_out")},
            **_windows(told, kproxy.config.flight),
        }

    async def _set_log_level(self, query: Query) -> Answer:
        level = query.get("level", "")
        if level not in LEVELS:
            raise ValueError(f"level={level[:40]!r} is none of {', '.join(LEVELS)}")
        await self._kproxy.operate("log_level", level)
        log.warning("operator log_level=%s", level)
        return 200, {"level": level}


def _windows(told: Sequence[Json], settings: Flight) -> dict[str, str]:
    """The times from which the tables and the frames of a dump are complete, and the memory that limits them.

    Bytes without an exchange, such as other protocols, have frames too. While no memory is full, a dump is complete.
    """
    begins = {
        name: max((one[f"{name}_from_ns"] for one in told if one.get(f"{name}_from_ns")), default=None)
        for name in ("tables", "frames")
    }
    windows = {f"{name}_from": timestamp(ns) for name, ns in begins.items() if ns is not None}
    tables_ns, frames_ns = begins["tables"], begins["frames"]
    if tables_ns is not None and frames_ns is not None and abs(later := frames_ns - tables_ns) > _SAME_WINDOW_NS:
        name, shorter = ("frames", "frame_memory") if later > 0 else ("tables", "header_memory")
        if not any(one.get(f"{name}_full") for one in told):
            return windows
        windows["shorter"] = (
            f"{name} begin {abs(later) / 1e9:.1f} s later: [flight] {shorter} of "
            f"{getattr(settings, shorter) >> 20} MiB holds no more; raise it to have both"
        )
    return windows


def _rules(cluster: Cluster) -> Sequence[Any]:
    return getattr(cluster, "policy", ())
