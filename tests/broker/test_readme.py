"""Every command of the README runs as it is written there, except for addresses and file names."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from ast import literal_eval
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kproxy.protocol.codec import framed_request
from tests.broker.cluster import Cluster, wait_for
from tests.broker.test_clients import consume, produce, sample
from tests.broker.tools import as_root, create_topic
from tests.ports import free_ports

TOP = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (TOP / "README.md").read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.split("  # ")[0].strip() for language, text in BLOCKS if language == "sh" for line in text.splitlines()
]

DEMO = "./dev demo"
TEST = "./dev test"
SIDECAR = "kproxy run --route sidecar"
GATEWAY = "kproxy run --listen"
METRICS = "curl -s"
CAPTURE = "tcpdump"
CONVERT = "kproxy convert"
OVERVIEW = "kproxy analyze overview"
SLOW = "kproxy analyze slow"
REPORT = "kproxy report"
DECODE = "kproxy decode"
TESTED = (DEMO, TEST, SIDECAR, GATEWAY, METRICS, CAPTURE, CONVERT, OVERVIEW, SLOW, REPORT, DECODE)


def command(start: str, **replaced: str) -> str:
    """The README's only command that starts so, with addresses or names replaced."""
    (found,) = (line for line in COMMANDS if line.startswith(start))
    for old, new in replaced.items():
        assert old in found
        found = found.replace(old, new)
    return found


@contextmanager
def running(shell: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a shell with this environment's kproxy; end it by Ctrl-C."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    process = subprocess.Popen(
        f"exec {shell}",
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            rest, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        print(rest)  # shown if the test fails


def output(shell: str, folder: Path) -> str:
    with running(shell, folder) as process:
        assert process.stdout is not None
        text = process.stdout.read()
    assert process.returncode == 0, text
    return text


def wait_until_ready(admin: str) -> None:
    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://{admin}/ready", timeout=5):
                return True
        except OSError:
            return False

    wait_for(f"{admin}/ready", ready)


def test_every_command_is_tested() -> None:
    assert [line for line in COMMANDS if not line.startswith(TESTED)] == []
    assert command(TEST) in (TOP / ".ci/run").read_text()  # by this command the test was started


def test_the_demo_command() -> None:
    with running(f"{command(DEMO)} --seconds 5", TOP) as demo:
        assert demo.stdout is not None
        text = ""
        while "http://" not in text:
            text = demo.stdout.readline()
            assert text, "the demo ended without telling where its metrics are"
        url = re.search(r"http://\S+/metrics", text)
        assert url is not None
        wait_for("Produce in its metrics", lambda: b'api="Produce"' in urllib.request.urlopen(url[0]).read())
        assert re.search(r"[1-9][0-9]* requests/s", demo.stdout.read())
    assert demo.wait() == 0


def test_the_sidecar_commands(cluster: Cluster, tmp_path: Path) -> None:
    """One kproxy per broker, all on the same port: clients are directed from one to the other."""
    port = free_ports(2, "")
    with ExitStack() as stack:
        for broker in cluster.brokers:
            address = {":19092": f"{broker.host}:{port}", "localhost:9092": broker.address}
            admin = {":9600": f"{broker.host}:{port + 1}"}
            stack.enter_context(running(command(SIDECAR, **address, **admin), tmp_path))
        hosts = [broker.host for broker in cluster.brokers]
        for host in hosts:
            wait_until_ready(f"{host}:{port + 1}")
        topic = create_topic(f"{hosts[0]}:{port}")
        records = sample(100, "sidecar")
        produce(f"{hosts[1]}:{port}", topic, records)
        assert sorted(consume(f"{hosts[2]}:{port}", topic, len(records))) == sorted(records)
        for host in hosts:
            metrics = output(command(METRICS, **{"localhost:9600": f"{host}:{port + 1}"}), tmp_path)
            assert re.search(r'kproxy_requests_total{.*api="Produce".*} [1-9]', metrics)


def test_the_gateway_command(cluster: Cluster, tmp_path: Path) -> None:
    port = free_ports(6)
    addresses = {
        "localhost:9092": f"127.0.0.1:{port + 1}",
        "kafka-1:9092,kafka-2:9092": ",".join(broker.address for broker in cluster.brokers[:2]),
        "localhost:9600": f"127.0.0.1:{port}",
    }
    with running(command(GATEWAY, **addresses), tmp_path):
        wait_until_ready(f"127.0.0.1:{port}")
        bootstrap = f"127.0.0.1:{port + 1}"
        topic = create_topic(bootstrap)
        records = sample(100, "gateway")
        produce(bootstrap, topic, records)
        assert sorted(consume(bootstrap, topic, len(records))) == sorted(records)


def test_the_capture_commands(cluster: Cluster, tmp_path: Path) -> None:
    broker = cluster.brokers[0]
    tcpdump = command(CAPTURE, **{"9092": str(broker.port)})
    # Debian's tcpdump drops its privileges before it opens the file, and writes packets once a second. With
    # --immediate-mode it has a buffer of 2 MiB for packets of up to 256 KiB, which is 8 of them; a busy machine needs
    # more.
    tcpdump += " -Z root --immediate-mode -U -B 65536"
    with running(shlex.join(as_root()) + f" {tcpdump}", tmp_path) as capturing:
        assert capturing.stdout is not None
        wait_for("tcpdump to listen", lambda: "listening on any" in capturing.stdout.readline())
        create_topic(broker.address)
        # At Ctrl-C tcpdump discards what the kernel still holds: this last packet shows that all others are written.
        last = b"the last packet"
        with socket.create_connection((broker.host, broker.port), timeout=30) as client:
            client.sendall(framed_request(18, 0, 1, last.decode(), {}))
            wait_for("tcpdump to write", lambda: last in (tmp_path / "incident.pcap").read_bytes())
    summary = output(command(CONVERT), tmp_path)
    assert "exchanges" in summary
    (read,) = (text for language, text in BLOCKS if language == "python" and text.startswith("import pyarrow"))
    done = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, capture_output=True, text=True, check=True)
    rows = {row["api"]: row for row in literal_eval(done.stdout)}
    assert rows["Metadata"]["api_count"] >= 1
    assert rows["Metadata"]["latency_ns_max"] > 0
    assert "Metadata" in output(command(OVERVIEW), tmp_path)
    assert "No rows" in output(command(SLOW), tmp_path)  # no client of that name is in the capture
    assert output(command(REPORT), tmp_path).strip() == "report.html"
    assert "Metadata" in (tmp_path / "report.html").read_text()


def test_the_decode_command(tmp_path: Path) -> None:
    text = output(command(DECODE), tmp_path)
    assert "ApiVersions" in text
    assert "foo" in text
