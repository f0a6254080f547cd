"""Several clusters in one capture, or in the captures of one run, are distinguished; listeners of one cluster are not
taken for several."""

import socket
from uuid import UUID

import pyarrow.parquet as pq
import pytest

from kproxy.convert import job
from kproxy.convert.processes import convert
from kproxy.protocol import codec
from kproxy.protocol.apis import BROKER_REGISTRATION, INCONSISTENT_CLUSTER_ID, METADATA, VOTE
from tests.capture import packet
from tests.capture.connections.test_flows import Wire, answer, request


def metadata(number, brokers, cluster_id, *, topic="orders", version=2, client_id="me"):
    """The frames of a Metadata request and its response; brokers: host -> node id, all on port 9092."""
    header = {"requestApiKey": METADATA, "requestApiVersion": version, "correlationId": number, "clientId": client_id}
    asked = codec.encode_request(header, {"topics": None if version else []})
    first = min(brokers.values())
    partition = {"partitionIndex": 0, "leaderId": first, "replicaNodes": [first], "isrNodes": [first], "errorCode": 0}
    body = {
        "brokers": [{"nodeId": node, "host": host, "port": 9092, "rack": None} for host, node in brokers.items()],
        "topics": [{"errorCode": 0, "name": topic, "isInternal": False, "partitions": [partition]}],
        "clusterId": cluster_id,
        "controllerId": first,
    }
    response = codec.encode_response(METADATA, version, {"correlationId": number}, body)
    return [len(frame).to_bytes(4) + frame for frame in (asked, response)]


class Talk(Wire):
    """One connection, from a client's port to a broker's address."""

    def __init__(self, port, broker, client_id="me"):
        super().__init__(client=(packet.CLIENT[0], port))
        self.ends = (self.ends[0], (socket.inet_aton(broker), 9092))
        self.client_id = client_id
        # sequence numbers of its own: otherwise it would be taken for another connection captured twice
        self.next = [1000 * port, 2000 * port]
        self.shake()

    def metadata(self, number, *arguments, **more):
        asked, answered = metadata(number, *arguments, client_id=self.client_id, **more)
        self.send(0, asked).send(1, answered)
        return self

    def vote(self, number, cluster_id, error=0):
        return self.exchange(number, VOTE, {"clusterId": cluster_id, "topics": []}, {"errorCode": error, "topics": []})

    def registration(self, number, cluster_id):
        asked = {"brokerId": 1, "clusterId": cluster_id, "incarnationId": UUID(int=7), "rack": None}
        answered = {"throttleTimeMs": 0, "errorCode": 0, "brokerEpoch": 5}
        return self.exchange(number, BROKER_REGISTRATION, asked | {"listeners": [], "features": []}, answered)

    def exchange(self, number, key, asked, answered):
        """A request of version 0 and its response."""
        ids = {"correlationId": number}
        header = {"requestApiKey": key, "requestApiVersion": 0, "clientId": self.client_id}
        frames = codec.encode_request(header | ids, asked), codec.encode_response(key, 0, ids, answered)
        for side, frame in enumerate(frames):
            self.send(side, len(frame).to_bytes(4) + frame)
        return self

    def versions(self, number):
        self.send(0, request(number, client_id=self.client_id)).send(1, answer(number))
        return self


def converted(folder, captures, **settings):
    """(clusters of each client port by capture, kinds of quality, rows of the table topology); settings: of a Job."""
    paths = []
    for name, talks in captures.items():
        packets = [each for talk in talks for each in talk.packets]
        path = folder / f"{name}.pcap"
        path.write_bytes(packet.pcap([(number * 1_000_000, each) for number, each in enumerate(packets)]))
        paths.append(path)
    out = folder / "tables"
    summary = convert(paths, out, job.Settings(**settings))
    found, tables = {}, {}
    for name in ("connections", "exchanges", "topology"):
        tables[name] = pq.read_table(out / name).to_pylist()
    for row in tables["connections"]:
        found.setdefault(row["source"].removesuffix(".pcap"), {})[row["client_port"]] = row["cluster"]
    of_connection = {(row["source"], row["connection"]): row["cluster"] for row in tables["connections"]}
    assert all(row["cluster"] == of_connection[row["source"], row["connection"]] for row in tables["exchanges"])
    kinds = {source: {row.kind: row.count for row in quality} for source, quality in summary.quality.items()}
    return found, kinds, tables["topology"]


EAST, WEST = {"10.0.1.1": 1, "10.0.1.2": 2}, {"10.0.2.1": 1, "10.0.2.2": 2}


def by_ids():
    return [
        Talk(1, "10.0.1.1").metadata(1, EAST, "east").metadata(2, EAST, "east"),
        Talk(2, "10.0.2.1").metadata(1, WEST, "west").metadata(2, WEST, "west"),
        Talk(3, "10.0.1.2").versions(1),
        Talk(4, "10.0.2.2").versions(1),
        Talk(5, "10.0.9.9", "stranger").versions(1),
    ]


def by_clients():
    """As with MirrorMaker: a client id for each cluster; a client id that connects to both identifies neither."""
    return [
        Talk(1, "10.0.1.1", "in").versions(0).metadata(1, {"kafka-1.east": 1}, "east"),
        Talk(2, "10.0.2.1", "out").versions(0).metadata(1, {"kafka-1.west": 1}, "west"),
        Talk(3, "10.0.3.3", "in").versions(1),
        Talk(4, "10.0.4.4", "out").versions(1),
        Talk(5, "10.0.1.1").versions(1),
        Talk(6, "10.0.2.1").versions(1),
        Talk(7, "10.0.5.5").versions(1),
    ]


def by_controllers():
    """Metadata names brokers alone, which have other addresses than controllers of KRaft."""
    return [
        Talk(1, "10.0.1.1").versions(0).metadata(1, EAST, "east"),
        Talk(2, "10.0.2.1").versions(0).metadata(1, WEST, "west"),
        Talk(3, "10.0.3.1", "raft-client-1").versions(0).vote(1, "east"),
        Talk(4, "10.0.4.1", "1").versions(0).registration(1, "west"),
        Talk(5, "10.0.4.1", "alter").versions(0).vote(1, "east", INCONSISTENT_CLUSTER_ID).versions(2),
        Talk(6, "10.0.5.1", "raft-client-2").versions(0).vote(1, None).vote(2, ""),
    ]


def without_ids(nodes):
    west = dict(zip(WEST, nodes, strict=True))
    return [
        Talk(1, "10.0.1.1").metadata(1, EAST, None, version=0),
        Talk(2, "10.0.2.1").metadata(1, west, None, version=0),
        Talk(3, "10.0.2.2").metadata(1, west, None, version=0),
    ]


def by_listeners():
    return [Talk(1, "10.0.1.1").metadata(1, EAST, "one"), Talk(2, "10.0.2.1").metadata(1, WEST, "one")]


def at_one_address():
    """As behind something that passes the requests of one connection on to two clusters."""
    return [Talk(1, "10.0.1.1").metadata(1, EAST, "east").metadata(2, EAST, "west")]


def rebuilt():
    """A cluster that was built anew at its addresses; only the new one has a connection without Metadata."""
    return [
        Talk(1, "10.0.1.1", "before").metadata(1, EAST, "old").metadata(2, EAST, "old"),
        Talk(2, "10.0.1.1", "after").metadata(1, EAST, "new").metadata(2, EAST, "new"),
        Talk(3, "10.0.1.1", "more").metadata(1, EAST, "new"),
        Talk(4, "10.0.1.2", "after").versions(1),
        Talk(5, "10.0.1.2", "stranger").versions(1),
    ]


def behind_nat():
    """Two clusters that advertise the same addresses, each behind ports of its own."""
    talks = []
    for port, outside, cluster_id in ((1, 19092, "east"), (2, 29092, "west")):
        talk = Talk(port, "127.0.0.9", cluster_id)
        talk.ends = (talk.ends[0], (talk.ends[1][0], outside))
        talk.packets.clear()
        talk.next = [1000 * port, 2000 * port]
        talks.append(talk.shake().metadata(1, EAST, cluster_id).metadata(2, EAST, cluster_id))
    return talks


def test_cluster_ids_distinguish_clusters_and_each_has_its_topology(tmp_path):
    found, kinds, topology = converted(tmp_path, {"both": by_ids()})
    assert found == {"both": {1: "east", 2: "west", 3: "east", 4: "west", 5: "default"}}
    assert (kinds["both.pcap"]["clusters"], kinds["both.pcap"]["cluster_unknown"]) == (2, 1)
    assert {(row["cluster"], row["host"]) for row in topology if row["kind"] == "broker"} == {
        *(("east", host) for host in EAST),
        *(("west", host) for host in WEST),
    }
    assert not {row["change"] for row in topology} & {"gone", "elected"}


@pytest.mark.parametrize("brokers", (1, 2))
def test_brokers_that_no_response_names_are_counted(tmp_path, brokers):
    """As in a capture that begins behind the clients' first Metadata: they may be one cluster or several."""
    found, kinds, _ = converted(tmp_path, {"some": [Talk(n, f"10.0.{n}.1").versions(1) for n in (1, 2)[:brokers]]})
    assert set(found["some"].values()) == {"default"}
    assert kinds["some.pcap"].get("clusters_not_shown", 0) == (2 if brokers == 2 else 0)


def test_a_controller_of_kraft_does_not_show_which_brokers_are_one_cluster(tmp_path):
    talks = [Talk(1, "10.0.1.1").versions(1), Talk(2, "10.0.2.1").versions(0).vote(1, "east")]
    assert converted(tmp_path, {"some": talks})[1]["some.pcap"]["clusters_not_shown"] == 2


def test_brokers_that_advertise_host_names_are_assigned_by_their_clients(tmp_path):
    labels = {1: "east", 2: "west", 3: "east", 4: "west", 5: "east", 6: "west", 7: "default"}
    assert converted(tmp_path, {"both": by_clients()})[0]["both"] == labels


def test_controllers_of_kraft_have_the_cluster_of_the_requests_that_they_accept(tmp_path):
    found, _, _ = converted(tmp_path, {"a": by_controllers()})
    assert found["a"] == {1: "east", 2: "west", 3: "east", 4: "west", 5: "west", 6: "default"}


@pytest.mark.parametrize("nodes", ((11, 12), (1, 12)))
def test_without_cluster_ids_brokers_that_name_each_other_are_one_cluster(tmp_path, nodes):
    """A node id on both sides leaves it unclear: it may be another listener of the same broker."""
    labels = {1: "10.0.1.1:9092", 2: "10.0.2.1:9092", 3: "10.0.2.1:9092"}
    found, kinds, _ = converted(tmp_path, {"old": without_ids(nodes)})
    assert found["old"] == (labels if nodes == (11, 12) else dict.fromkeys(labels, "default"))
    # the unclear case is counted
    assert kinds["old.pcap"].get("clusters_unclear", 0) == (0 if nodes == (11, 12) else 2)


def test_listeners_of_one_cluster_are_one_cluster(tmp_path):
    found, kinds, _ = converted(tmp_path, {"one": by_listeners()})
    assert set(found["one"].values()) == {"default"}
    assert not kinds["one.pcap"].keys() & {"clusters", "clusters_as_one", "clusters_unclear"}


def test_clusters_at_the_same_addresses_in_one_capture_are_counted(tmp_path):
    found, kinds, _ = converted(tmp_path, {"one": at_one_address()})
    assert set(found["one"].values()) == {"default"} and kinds["one.pcap"]["clusters_as_one"] == 1


def test_connections_to_an_address_of_two_clusters_have_the_cluster_of_their_answers(tmp_path):
    found, kinds, topology = converted(tmp_path, {"one": rebuilt()})
    assert found["one"] == {1: "old", 2: "new", 3: "new", 4: "new", 5: "default"}
    of_one = kinds["one.pcap"]
    assert (of_one["clusters"], of_one["cluster_unknown"], of_one.get("clusters_as_one")) == (2, 1, None)
    assert {row["change"] for row in topology} == {"appeared", "created"}  # nothing of one is lost by the other
    assert sum(row["kind"] == "broker" for row in topology) == 4
    again, _, _ = converted(tmp_path, {"two": rebuilt()}, append=True)  # the names stay
    assert again == {"one": found["one"], "two": found["one"]}


def test_clusters_that_advertise_the_same_addresses_behind_other_ports_are_distinguished(tmp_path):
    found, _, topology = converted(tmp_path, {"one": behind_nat()})
    assert found["one"] == {1: "east", 2: "west"}
    assert {row["change"] for row in topology} == {"appeared", "created"}


def test_captures_of_one_run_may_be_of_several_clusters_at_the_same_addresses(tmp_path):
    """No capture loses rows that it has when it is converted alone."""
    captures = {
        "a": [Talk(1, "10.0.1.1").metadata(1, EAST, "east"), Talk(2, "10.0.1.2").versions(1)],
        "b": [Talk(1, "10.0.1.1").metadata(1, EAST, "west"), Talk(2, "10.0.1.2").versions(1)],
    }
    found, _, together = converted(tmp_path, captures)
    assert found == {"a": {1: "east", 2: "east"}, "b": {1: "west", 2: "west"}}
    alone = []
    for name, talks in captures.items():
        (tmp_path / name).mkdir()
        alone += converted(tmp_path / name, {name: talks})[2]
    assert sorted((row["source"], row["kind"], row["change"]) for row in together) == sorted(
        (row["source"], row["kind"], row["change"]) for row in alone
    )


@pytest.mark.parametrize("version", (2, 0))
def test_added_captures_are_distinguished_from_those_of_earlier_runs(tmp_path, version):
    """By cluster ids, or by which brokers name each other; a cluster keeps the name that it has in earlier tables."""
    named = "west" if version else "10.0.2.1:9092"
    west = {host: node + 10 for host, node in WEST.items()}

    def talks(brokers, cluster_id, stranger):
        first = Talk(1, min(brokers)).metadata(1, brokers, cluster_id if version else None, version=version)
        return [first, Talk(2, max(brokers)).versions(1), Talk(3, stranger).versions(1)]

    def of(name):
        return dict.fromkeys((1, 2, 3), name)

    wests, easts = talks(west, "west", "10.0.8.8"), talks(EAST, "east", "10.0.9.9")
    assert converted(tmp_path, {"a": easts})[0] == {"a": of("default")}
    found, _, topology = converted(tmp_path, {"b": wests}, append=True)
    assert found == {"a": of("default"), "b": of(named)}
    assert {(row["source"], row["cluster"]) for row in topology} == {("a.pcap", "default"), ("b.pcap", named)}
    converted(tmp_path, {"a": easts}, append=True)  # again, as for a capture that has grown
    found, _, _ = converted(tmp_path, {"c": wests, "d": easts}, append=True)
    assert found == {"a": of("default"), "b": of(named), "c": of(named), "d": of("default")}
    alone, _, _ = converted(tmp_path, {"b": wests}, append=True, cluster="mine")  # a name of its own
    assert alone == found | {"b": of("mine")}


def test_a_connection_in_two_captures_is_counted(tmp_path):
    """Captured at both ends; a connection that reuses the ports is another one."""
    again = Talk(1, "10.0.1.1").versions(1)
    again.packets.clear()
    again.next = [77, 99]
    again.shake().versions(1)
    captures = {
        "client": [Talk(1, "10.0.1.1").versions(1), Talk(2, "10.0.1.1").versions(1)],
        "broker": [Talk(1, "10.0.1.1").versions(1)],
        "later": [again],
    }
    _, kinds, _ = converted(tmp_path, captures)
    assert {source: kind.get("in_two_captures") for source, kind in kinds.items()} == {
        "client.pcap": None,
        "broker.pcap": 1,
        "later.pcap": None,
    }


def test_a_connection_in_two_captures_is_found_wherever_each_begins(tmp_path):
    """Consecutive files of one capture do not count: they hold one part of the connection each."""
    talk = Talk(1, "10.0.1.1")
    for number in range(20):
        talk.versions(number)
    packets = [(number * 1_000_000, data) for number, data in enumerate(talk.packets)]
    cuts = {"whole": slice(None), "late": slice(20, None), "early": slice(0, 25), "first": slice(0, 20)}
    for name, cut in cuts.items():
        (tmp_path / f"{name}.pcap").write_bytes(packet.pcap(packets[cut]))
    for number, (names, counted) in enumerate(
        ((("whole", "late"), 1), (("late", "early"), 1), (("early", "late"), 1), (("first", "late"), 0))
    ):
        paths = [tmp_path / f"{name}.pcap" for name in names]
        summary = convert(paths, tmp_path / f"tables{number}", job.Settings())
        first, second = (summary.quality[path.name] for path in paths)
        assert (first.count("in_two_captures"), second.count("in_two_captures")) == (0, counted), names
