"""kproxy before a cluster: `kproxy run` as a process that can be restarted on its ports."""

import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from tests.broker.cluster import wait_for
from tests.ports import free_ports

KPROXY = Path(sys.executable).with_name("kproxy")


class Kproxy:
    """`kproxy run` between the clients of a test and a cluster; `stop` and `start` keep its ports."""

    def __init__(self, bootstrap: str, folder: Path, *arguments: str) -> None:
        port = free_ports(7)  # admin, bootstrap, broker 0 (unused), brokers 1 to 4
        self.bootstrap = f"127.0.0.1:{port + 1}"
        self.admin = f"127.0.0.1:{port}"
        self.log = folder / "kproxy.log"
        self.command = [
            *(str(KPROXY), "run", "--listen", self.bootstrap, "--bootstrap", bootstrap, "--admin", self.admin),
            *("--log-level", "debug"),  # logs a line for each connection
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def watching(cls, ports: Iterable[int], folder: Path, *arguments: str) -> Self:
        """`kproxy watch` for ports on loopback, which needs root; it has no bootstrap."""
        made = cls("", folder)
        made.log = folder / "watch.log"
        made.command = [str(KPROXY), "watch", "--interface", "lo", "--admin", made.admin, *arguments]
        for port in ports:
            made.command += ["--port", str(port)]
        return made

    def start(self, *, waits_until_ready: bool = True) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if not waits_until_ready:
            return
        try:
            wait_for("/ready of kproxy", self._ready, 90)
        except AssertionError as fault:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"{fault}\n{self.log_tail()}") from None

    def stop(self, *, kill: bool = False) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        status = self._process.wait(30)
        self._process = None
        assert kill or status == 0, f"kproxy exited {status}\n{self.log_tail()}"

    def reload(self) -> None:
        """Read the settings file again; returns once the settings are in use."""
        assert self._process is not None
        reloads = self.log.read_text().count("reload by SIGHUP")
        self._process.send_signal(signal.SIGHUP)
        wait_for("the reload", lambda: self.log.read_text().count("reload by SIGHUP") > reloads)

    def __enter__(self) -> "Kproxy":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"kproxy exited {self._process.returncode}")
        try:
            self.get("/ready")
        except OSError:
            return False
        return True

    def is_alive(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def post(self, path: str) -> str:
        request = urllib.request.Request(f"http://{self.admin}{path}", method="POST", headers={"X-Kproxy": "1"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have those labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics"))
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def totals(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """A metric's values summed by some of its labels, without zeros."""
        found: Counter[tuple[str, ...]] = Counter()
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                if sample.name == name:
                    found[tuple(sample.labels[label] for label in by)] += sample.value
        return {key: value for key, value in found.items() if value}

    def sources(self) -> Counter[tuple[str, tuple[str, int]]]:
        """Every connection that kproxy made to a broker so far, from its own log: (broker, local address)."""
        lines = re.findall(r" to ([0-9.]+:[0-9]+) from ([0-9.]+):([0-9]+)$", self.log.read_text(), re.MULTILINE)
        return Counter((broker, (host, int(port))) for broker, host, port in lines)

    def log_tail(self, lines: int = 40) -> str:
        return "--- kproxy\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
