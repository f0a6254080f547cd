"""Clusters that `kproxy watch` distinguishes, like `convert`, from the first response that identifies them."""

import asyncio
from collections import Counter

import pyarrow.parquet as pq
import pytest

from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import Quality
from kproxy.metrics.scrape.collector import registry_of
from kproxy.proxy.config.addresses import Address
from kproxy.watch.clusters import MAX_CLUSTERS
from kproxy.watch.watcher import Settings, Watcher
from tests.capture import packet
from tests.convert.test_clusters import (
    EAST,
    WEST,
    Talk,
    at_one_address,
    behind_nat,
    by_clients,
    by_controllers,
    by_ids,
    by_listeners,
    converted,
    rebuilt,
    without_ids,
)


class Watched:
    """A `kproxy watch` that is given packets without a socket.

    parts: lists of connections, or functions that return them, captured one after the other.
    """

    def __init__(self, folder, *parts, detail="headers", records=True):
        self.tables = folder / "watched"
        self.open = []  # connections by cluster, after each part
        tables = self.tables if records else None
        settings = Settings(("far",), (), admin=Address("", 1), record=tables, detail=detail)
        asyncio.run(self._run(folder / "part.pcap", parts, settings))

    async def _run(self, path, parts, settings):
        watcher = Watcher(settings)
        watcher._start_recorder()
        watcher._start_flows()
        number = 0
        for part in parts:
            talks = part() if callable(part) else part
            packets = [each for talk in talks for each in talk.packets]
            path.write_bytes(packet.pcap([((number + at) * 1_000_000, each) for at, each in enumerate(packets)]))
            number += len(packets)
            for window in Capture([path], Quality()).windows():
                watcher._flows.window(window)
            watcher._connections.hand_on()
            watcher._connections.name_clusters()
            self.open.append(Counter(connection.info.cluster for connection in watcher._connections))
        self.watch = watcher._api_watch({})
        watcher._flows.finish()
        watcher._connections.hand_on()
        watcher._report()
        await watcher._tasks.cancel()
        if watcher._link is not None:
            await asyncio.to_thread(watcher._feed.close)
            await watcher._link.close()
        if watcher._recorder is not None:
            await asyncio.to_thread(watcher._recorder.close)
        self.samples = [sample for family in registry_of(watcher.metrics).collect() for sample in family.samples]

    def rows(self, table):
        return pq.read_table(self.tables / table).to_pylist()

    @property
    def clusters(self):
        """Return the cluster of each connection at its end, by client port."""
        return {row["client_port"]: row["cluster"] for row in self.rows("connections")}

    @property
    def kinds(self):
        return {row["kind"]: row["count"] for row in self.rows("quality")}

    def total(self, name):
        found = Counter()
        for sample in self.samples:
            if sample.name == name:
                found[sample.labels["cluster"]] += sample.value
        return +found


@pytest.mark.parametrize(
    "talks",
    (
        by_ids(),
        by_clients(),
        without_ids((11, 12)),
        without_ids((1, 12)),
        by_listeners(),
        at_one_address(),
        rebuilt(),
        behind_nat(),
    ),
    ids=("ids", "clients", "no_ids", "no_ids_same_nodes", "listeners", "one_address", "rebuilt", "nat"),
)
def test_connections_get_the_same_clusters_as_in_convert(tmp_path, talks):
    found, kinds, _ = converted(tmp_path, {"it": talks})
    watched = Watched(tmp_path, talks)
    assert watched.clusters == found["it"]
    for kind in ("clusters", "cluster_unknown", "clusters_as_one"):
        assert watched.kinds.get(kind) == kinds["it.pcap"].get(kind), kind
    names = sorted(set(found["it"].values()) - {"default"}) or ["default"]
    assert sorted(watched.watch["clusters"]) == names
    assert watched.total("kproxy_connections_total").total() == len(talks)
    assert watched.total("kproxy_disconnects_total").total() == len(talks)


def test_controllers_of_kraft_get_the_same_clusters_as_in_convert(tmp_path):
    """Only if bodies are read: see docs/watch.md."""
    found, _, _ = converted(tmp_path, {"it": by_controllers()})
    assert Watched(tmp_path, by_controllers(), detail="topics").clusters == found["it"]


@pytest.mark.parametrize(("detail", "records"), (("headers", False), ("headers", True), ("topics", True)))
def test_rows_before_the_second_cluster_appears_keep_the_given_name(tmp_path, detail, records):
    """Rows and counters of exchanges; a connection is counted once, and it ends where it belongs."""
    first = Talk(1, "10.0.1.1").metadata(1, EAST, "east")
    second = Talk(2, "10.0.2.1").metadata(1, WEST, "west")
    watched = Watched(tmp_path, [first], [second], lambda: [later(first, 2)], detail=detail, records=records)
    assert watched.open == [{"default": 1}, {"east": 1, "west": 1}, {"east": 1, "west": 1}]
    if records:
        rows = sorted((row["time"], row["cluster"]) for row in watched.rows("exchanges"))
        assert [cluster for _, cluster in rows] == ["default", "west", "east"]
    assert watched.total("kproxy_requests_total") == {"default": 1, "west": 1, "east": 1}
    assert watched.total("kproxy_connections_total") == {"default": 2}
    assert watched.total("kproxy_disconnects_total") == {"east": 1, "west": 1}


def later(talk, number):
    """More of a connection, without what was captured before."""
    talk.packets.clear()
    return talk.metadata(number, EAST, "east")


def test_clusters_beyond_the_given_names_are_counted(tmp_path):
    talks = [
        Talk(number, f"10.0.{number}.1").metadata(1, {f"10.0.{number}.1": 1}, f"id{number}")
        for number in range(1, MAX_CLUSTERS + 4)
    ]
    watched = Watched(tmp_path, talks)
    assert watched.kinds["clusters_as_one"] == 3 and watched.kinds["clusters"] == MAX_CLUSTERS
    assert Counter(watched.clusters.values())["default"] == 3
