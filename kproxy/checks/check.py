"""Finds the faults that `kproxy run` would have with a configuration, without opening a port or connecting anywhere.

Everything is read and built as at a start: settings, TLS files, secrets, the steps of each cluster's connections. So
this reports all faults for which a start or a reload would be refused, at once. Refuses to know how the result is
shown; the result never has the value of a secret, only its source.
"""

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kproxy.errors import ConfigError
from kproxy.proxy.cluster.ports_file import NotOurs, read
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.files import open_regular
from kproxy.proxy.config.load import load
from kproxy.proxy.config.policy import default_of
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.process.cautions import Caution, cautions
from kproxy.proxy.process.server import LOOPBACK, Server

_WRITTEN = ("record", "flight.folder", "audit")  # settings of files and folders that kproxy writes to
_SECRET_SOURCES = ("_env",)


@dataclass(frozen=True)
class Checked:
    """The result: the settings, unless there are faults, as (place, fault and fix)."""

    config: Config | None
    faults: tuple[tuple[str, str], ...] = ()
    warnings: tuple[Caution, ...] = ()  # settings that are valid but probably a mistake

    def as_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        faults = [{"place": place, "text": text} for place, text in self.faults]
        warnings = [{**warning._asdict(), "mend": warning.fix} for warning in self.warnings]  # mend: until 0.2
        runs = summary(self.config) if self.config else None
        return {"ok": not self.faults, "faults": faults, "warnings": warnings, "runs": runs}


def check(file: Path | str | None, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> Checked:
    """Check the settings of a file, the environment and flags, as `kproxy run` would have them."""
    try:
        config = load(file, environment, flags)
    except ConfigError as fault:
        return Checked(None, fault.faults)
    faults = list(_unreadable(config, environment))
    # An unreadable file causes a fault in building too; the reason is the better text.
    unread = {place.partition(":")[0] for place, _ in faults}
    faults += [fault for fault in asyncio.run(_built(config)) if fault[0].partition(":")[0] not in unread]
    if faults:
        return Checked(None, tuple(faults))
    return Checked(config, warnings=tuple(cautions(config)))


async def _built(config: Config) -> list[tuple[str, str]]:
    """Return the faults in building the parts of a kproxy; nothing is started."""
    return await Server(config.model_copy(update={"record": None, "audit": None})).preflight()


def _unreadable(config: Config, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the faults of files that cannot be read, and of variables that are not set."""
    for cluster in config.clusters:
        for path, value in _leaves(cluster):
            name = path.rpartition(".")[2]
            place = f"{cluster.name}: {path}"
            if isinstance(value, Path):
                reason = _why_unkept(value, cluster.name) if name == "ports_file" else _why_unreadable(value)
                if reason:
                    yield place, f"{value} {reason}"
            elif name == "token_command[0]" and shutil.which(str(value)) is None:
                yield place.removesuffix("[0]"), f"{value} is no program that this user may run"
            elif name.endswith(_SECRET_SOURCES) and isinstance(value, str) and value not in environment:
                yield place, f"the variable {value} is not set"
    for path, value in _leaves(config):
        if isinstance(value, Path) and path not in _WRITTEN:
            reason = _why_unreadable(value)
            if reason:
                yield path, f"{value} {reason}"
    for name in _WRITTEN:
        value = _setting(config, name)
        if value is not None and str(value) != "stderr":
            folder = Path(value).parent if name == "audit" else Path(value)
            if name == "audit" and Path(value).is_dir():
                yield name, f"{value} is a folder: name a file in it"
            if name == "audit" and Path(value).exists():
                if not os.access(value, os.W_OK):
                    yield name, f"{value} cannot be written to by this user: see ls -l {value}"
                continue
            while not folder.exists() and folder != folder.parent and name != "audit":
                folder = folder.parent
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                yield name, f"{value} cannot be written to: {folder} is no folder that this user may write to"


def _setting(config: Config, path: str) -> Any:
    """Return a value by its place; None if its table is missing."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _why_unreadable(path: Path) -> str:
    try:
        with open_regular(path) as file:
            file.read(1)
    except OSError as fault:
        return f"cannot be read: {fault.strerror or fault}"
    return ""


def _why_unkept(path: Path, cluster: str) -> str:
    """Return why ports cannot be kept in a file, or ""; the file may not exist yet."""
    try:
        read(path, cluster)
    except OSError as fault:
        return f"cannot be read: {fault.strerror or fault}"
    except NotOurs as fault:
        return f"is not used: {fault}; remove it or name another"
    if not os.access(path.absolute().parent, os.W_OK):
        return f"cannot be written: {path.absolute().parent} is no folder that this user may write to"
    return ""


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every single value below a table, with its place; for the whole configuration without its clusters."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            if name != "clusters":
                yield from _leaves(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, tuple) and not isinstance(value, Address):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}[{number}]")
    else:
        yield path, value


def summary(config: Config) -> dict[str, Any]:
    """Return the settings as plain values: no secrets, and only the names of files."""
    return {
        "admin": str(Address(config.admin.host or LOOPBACK, config.admin.port)) if config.admin else None,
        "drain": {"delay_s": config.drain_delay_s, "timeout_s": config.drain_timeout_s},
        "max_connections": config.max_connections,
        "record": str(config.record) if config.record else None,
        "flight": str(config.flight.folder) if config.flight else None,
        "audit": config.audit,
        "log_level": config.log_level,
        "clusters": [_cluster(cluster) for cluster in config.clusters],
        "zookeeper": [
            {"name": each.name, "listen": str(each.listen), "servers": [str(server) for server in each.servers]}
            for each in config.zookeeper
        ],
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "listen": str(cluster.listen),
        "route": cluster.route,
        "broker_ports": _broker_ports(cluster),
        "advertise": cluster.advertised,
        "bootstrap": [str(address) for address in cluster.bootstrap],
        "detail": cluster.detail,
        "tls": _tls(cluster),
        "upstream_tls": _upstream_tls(cluster),
        "login": cluster.login.mechanism if cluster.login else None,
        "authentication": list(cluster.authentication.mechanisms) if cluster.authentication else None,
        "policy": _policy(cluster),
        "limits": cluster.limits.model_dump(mode="json", exclude_defaults=True),
        "proxy_protocol": {"in": cluster.accept_proxy_protocol, "out": cluster.proxy_protocol},
    }


def _broker_ports(cluster: Cluster) -> list[str]:
    if cluster.route in ("sidecar", "sni", "transparent"):
        return ["the port of listen"]
    if cluster.brokers:
        return [
            f"{entry.ports.start}-{entry.ports.stop - 1} for "
            + (f"brokers {entry.declared.start}-{entry.declared.stop - 1}" if entry.declared else "any brokers")
            for entry in cluster.brokers
            if entry.port is not None
        ]
    base = cluster.broker_port_base or cluster.listen.port + 1
    return [f"{base} + node id"]


def _tls(cluster: Cluster) -> dict[str, Any] | None:
    tls = cluster.tls
    if tls is None:
        return None
    return {
        "certificate": str(tls.certificate),
        "client_certificates": tls.client_certificates,
        "min_version": tls.min_version,
    }


def _upstream_tls(cluster: Cluster) -> dict[str, Any] | None:
    tls = cluster.upstream_tls
    if tls is None:
        return None
    return {
        "ca": str(tls.ca) if tls.ca else "of the system",
        "certificate": str(tls.certificate) if tls.certificate else None,
        "verify_hostname": tls.verify_hostname,
        "min_version": tls.min_version,
    }


def _policy(cluster: Cluster) -> dict[str, Any] | None:
    if not (cluster.policy or cluster.read_only or cluster.policy_default):
        return None
    default = default_of(cluster.policy, cluster.policy_default)
    return {"rules": len(cluster.policy), "default": default, "read_only": cluster.read_only}
