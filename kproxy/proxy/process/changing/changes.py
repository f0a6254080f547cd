"""The differences between the settings in force and new ones, and the effect of each difference. Pure functions.

Settings are compared by their values, not by the text of the file. Each setting of the process has one of the
treatments below. A setting of a cluster takes effect for new connections. Open connections keep the former settings,
unless that would be wrong: then the cluster's connections are drained, and clients reconnect under the new settings.
Refuses to know sockets and how a treatment is done.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster, Config

AT_ONCE = "at once"
RESTART = "needs a restart"

# Any other setting needs a restart, which is the safe treatment for a new setting.
PROCESS = {
    "log_level": AT_ONCE,
    "discovery_interval_s": AT_ONCE,
    "connect_timeout_s": AT_ONCE,
    "drain_delay_s": AT_ONCE,
    "drain_timeout_s": AT_ONCE,
    "max_connections": AT_ONCE,
    "accept_backlog": AT_ONCE,
    "watch_config": AT_ONCE,
    "admin": AT_ONCE,  # the new port opens before the old one closes
}

# A change of these settings drains the cluster's open connections: the client's rights, identity or broker may differ
# from those with which the connection was admitted.
DRAINS = frozenset(("policy", "policy_default", "read_only", "filter_lists", "authentication", "route"))


@dataclass(frozen=True)
class Changes:
    """The differences. Clusters are identified by name."""

    process: tuple[str, ...] = ()  # settings that change at once
    restart: tuple[str, ...] = ()  # changes that need a restart: `record (None -> tables)`
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # cluster -> its settings that differ
    drained: tuple[str, ...] = ()  # clusters whose open connections end, removed clusters included

    def __bool__(self) -> bool:
        return bool(self.process or self.restart or self.added or self.removed or self.changed)

    def lines(self) -> list[str]:
        """Return one line per change, for the log and the API."""
        return [
            *self.process,
            *(f"cluster {name} added" for name in self.added),
            *(f"cluster {name} removed" for name in self.removed),
            *(f"cluster {name}: {', '.join(settings)}" for name, settings in self.changed.items()),
        ]


def changes(now: Config, new: Config) -> Changes:
    """Return the changes from the settings `now` to the settings `new`."""
    process, restart = [], []
    for name in type(now).model_fields:
        before, after = getattr(now, name), getattr(new, name)
        if name == "clusters" or before == after:
            continue
        if PROCESS.get(name, RESTART) == AT_ONCE and not _needs_restart(name, before, after):
            process.append(name)
        else:
            restart.append(f"{name} ({_shown(name, before)} -> {_shown(name, after)})")
    old = {cluster.name: cluster for cluster in now.clusters}
    wanted = {cluster.name: cluster for cluster in new.clusters}
    changed = {
        name: differing
        for name, cluster in wanted.items()
        if name in old and (differing := _differing(old[name], cluster))
    }
    removed = tuple(name for name in old if name not in wanted)
    drained = tuple(name for name, settings in changed.items() if _drains(old[name], wanted[name], settings))
    return Changes(
        tuple(process),
        tuple(restart),
        tuple(name for name in wanted if name not in old),
        removed,
        changed,
        (*removed, *drained),
    )


def _needs_restart(name: str, before: Any, after: Any) -> bool:
    """Return whether the admin port appears or disappears, which changes imports and counters."""
    return name == "admin" and (before is None or after is None)


def _differing(old: Cluster, new: Cluster) -> tuple[str, ...]:
    return tuple(name for name in type(old).model_fields if getattr(old, name) != getattr(new, name))


def _drains(old: Cluster, new: Cluster, settings: tuple[str, ...]) -> bool:
    if DRAINS.intersection(settings) or _certificates(old) != _certificates(new):
        return True
    return not same_upstream(old, new)


def _certificates(cluster: Cluster) -> tuple[Any, ...]:
    """Return the settings that determine principals from client certificates, and whether one is required."""
    tls = cluster.tls
    if tls is None or tls.client_certificates == "none":
        return ()
    return tls.client_certificates, tls.ca, tls.principal_mapping_rules


class Upstream(NamedTuple):
    """The settings of a cluster that decide which brokers it has."""

    route: str
    bootstrap: tuple[Address, ...]


def same_upstream(old: Cluster | Upstream, new: Cluster) -> bool:
    """Whether both have the same brokers, so that addresses learned for one hold for the other.

    Lists with a common broker are of one Kafka cluster; otherwise it may be another one.
    """
    return old.route == new.route and bool(set(old.bootstrap) & set(new.bootstrap))


def _shown(name: str, value: Any) -> str:
    """Return a value for a message; never that of a table, which may hold a secret."""
    return str(value) if isinstance(value, (str, int, float, Address, Path)) or value is None else f"another {name}"
