"""Faults between settings whose single values are all valid, found without a socket.

Ports that overflow or overlap, an upstream that is kproxy itself, addresses that no client could dial. Each fault is
(place of the setting, problem and remedy). Refuses to resolve names and to open anything.
"""

from collections.abc import Iterator
from pathlib import Path

from kproxy.proxy.config.addresses import MAX_PORT, WILDCARDS, Address, leads_to
from kproxy.proxy.config.authentication import authentication_faults
from kproxy.proxy.config.login import login_faults
from kproxy.proxy.config.settings import ANY, BrokerPorts, Cluster


def cluster_faults(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield the faults of a cluster whose single values are all valid."""
    yield from _proxy_protocol_faults(cluster)
    yield from _sni_faults(cluster)
    if cluster.destinations and cluster.route != "transparent":
        yield "destinations", "is for route transparent: with others brokers alone say where they are; leave it out"
    template = cluster.advertised
    if cluster.login is not None:
        yield from login_faults(cluster.login, knows_clients=knows_clients(cluster))
    if cluster.authentication is not None:
        yield from authentication_faults(cluster.authentication)
    if cluster.route == "sidecar":
        if len(cluster.bootstrap) > 1:
            yield "bootstrap", "route sidecar has one upstream, the broker beside it; for several use route ports"
        if cluster.broker_port_base is not None:
            yield "broker_port_base", "route sidecar binds no broker ports; leave it out or use route ports"
        if cluster.brokers:
            yield "brokers", "route sidecar binds no broker ports; leave the table out or use route ports"
        return
    if cluster.route == "transparent":
        yield from _transparent_faults(cluster)
        return
    if cluster.route == "sni":
        return
    if cluster.advertise is None and cluster.listen.host in WILDCARDS:
        yield (
            "listen",
            f"clients cannot dial {cluster.listen}: say what they should, like --advertise 'kproxy.example:{{port}}'",
        )
    elif "{port" not in template and "{id" not in template:
        yield "advertise", f"{template!r} is the same for every broker: put {{port}} or {{id}} into it"
    if cluster.brokers and cluster.broker_port_base is not None:
        yield "broker_port_base", "brokers declares the ports already: keep one of the two"
    if not cluster.brokers and cluster.broker_port_base is None and cluster.listen.port == MAX_PORT:
        yield "listen", f"no port is left above {MAX_PORT} for the brokers: give --broker-port-base"
    yield from _any_faults(cluster)
    declared: set[int] = set()
    for number, entry in enumerate(cluster.brokers):
        path = f"brokers[{number}]"
        if entry.port is None:
            what = "stands for the first of these brokers" if entry.ids != ANY else "is given out first"
            yield f"{path}.port", f"is missing: the port that {what}"
        count = len(entry.declared) if entry.ids != ANY else entry.port_count or 1
        for name, first in (("port", entry.port or 1), ("advertise_port", entry.advertise_port or 1)):
            if count > MAX_PORT - first + 1:
                what = "ids" if entry.ids != ANY else "ports (port_count)"
                yield f"{path}.{name}", f"{count} {what} from port {first} on go beyond port {MAX_PORT}"
                break
        else:
            if not declared.isdisjoint(entry.declared):
                yield f"{path}.ids", f"node id {min(declared.intersection(entry.declared))} is declared twice"
            declared.update(entry.declared)


def _any_faults(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield the faults of entries with `ids = "any"`, and of settings that only such entries have."""
    path = ""
    for number, entry in enumerate(cluster.brokers):
        if entry.ids != ANY:
            yield from _for_any_alone(entry, f"brokers[{number}]")
            continue
        if path:
            yield f"brokers[{number}].ids", f"{path} is for any already: make one range of both"
        path = f"brokers[{number}]"
        if entry.port_count is None:
            yield f"{path}.port_count", "is missing: how many ports are given out, as many as there may be brokers"
        if entry.upstream is not None:
            yield f"{path}.upstream", "the cluster alone says where brokers are whose ids nobody knows; leave it out"


def _for_any_alone(entry: BrokerPorts, path: str) -> Iterator[tuple[str, str]]:
    for name in ("port_count", "ports_file"):
        if getattr(entry, name) is not None:
            yield f"{path}.{name}", 'is for ids = "any": declared ids have a port each, always the same; leave it out'


def _transparent_faults(cluster: Cluster) -> Iterator[tuple[str, str]]:
    for name in ("advertise", "broker_port_base", "brokers"):
        if getattr(cluster, name):
            yield name, "route transparent rewrites nothing: clients keep dialling brokers; leave it out"
    for name in ("authentication", "policy", "policy_default", "read_only"):
        if getattr(cluster, name):
            yield name, "route transparent passes what it cannot read, TLS too: it could keep nobody from anything"
    if cluster.telemetry is not None:
        yield (
            "telemetry",
            "route transparent changes no answer, so clients would not learn of it; leave it out",
        )
    for name in ("accept_proxy_protocol", "proxy_protocol", "tls"):
        if getattr(cluster, name):
            yield name, "with route transparent clients and brokers speak to each other, byte for byte; leave it out"


def _proxy_protocol_faults(cluster: Cluster) -> Iterator[tuple[str, str]]:
    if cluster.accept_proxy_protocol and not cluster.trusted_proxies:
        yield (
            "accept_proxy_protocol",
            "anybody could claim any address: name the balancers, like trusted_proxies = ['10.0.0.0/8']",
        )
    if cluster.trusted_proxies and not cluster.accept_proxy_protocol:
        yield "trusted_proxies", "means something only with accept_proxy_protocol = true"


def knows_clients(cluster: Cluster) -> bool:
    """Whether clients have principals, from a login or a certificate."""
    return cluster.authentication is not None or (cluster.tls is not None and cluster.tls.client_certificates != "none")


def _sni_faults(cluster: Cluster) -> Iterator[tuple[str, str]]:
    if cluster.route != "sni":
        for name in ("sni", "sni_bootstrap"):
            if getattr(cluster, name):
                yield name, "says nothing without route = 'sni'"
        return
    if cluster.tls is None:
        yield "route", "route sni reads from TLS which broker a client means: add [cluster.tls]"
    if cluster.sni is None:
        yield "sni", "is missing: the names of the brokers, like broker-{id}.kafka.example"
    elif cluster.advertise is not None and cluster.advertise.rpartition(":")[0].lower() != cluster.sni:
        yield "advertise", f"clients ask for the host that they dial: write {cluster.sni}:PORT, or leave it out"
    if cluster.broker_port_base is not None:
        yield "broker_port_base", "route sni has one port for all brokers; leave it out or use route ports"
    for number, entry in enumerate(cluster.brokers):
        if entry.ids == ANY:
            yield f"brokers[{number}].ids", "route sni has one port for all brokers, whatever their ids; leave it out"
            continue
        yield from _for_any_alone(entry, f"brokers[{number}]")
        for name in ("port", "advertise_port"):
            if getattr(entry, name) is not None:
                yield f"brokers[{number}].{name}", "route sni has one port for all brokers; leave it out"


def shared_faults(clusters: list[Cluster], admin: Address | None) -> Iterator[tuple[str, str]]:
    """Yield the faults between clusters: names, ports, and kproxy as its own upstream."""
    taken: dict[int, list[tuple[str, str]]] = {}  # port -> (host, owner)
    files: dict[Path, str] = {}  # ports_file -> its cluster
    reported: set[tuple[str, str]] = set()

    def take(host: str, port: int, owner: str) -> Iterator[tuple[str, str]]:
        holders = taken.setdefault(port, [])
        for other, whose in holders:
            clash = host == other or host in WILDCARDS or other in WILDCARDS
            if clash and (owner, whose) not in reported:
                reported.add((owner, whose))
                yield owner, f"{Address(host, port)} is taken by {whose}"
        holders.append((host, owner))

    if admin is not None and admin.port:
        yield from take(*admin, "admin")
    names: set[str] = set()
    for cluster in clusters:
        if cluster.name in names:
            yield "cluster", f"two are called {cluster.name!r}: give each a name of its own"
        names.add(cluster.name)
        if cluster.listen.port:
            yield from take(*cluster.listen, f"{cluster.name}: listen")
        for entry in cluster.brokers:
            for port in entry.ports:
                yield from take(cluster.listen.host, port, f"{cluster.name}: brokers")
            if entry.ports_file is not None:
                other = files.setdefault(entry.ports_file.absolute(), cluster.name)
                if other != cluster.name:
                    yield f"{cluster.name}: brokers", f"ports_file {entry.ports_file} is that of {other}: name another"
    for cluster in clusters:
        for upstream in cluster.bootstrap:
            for host, whose in taken.get(upstream.port, ()):
                if leads_to(upstream.host, host):
                    yield (
                        f"{cluster.name}: bootstrap",
                        f"{upstream} is kproxy itself ({whose}): give the brokers' addresses",
                    )
