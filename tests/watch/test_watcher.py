"""`kproxy watch` on real packets: metrics equal those of a proxy, and tables those of `convert`."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress

import pyarrow.parquet as pq
import pytest

import kproxy
from kproxy.capture.dissection.packets import SYN
from kproxy.convert import job
from kproxy.convert.processes import convert
from kproxy.insight.knowledge import APIS, Knowledge
from kproxy.insight.rows import Rebalance
from kproxy.watch import watcher
from tests import captures
from tests.capture import packet
from tests.insight import truth
from tests.knowledge import recorded
from tests.watch.live import BROKER_PORT, CLIENT, CLUSTER, KPROXY, Kproxy, machine, start_cluster, until, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PORTS = range(9092, 9096)  # of kproxy run: where clients bootstrap, and of three brokers
PORT_OPTIONS = tuple(text for port in PORTS for text in ("--port", str(port)))
# Columns that name the source of a row, or that a capture cannot fill.
OF_THE_SOURCE = {"source", "connection", "broker_id"}
# Two CPUs write into a ring: each socket has its own order of simultaneous packets.
OF_THE_RING = {"in_flight", "out_of_order", "clock_back"}


def whole(by_api):
    """Without FindCoordinator, which the client repeats until it exits: a proxy may not get the last one."""
    return {key: count for key, count in by_api.items() if key[0] != "FindCoordinator"}


def requests(of):
    return whole(of.total("kproxy_requests_total", "api", "version"))


def findings(kproxy):
    """Return (kind, where) of each finding, on a machine of any speed."""
    answer = json.loads(kproxy.get("/api/findings?uncompressed_rate=1"))
    return [(one["kind"], one["where"]) for one in answer["findings"]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Results for the same traffic through `kproxy run`, seen by two `kproxy watch` and by tcpdump."""
    folder = tmp_path_factory.mktemp("watch")
    with machine() as here:
        start_cluster(here)
        run = Kproxy(
            *(here, folder, 9600, "run", "--listen", "127.0.0.1:9092", "--bootstrap", f"127.0.1.1:{BROKER_PORT}"),
            *("--broker-port-base", "9092", "--detail", "topics"),
        )
        until("kproxy to know its brokers", lambda: run.get("/ready") == "ready\n")
        counting = Kproxy(here, folder, 9464, "watch", "--interface", "lo", *PORT_OPTIONS)
        recording = Kproxy(
            *(here, folder, 9465, "watch", "--interface", "lo", *PORT_OPTIONS, "--detail", "batches"),
            *("--record", str(folder / "tables")),
        )
        pcap = folder / "seen.pcap"
        filter_ = f"tcp portrange {PORTS[0]}-{PORTS[-1]}"
        tcpdump = here.start(
            *("tcpdump", "-i", "lo", "-s", "0", "-B", "65536", "--time-stamp-precision", "nano", "-w", pcap, filter_),
            stderr=(folder / "tcpdump.log").open("w"),
        )
        until("tcpdump", lambda: "listening on lo" in (folder / "tcpdump.log").read_text())
        here.run(sys.executable, "-c", CLIENT, "127.0.0.1:9092", "20000")
        three = (run, counting, recording)
        for each in three:
            until("the last connection", lambda each=each: not any(each.total("kproxy_open_connections").values()))
        with suppress(AssertionError):  # the tests report differences
            until("all to have counted as much", lambda: len({sum(requests(each).values()) for each in three}) == 1, 20)
        of = {}
        for name, each in (("run", run), ("counting", counting), ("recording", recording)):
            of[name] = {
                "requests": requests(each),
                "request_bytes": whole(each.total("kproxy_request_bytes_total", "api")),
                "answers": each.total("kproxy_request_duration_seconds_count", api="Produce"),
                "fetched": each.total("kproxy_response_bytes_total", api="Fetch"),
                "produced": each.total("kproxy_requests_total", "broker", api="Produce"),
                "waits": each.total("kproxy_fetch_excess_wait_seconds_count"),
                "sizes": each.total("kproxy_request_size_bytes_bucket", "api", "le", api="Produce"),
                "topics": each.total("kproxy_topic_bytes_total", "topic", "direction"),
                "records": each.total("kproxy_topic_records_total", "topic", "direction"),
                "connections": each.total("kproxy_connections_total"),
                "findings": findings(each),
            }
        of["dropped"] = counting.total("kproxy_watch_dropped_packets_total")
        of["names"] = {name for name, _ in counting.samples()}
        tcpdump.send_signal(signal.SIGINT)
        tcpdump.wait(20)
        of["log"] = recording.end()
        counting.end()
        run.end()
    of["pcap"], of["tables"] = pcap, folder / "tables"
    return of


@pytest.mark.parametrize("watching", ["counting", "recording"])
def test_its_counters_equal_those_of_a_proxy(seen, watching):
    proxy, watched = seen["run"], seen[watching]
    assert seen["dropped"] == {}
    assert watched["requests"] == proxy["requests"]
    assert watched["requests"]["Produce", "10"] > 50
    for name in ("request_bytes", "answers", "fetched", "produced", "waits", "sizes", "connections"):
        assert watched[name] == proxy[name], name


def test_its_topics_equal_those_of_a_proxy(seen):
    assert seen["recording"]["topics"] == seen["run"]["topics"]
    assert seen["recording"]["records"] == seen["run"]["records"]
    assert seen["recording"]["records"]["orders", "response"] >= 20000


def test_its_findings_equal_those_of_a_proxy_except_core_full(seen):
    assert seen["counting"]["findings"] == []  # it does not read topics
    assert seen["recording"]["findings"] == [of for of in seen["run"]["findings"] if of[0] != "core_full"] != []


def test_metrics_of_a_proxy_alone_are_absent(seen):
    assert "kproxy_watch_packets_total" in seen["names"]
    assert not {name for name in seen["names"] if name.startswith(("kproxy_dial", "kproxy_loop", "kproxy_listeners"))}


def rows(folder, name):
    """Return (row without times and source columns, its times) pairs, sorted.

    A retransmission counts for one exchange or the next depending on its time; `connections` counts all of them.
    """
    by_time = {"time"} | ({"retransmissions"} if name == "exchanges" else set())
    found = []
    for row in pq.read_table(folder / name).to_pylist():
        times = {key: row.pop(key) for key in list(row) if key in by_time or key.endswith("_ns")}
        found.append(
            (repr({key: value for key, value in row.items() if key not in OF_THE_SOURCE | OF_THE_RING}), times)
        )
    return sorted(found, key=lambda row: (row[0], row[1]["time"]))


def test_its_tables_equal_those_of_a_capture(seen, tmp_path):
    """Except for times, which each packet socket takes itself; uninterrupted they differ by microseconds."""
    command = [KPROXY, "convert", seen["pcap"], "--out", tmp_path / "converted", *PORT_OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("exchanges", "partitions", "batches", "connections"):
        watched, converted = rows(seen["tables"], name), rows(tmp_path / "converted", name)
        assert [row for row, _ in watched] == [row for row, _ in converted], name
        off = [
            abs((mine["time"] - its["time"]).total_seconds())
            for (_, mine), (_, its) in zip(watched, converted, strict=True)
        ]
        assert len(off) > 5
        assert sorted(off)[len(off) // 2] < 0.01, name
    found, expected = (
        {
            row["kind"]: row["count"]
            for row in pq.read_table(folder / "quality").to_pylist()
            if row["kind"] not in OF_THE_RING
        }
        for folder in (seen["tables"], tmp_path / "converted")
    )
    assert found == expected


# --- links, interfaces and faults -----------------------------------------------------------------------------------

# Sends the packets of a capture unchanged, with pauses so that the receiver keeps up.
REPLAY = """
import socket, sys, time
from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import Quality
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
sock.bind((sys.argv[1], 0))
for window in Capture([sys.argv[2]], Quality()).windows():
    for number, (_, link, start, end, _) in enumerate(window.records):
        assert link == 1
        sock.send(bytes(window.data[start:end]))
        if number % 200 == 0:
            time.sleep(0.002)
"""


@pytest.fixture(scope="module")
def machine_with_cable():
    """A machine with a cable whose ends are `near` and `far`, and with a bridge that `far` is a member of."""
    with machine("cable") as here:
        here.run("ip", "link", "add", "near", "mtu", "65535", "type", "veth", "peer", "name", "far")
        here.run("ip", "link", "set", "far", "mtu", "65535")
        here.run("ip", "link", "add", "bridge", "type", "bridge")
        here.run("ip", "link", "set", "far", "master", "bridge")
        for name in ("near", "far", "bridge"):
            here.run("sh", "-c", f"echo 1 > /proc/sys/net/ipv6/conf/{name}/disable_ipv6", check=False)
            here.run("ip", "link", "set", name, "up", "promisc", "on")
        yield here


@pytest.fixture
def cable(machine_with_cable):
    """The same; ends the processes that a failed test left running."""
    yield machine_with_cable
    machine_with_cable.end_processes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "interface"),
    [
        ("k41_vlan", "far"),
        ("k41_ipv6", "far"),
        ("k41_ipfrag", "far"),
        ("k41_tinyseg", "far"),
        ("k41_java_cluster", "any"),  # each packet passes three interfaces
        ("k111_java_cluster", "far"),
    ],
)
def test_packets_on_a_link_give_the_exchanges_of_their_capture(cable, tmp_path, name, interface):
    watch = Kproxy(
        *(cable, tmp_path, 9464, "watch", "--interface", interface, "--port", "any"),
        *("--record", str(tmp_path / "tables")),
    )
    cable.run(sys.executable, "-c", REPLAY, "near", captures.capture(name))
    until("the last packet", lambda: quiet(watch))
    assert watch.api("watch")["dropped_packets"] == 0
    assert (watch.api("watch")["duplicate_packets"] > 1000) == (interface == "any")
    watch.end()
    exchanges = pq.read_table(tmp_path / "tables" / "exchanges").to_pylist()
    expected = captures.counted(map(captures.top_level, kproxy.exchanges(captures.capture(name))))
    assert captures.counted(map(captures.top_level, exchanges)) == expected


@pytest.mark.ring2
def test_a_second_cluster_at_the_same_addresses_is_reported(cable, tmp_path):
    """Both count as one cluster, and a finding reports it."""
    record = ("--record", str(tmp_path / "tables"))
    watch = Kproxy(cable, tmp_path, 9464, "watch", "--interface", "far", "--port", "any", *record)
    for name in ("k41_java_cluster", "k111_java_cluster"):
        assert "told apart" not in watch.log.read_text()
        cable.run(sys.executable, "-c", REPLAY, "near", captures.capture(name))
        until("the last packet", lambda: quiet(watch))
    told = watch.api("watch")
    assert len(told["cluster_ids"]) == 2 and told["clusters"] == ["default"]
    assert told["findings"]["clusters_as_one"] == 1
    assert watch.end().count("1 clusters cannot be told apart") == 1
    kinds = {row["kind"]: row["count"] for row in pq.read_table(tmp_path / "tables" / "quality").to_pylist()}
    assert kinds["clusters_as_one"] == 1


@pytest.mark.parametrize(
    ("capture", "options"),
    [
        (captures.capture("k0102_zookeeper"), ("--zookeeper-port", "2181")),
        (recorded.DATA / "0.8.2.2" / "traffic.pcap.zst", ("--port", "any")),  # consumers that all rebalance at once
    ],
)
def test_packets_of_zookeeper_give_the_registry_of_their_capture(cable, tmp_path, capture, options):
    """So do the rebalances of consumers that coordinate through ZooKeeper."""
    record = ("--record", str(tmp_path / "watched"))
    watch = Kproxy(cable, tmp_path, 9464, "watch", "--interface", "far", *options, *record)
    cable.run(sys.executable, "-c", REPLAY, "near", capture)
    until("the last packet", lambda: quiet(watch, "kproxy_zookeeper_requests_total"))
    assert watch.api("watch")["dropped_packets"] == 0
    assert watch.total("kproxy_zookeeper_watches_fired_total") and not watch.total("kproxy_zookeeper_bytes_total")
    watch.end()
    convert([capture], tmp_path / "converted")
    watched, expected = ([row for row, _ in rows(tmp_path / each, "registry")] for each in ("watched", "converted"))
    assert len(expected) > 300 and watched == expected
    # The replay is faster than the capture, and the end of a rebalance depends on time.
    assert rows(tmp_path / "watched", "rebalances") and rows(tmp_path / "watched", "assignments")


def test_connects_reported_undeliverable_by_icmp_equal_those_of_a_capture(cable, tmp_path):
    """The kernel passes only ICMP messages that quote a packet of a watched port."""
    frames = []
    for version in (4, 6):
        for port, code in ((9092, (3, 13) if version == 4 else (1, 1)), (443, (3, 3) if version == 4 else (1, 4))):
            server, client = (packet.BROKER, packet.CLIENT) if version == 4 else (packet.BROKER6, packet.CLIENT6)
            syn = packet.tcp(source=client, target=(server[0], port), flags=SYN)
            ip, kind = (packet.ipv4, 0x0800) if version == 4 else (packet.ipv6, 0x86DD)
            quoted = ip(syn, target=server)
            reply = ip(packet.icmp(*code, 0, quoted), protocol=1 if version == 4 else 58, source=server, target=client)
            frames += [packet.ethernet(each, kind) for each in (quoted, reply)]
    path = tmp_path / "icmp.pcap"
    path.write_bytes(packet.pcap([(number * 10**6, each) for number, each in enumerate(frames)]))
    record = ("--record", str(tmp_path / "tables"))
    watch = Kproxy(cable, tmp_path, 9464, "watch", "--interface", "far", "--port", "9092", *record)
    cable.run(sys.executable, "-c", REPLAY, "near", path)
    until("the packets", lambda: watch.api("watch")["packets"] >= 4)
    assert watch.api("watch")["findings"]["undelivered"] == 2
    watch.end()
    convert([path], tmp_path / "converted", job.Settings(ports=(9092,)))
    for folder in ("tables", "converted"):
        rows = pq.read_table(tmp_path / folder / "connections").to_pylist()
        assert Counter((row["broker_port"], row["close"]) for row in rows) == {(9092, "prohibited"): 2}


def quiet(watch, metric="kproxy_requests_total"):
    """Return whether no exchange arrived for a second."""
    before = watch.total(metric)
    time.sleep(1)
    return before and before == watch.total(metric)


@pytest.mark.ring2
def test_an_interface_that_disappears_and_returns_is_watched_again(tmp_path):
    with machine("gone") as here:
        here.run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there")
        for name in ("here", "there"):
            here.run("ip", "link", "set", name, "up")
        watch = Kproxy(here, tmp_path, 9464, "watch", "--interface", "there", "--port", "any")
        assert watch.get("/ready") == "ready\n"
        here.run("ip", "link", "set", "there", "down")
        until("it to be noticed", lambda: watch.get("/ready") == "not ready: interface there is down\n")
        assert watch.samples()["kproxy_watch_interface_up", frozenset({("interface", "there")})] == 0
        here.run("ip", "link", "set", "there", "up")
        until("it to be back", lambda: watch.get("/ready") == "ready\n")
        here.run("ip", "link", "del", "here")
        until("it to be noticed", lambda: watch.get("/ready") == "not ready: there is no interface there\n")
        here.run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there")
        for name in ("here", "there"):
            here.run("ip", "link", "set", name, "mtu", "65535", "up")
        until("it to be back", lambda: watch.get("/ready") == "ready\n")
        here.run(sys.executable, "-c", REPLAY, "here", captures.capture("k41_tinyseg"))
        until("packets of the new one", lambda: watch.total("kproxy_requests_total"))
        log = watch.end()
    assert "interface there is down: its packets are missing until it is back" in log
    assert "interface=there is back" in log
    assert "Traceback" not in log


@pytest.mark.ring2
def test_a_burst_is_reported_as_drops_and_connections_are_followed_on(tmp_path):
    with machine("burst") as here:
        start_cluster(here)
        port = ("--port", str(BROKER_PORT))
        watch = Kproxy(
            *(here, tmp_path, 9464, "watch", "--interface", "lo", *port, "--buffer-mib", "2"),
            *("--record", str(tmp_path / "tables"), "--detail", "batches"),
        )
        watch.process.send_signal(signal.SIGSTOP)  # it reads nothing
        busy = here.start(sys.executable, "-c", CLIENT, f"127.0.1.1:{BROKER_PORT}", "15000")
        passed = "/sys/class/net/lo/statistics/rx_bytes"
        until("more than the buffer holds", lambda: int(here.run("cat", passed).stdout) > 8 << 20)
        watch.process.send_signal(signal.SIGCONT)
        assert busy.wait(120) == 0
        here.run(sys.executable, "-c", CLIENT, f"127.0.1.1:{BROKER_PORT}", "1000")
        until("drops", lambda: watch.total("kproxy_watch_dropped_packets_total"))
        until("the last exchange", lambda: quiet(watch))
        dropped = watch.total("kproxy_watch_dropped_packets_total")[()]
        log = watch.end()
    assert "packets are dropped: more come than kproxy reads" in log
    assert "Traceback" not in log
    quality = {row["kind"]: row["count"] for row in pq.read_table(tmp_path / "tables" / "quality").to_pylist()}
    assert quality["kernel_drops"] == dropped
    clients = {row["client_id"] for row in pq.read_table(tmp_path / "tables" / "exchanges").to_pylist()}
    assert {"shop", "till"} <= clients


def test_broker_ports_are_learned_from_metadata_responses(tmp_path):
    with machine("ports") as here:
        run = Kproxy(
            *(here, tmp_path, 9600, "run", "--listen", "127.0.0.1:9092", "--bootstrap", f"127.0.1.1:{BROKER_PORT}"),
            *("--broker-port-base", "9192"),
        )
        start_cluster(here)
        until("kproxy to know its brokers", lambda: run.get("/ready") == "ready\n")
        watch = Kproxy(here, tmp_path, 9464, "watch", "--interface", "any")
        until("the packet socket", lambda: watch.api("watch")["ports"] == [9092])
        here.run(sys.executable, "-c", CLIENT, "127.0.0.1:9092", "5000")
        until("its ports", lambda: watch.api("watch")["ports"] == [9092, 9193, 9194, 9195])
        here.run(sys.executable, "-c", CLIENT, "127.0.0.1:9092", "5000")
        assert set(watch.total("kproxy_requests_total", "broker", api="Fetch")) == {("1",), ("2",), ("3",)}
        assert "brokers have other ports too: ports=9092,9193,9194,9195" in watch.end()
        run.end()


# Three brokers that advertise one host name: they differ by port only.
NAMED = CLUSTER.replace("sys.argv[1].format(node_id), int(sys.argv[2])", "sys.argv[1], int(sys.argv[2]) + node_id")


@pytest.mark.ring2
def test_brokers_that_advertise_one_host_name_are_distinguished_by_port(tmp_path):
    with machine("named") as here:
        process = here.start(sys.executable, "-c", NAMED, "localhost", "9092", stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        ports = tuple(text for number in (1, 2, 3) for text in ("--port", str(9092 + number)))
        watch = Kproxy(here, tmp_path, 9464, "watch", "--interface", "lo", *ports)
        for _ in range(2):  # the broker of a connection opened during the name lookup is unknown
            here.run(sys.executable, "-c", CLIENT, "127.0.0.1:9093", "5000")
        assert set(watch.total("kproxy_requests_total", "broker", api="Fetch")) >= {("1",), ("2",), ("3",)}
        watch.end()


def test_a_second_kproxy_needs_another_admin_port(tmp_path):
    with machine("twice") as here:
        watch = Kproxy(here, tmp_path, 9464, "watch", "--interface", "lo")
        done = here.run(KPROXY, "watch", "--interface", "lo", "--admin", "127.0.0.1:9464", check=False)
        assert done.returncode == 2
        assert "--admin 127.0.0.1:9464 cannot be bound: another program listens there" in done.stderr
        assert "Traceback" not in done.stderr
        watch.end()


@pytest.mark.ring2
def test_groups_are_followed_as_they_rebalance(cable, tmp_path):
    """A replayed capture gives the rebalances that insight reads from its file."""
    options = ("--interface", "far", "--port", "any", "--detail", "topics", "--buffer-mib", "256")
    watch = Kproxy(cable, tmp_path, 9464, "watch", *options, "--record", str(tmp_path / "tables"))
    until("the process that follows groups", lambda: "groups and leaders are followed" in watch.log.read_text())
    watch.process.send_signal(signal.SIGSTOP)
    cable.run(sys.executable, "-c", REPLAY, "near", truth.CAPTURE)
    watch.process.send_signal(signal.SIGCONT)
    counted_at_resume = sum(watch.total("kproxy_requests_total").values())
    until("the last packet", lambda: quiet(watch))
    assert watch.api("watch")["dropped_packets"] == 0
    assert counted_at_resume < sum(watch.total("kproxy_requests_total").values()) / 2
    knowledge = Knowledge("default")
    rebalances = Counter(
        row.group_id
        for exchange in truth.decoded_exchanges(truth.CAPTURE, range(1 << 16), APIS)
        for row in knowledge.feed(exchange)
        if isinstance(row, Rebalance)
    )
    assert rebalances.total() > 10

    def found():
        return {group: int(n) for (group,), n in watch.total("kproxy_group_rebalances_total", "group").items()}

    with suppress(AssertionError):
        until("the rebalances", lambda: found() == rebalances, 20)
    assert found() == rebalances
    assert {row["group"] for row in watch.api("groups")} >= rebalances.keys()
    shown = watch.api("live")  # the data of its admin page
    assert {row[1] for row in shown["groups"]} >= rebalances.keys() and "samples" in shown
    assert sum(row[3] for row in shown["totals"] if row[2] == "JoinGroup") > 0 and "page.js" in watch.get("/")
    assert "Traceback" not in watch.end()
    recorded = pq.read_table(tmp_path / "tables" / "rebalances").to_pylist()
    assert Counter(row["group_id"] for row in recorded) >= rebalances


def test_a_clock_that_is_set_forward_expires_no_flow(monkeypatch, tmp_path):
    """Packets have wall-clock time: after a suspend, all flows look silent for hours."""

    class Flows:
        ended_before = None

        def expire(self, before_ns, connects_before_ns):
            self.ended_before = before_ns
            assert before_ns < connects_before_ns < time.time_ns() - 127 * 10**9  # a connect takes that long

    watching = watcher.Watcher(watcher.Settings(("eth0",), record=tmp_path))
    watching._flows = flows = Flows()
    watching._follow_clock()
    watching._expire()
    assert flows.ended_before < time.time_ns() - 60 * 10**9
    flows.ended_before = None
    watching.metrics.clock_offset_ns -= 3600 * 10**9
    watching._follow_clock()
    watching._expire()
    assert flows.ended_before is None
    later_s = time.monotonic() + watcher.IDLE_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    watching._expire()
    assert flows.ended_before is not None
