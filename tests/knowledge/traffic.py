"""Traffic of the loopback interface, recorded by tcpdump while something happens."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.broker.cluster import wait_for
from tests.broker.tools import as_root


@contextmanager
def recorded(path: Path, wanted: str) -> Iterator[None]:
    """Into the pcap file `path`, what the filter `wanted` says. AssertionError if tcpdump fails or loses packets."""
    tcpdump = shutil.which("tcpdump", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "tcpdump"
    command = [*as_root(), tcpdump, "-i", "lo", "-s", "0", "-U", "-B", "65536", "-Z", "root"]
    errors = path.with_name(f"{path.name}.err")
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "-w", str(path), wanted], stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr
        )
    try:
        wait_for("tcpdump", lambda: "listening on" in errors.read_text() or process.poll() is not None, 10)
        assert process.poll() is None, errors.read_text()
        yield
    finally:
        time.sleep(1.2)  # packets reach tcpdump up to a second late
        process.terminate()
        process.wait(10)
    assert "0 packets dropped by kernel" in errors.read_text(), errors.read_text()
