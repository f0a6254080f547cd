"""`kproxy compat`: kproxy's treatment of each API of the clusters, and the versions that known clients would lose.

It sends ApiVersions to every broker, on the way that clients take. The clients are read from a running kproxy's
/metrics (KIP-511: software and version) or from tables (versions that they used). It changes nothing. Bounded by
MAX_BROKERS and connect_timeout_s. Refuses to know how results are shown.
"""

import asyncio
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kproxy.checks.offers import Compared, Offers, compare, release_of, title
from kproxy.errors import ConfigError, UpstreamError
from kproxy.metrics import Metrics
from kproxy.protocol.schema import schema, served_versions
from kproxy.proxy.cluster.questions.question import ask_brokers, ask_versions
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.process.cluster import ClusterProxy
from kproxy.proxy.relay.pressure import Pressure
from kproxy.proxy.sockets.listeners import Gate
from kproxy.proxy.sockets.poller import Poller

MAX_BROKERS = 512
IN_PARALLEL = 32
MAX_METRICS_BYTES = 64 * 1024 * 1024
JAVA = "apache-kafka-java"  # its version is a release of Kafka, which determines its API versions


class Broker(NamedTuple):
    node_id: int | None  # None: a bootstrap address, if no broker is named
    address: Address
    offers: Offers | None
    fault: str  # why it did not answer, or ""


class Client(NamedTuple):
    """A kind of client. used: API key -> the highest version that it used, or None if unknown."""

    name: str
    software: str
    software_version: str
    used: Mapping[int, int] | None


class Loss(NamedTuple):
    """The loss of a client: it supports versions of an API up to `knows`, and gets those up to `gets`."""

    client: Client
    api: str
    knows: int
    gets: int | None  # None: the API is hidden


class Compatibility(NamedTuple):
    cluster: str
    brokers: tuple[Broker, ...]
    apis: tuple[Compared, ...]
    differing: tuple[str, ...]  # APIs with different versions among the brokers
    release: str | None  # of Kafka, by the brokers' versions
    losses: tuple[Loss, ...]
    clients: int  # number of kinds of clients
    unknown: tuple[str, ...]  # software with unknown versions

    @property
    def lost(self) -> list[Compared]:
        """The APIs with fewer versions for clients than brokers have."""
        return [one for one in self.apis if one.treatment in ("capped", "hidden")]

    def as_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "nothing_lost": not self.lost and not self.losses,
            "release": self.release,
            "brokers": [
                {
                    "node_id": one.node_id,
                    "address": str(one.address),
                    "answered": one.offers is not None,
                    "fault": one.fault,
                }
                for one in self.brokers
            ],
            "differing": list(self.differing),
            "apis": [one._asdict() for one in self.apis],
            "losses": [
                {
                    "client": one.client.name,
                    "software": one.client.software,
                    "software_version": one.client.software_version,
                    "api": one.api,
                    "knows": one.knows,
                    "gets": one.gets,
                }
                for one in self.losses
            ],
            "clients": self.clients,
            "unknown_software": list(self.unknown),
        }


def compatibility(config: Config, clients: Sequence[Client] = ()) -> list[Compatibility]:
    """Ask the brokers of every cluster. Raises UpstreamError if none of a cluster answers."""
    return asyncio.run(_compatibility(config, clients))


async def _compatibility(config: Config, clients: Sequence[Client]) -> list[Compatibility]:
    poller = Poller(asyncio.get_running_loop())
    worker = Worker(config, Gate(1), poller, Pressure(memoryview(b"")), 0, Metrics(), ())
    try:
        return list(await asyncio.gather(*(_of_cluster(worker, cluster, clients) for cluster in config.clusters)))
    finally:
        poller.close()


async def _of_cluster(worker: Worker, cluster: Cluster, clients: Sequence[Client]) -> Compatibility:
    connector = ClusterProxy(worker, cluster).connector
    limit = asyncio.Semaphore(IN_PARALLEL)
    fault: UpstreamError | None = None
    places: list[tuple[int | None, Address]] = []
    for address in cluster.bootstrap:
        try:
            named = await ask_brokers(address, connector)
        except UpstreamError as refused:
            fault = refused
            continue
        places = [*(named or {}).items()] or [(None, one) for one in cluster.bootstrap]
        break
    if not places:
        raise fault or UpstreamError(f"cluster {cluster.name} names no brokers")

    async def ask(node_id: int | None, address: Address) -> Broker:
        async with limit:
            try:
                return Broker(node_id, address, await ask_versions(address, connector), "")
            except UpstreamError as refused:
                return Broker(node_id, address, None, str(refused))

    brokers = await asyncio.gather(*(ask(*place) for place in places[:MAX_BROKERS]))
    offers = [one.offers for one in brokers if one.offers is not None]
    if not offers:
        raise UpstreamError(f"none of the {len(brokers)} brokers answers ApiVersions: {brokers[0].fault}")
    together = {
        key: (min(one[key][0] for one in offers if key in one), max(one[key][1] for one in offers if key in one))
        for key in {key for one in offers for key in one}
    }
    differing = sorted(key for key in together if any(one.get(key) != offers[0].get(key) for one in offers))
    apis = compare(together)
    losses, unknown = _losses(apis, clients)
    return Compatibility(
        cluster.name,
        tuple(brokers),
        tuple(apis),
        tuple(map(title, differing)),
        release_of(together),
        tuple(losses),
        len(clients),
        tuple(sorted(unknown)),
    )


def _losses(apis: Sequence[Compared], clients: Sequence[Client]) -> tuple[list[Loss], set[str]]:
    """Return the losses of clients, and the software with unknown versions."""
    losses, unknown = [], set()
    for client in clients:
        knows = client.used if client.used is not None else _speaks(client)
        if knows is None:
            unknown.add(f"{client.software} {client.software_version}".strip())
            continue
        for one in apis:
            highest = knows.get(one.key)
            if highest is None or one.treatment not in ("capped", "hidden") or highest < one.brokers[0]:
                continue
            if one.offered is None or highest > one.offered[1]:
                losses.append(Loss(client, one.name, highest, one.offered[1] if one.offered else None))
    return losses, unknown


def _speaks(client: Client) -> dict[int, int] | None:
    """Return API key -> the highest version of the Java client of a release; None for other software."""
    if client.software != JAVA:
        return None
    line = ".".join(client.software_version.split(".")[:2])
    for release, served in served_versions().items():
        if release.startswith(f"{line}."):
            return {key: versions[-1] for key, versions in served.items() if len(versions)}
    return None


# --- clients ---------------------------------------------------------------------------------------------------------


def clients_of(source: str) -> list[Client]:
    """Return the kinds of clients that a running kproxy (http://HOST:PORT) or tables (a folder) have seen.

    Raises ConfigError if they cannot be read.
    """
    if source.startswith(("http://", "https://")):
        return _clients_of_metrics(source)
    return _clients_of_tables(Path(source))


def _clients_of_metrics(url: str) -> list[Client]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urllib.request.urlopen(f"{url.rstrip('/').removesuffix('/metrics')}/metrics", timeout=10) as answer:
            text = answer.read(MAX_METRICS_BYTES).decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError) as fault:
        raise ConfigError([("--clients", f"{url}/metrics cannot be read: {fault}; is that kproxy's admin?")]) from None
    found = {
        (sample.labels.get("client_id", ""), sample.labels["software_name"], sample.labels["software_version"])
        for family in families
        for sample in family.samples
        if sample.name == "kproxy_client_info"
    }
    return [Client(*one, None) for one in sorted(found)]


def _clients_of_tables(folder: Path) -> list[Client]:
    import pyarrow.dataset

    found: dict[tuple[str, str, str], dict[int, int]] = {}
    try:
        who = pyarrow.dataset.dataset(folder / "connections").to_table(
            ["source", "connection", "software_name", "software_version"]
        )
        used = pyarrow.dataset.dataset(folder / "exchanges").to_table(
            ["source", "connection", "client_id", "api_key", "api_version"]
        )
    except (OSError, ValueError) as fault:
        text = f"{folder} has no tables of kproxy convert or of --record ({fault})"
        raise ConfigError([("--clients", text)]) from None
    keys = ["source", "connection", "client_id", "api_key"]
    names = {
        (row["source"], row["connection"]): (row["software_name"] or "", row["software_version"] or "")
        for row in who.to_pylist()
    }
    for row in used.group_by(keys).aggregate([("api_version", "max")]).to_pylist():
        software = names.get((row["source"], row["connection"]), ("", ""))
        versions = found.setdefault((row["client_id"] or "", *software), {})
        if row["api_key"] in schema().apis:
            versions[row["api_key"]] = max(versions.get(row["api_key"], -1), row["api_version_max"])
    return [Client(*one, versions) for one, versions in sorted(found.items())]
