"""`kproxy watch` on real packets: what it counts and records is what a proxy counts, and what `convert` reads."""

import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from kproxy.watch import watcher  # noqa: F401 - in a process of its own
from tests.watch.live import BROKER_PORT, CLIENT, KPROXY, Kproxy, machine, start_cluster, until, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PORTS = range(9092, 9096)  # of kproxy run: where clients bootstrap, and of three brokers
PORT_OPTIONS = tuple(text for port in PORTS for text in ("--port", str(port)))
# Columns that say where rows come from, or what a capture cannot know.
OF_THE_SOURCE = {"source", "connection", "broker_id"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The same traffic through `kproxy run`, seen by two `kproxy watch` and by tcpdump: what each has made of it."""
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
        until("the last connection", lambda: not any(recording.total("kproxy_open_connections").values()))
        time.sleep(0.5)
        of = {}
        for name, each in (("run", run), ("counting", counting), ("recording", recording)):
            of[name] = {
                "requests": each.total("kproxy_requests_total", "api", "version"),
                "request_bytes": each.total("kproxy_request_bytes_total", "api"),
                "answers": each.total("kproxy_request_duration_seconds_count", "api"),
                "fetched": each.total("kproxy_response_bytes_total", api="Fetch"),
                "produced": each.total("kproxy_requests_total", "broker", api="Produce"),
                "waits": each.total("kproxy_fetch_excess_wait_seconds_count"),
                "sizes": each.total("kproxy_request_size_bytes_bucket", "api", "le", api="Produce"),
                "topics": each.total("kproxy_topic_bytes_total", "topic", "direction"),
                "records": each.total("kproxy_topic_records_total", "topic", "direction"),
                "connections": each.total("kproxy_connections_total"),
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
def test_it_counts_what_a_proxy_counts(seen, watching):
    proxy, beside = seen["run"], seen[watching]
    assert seen["dropped"] == {}
    assert beside["requests"] == proxy["requests"]
    assert beside["requests"]["Produce", "10"] > 50
    for name in ("request_bytes", "answers", "fetched", "produced", "waits", "sizes", "connections"):
        assert beside[name] == proxy[name], name


def test_topics_are_those_of_a_proxy(seen):
    assert seen["recording"]["topics"] == seen["run"]["topics"]
    assert seen["recording"]["records"] == seen["run"]["records"]
    assert seen["recording"]["records"]["orders", "response"] >= 20000


def test_what_only_a_proxy_has_is_absent(seen):
    assert "kproxy_watch_packets_total" in seen["names"]
    assert not {name for name in seen["names"] if name.startswith(("kproxy_dial", "kproxy_loop", "kproxy_listeners"))}


def rows(folder, name):
    """Rows without their times, and with what says which is which; and their times."""
    found = []
    for row in pq.read_table(folder / name).to_pylist():
        times = {key: row.pop(key) for key in list(row) if key == "time" or key.endswith("_ns")}
        found.append((repr({key: value for key, value in row.items() if key not in OF_THE_SOURCE}), times))
    return sorted(found, key=lambda row: (row[0], row[1]["time"]))


def test_its_tables_are_those_of_a_capture(seen, tmp_path):
    """Times apart, which each packet socket takes for itself: where nothing interrupts they differ by microseconds."""
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
    # Two processors write into a ring: each socket has its own order of packets that come at the same moment.
    found, expected = (
        {
            row["kind"]: row["count"]
            for row in pq.read_table(folder / "quality").to_pylist()
            if row["kind"] not in ("clock_back", "out_of_order")
        }
        for folder in (seen["tables"], tmp_path / "converted")
    )
    assert found == expected
