"""A real Prometheus for tests: a process with rules and targets of its own, asked over its HTTP API.

Rules can run faster than they are written: `scaled` divides every duration in them (windows, `for`, `offset`) by one
factor, so that an alert which waits ten minutes can be seen to fire within seconds. Thresholds stay as they are.
"""

import json
import math
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dashboards.boards.__main__ import BOARDS
from dashboards.boards.model import panels_of
from tests.broker.cluster import wait_for
from tests.ports import free_ports

DASHBOARDS = Path(__file__).parents[1] / "dashboards"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LEAST_S = 5  # a window must hold two scrapes, of one in two seconds


def scaled(rules: str, factor: float) -> str:
    """The text of a file of rules with every duration divided."""

    def divided(match: re.Match[str]) -> str:
        seconds = max(LEAST_S, int(int(match[2]) * _SECONDS[match[3]] / factor))
        return f"{match[1]}{seconds}s"

    return re.sub(r"(\[|for: |offset )(\d+)([smhd])\b", divided, rules)


def plain(query: str) -> str:
    """A query of a board with everything chosen, as Grafana would send it."""
    return re.sub(r'=~"\$\w+"', '=~".*"', query).replace("$__rate_interval", "15s").replace("$__range", "2m")


class Prometheus:
    """targets: addresses to scrape every two seconds, by job."""

    def __init__(self, folder: Path, targets: Mapping[str, str], factor: float = 1) -> None:
        folder.mkdir(parents=True)
        self.factor = factor
        self.address = f"127.0.0.1:{free_ports(1)}"
        self.log = folder / "prometheus.log"
        self._folder = folder
        for name in ("rules.yml", "alerts.yml"):
            (folder / name).write_text(scaled((DASHBOARDS / name).read_text(), factor))
        jobs = [{"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()]
        settings = {
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml", "alerts.yml"],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Prometheus":
        executable = shutil.which("prometheus")
        assert executable is not None, "./dev test installs the package prometheus"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    executable,
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self.address}",
                    "--enable-feature=exemplar-storage",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for("Prometheus", self._ready, 30)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query: each with its labels as `metric` and its value, a string, in `value`."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def empty_panels(self) -> list[str]:
        """ "board, panel: query" of each that has no series with a number and the labels that its legend names."""
        found = []
        for board in BOARDS.values():
            for panel in panels_of(board.BOARD["panels"]):
                for target in panel["targets"]:
                    labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - {"le"}
                    series = self.query(plain(target["expr"]))
                    if not any(
                        labels <= each["metric"].keys() and not math.isnan(float(each["value"][1])) for each in series
                    ):
                        found.append(f"{board.BOARD['title']}, {panel['title']}: {target['expr']}")
        return found

    def check_rules(self) -> None:
        """Rules are evaluated without a fault, and each recording rule has data."""
        rules = [rule for group in self.get("rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 30
        assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
        recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
        without: list[str] = []

        def have_data() -> bool:
            without[:] = [name for name in recorded if not self.query(name)]
            return not without

        try:  # they are evaluated each second, so a second after panels have data
            wait_for("data of rules", have_data, 20)
        except AssertionError:
            raise AssertionError(f"no data: {', '.join(without)}") from None

    def exemplars(self, query: str) -> list[dict[str, str]]:
        """The labels of all exemplars of a query so far."""
        now = time.time()
        found = self.get("query_exemplars", query=query, start=str(now - 3600), end=str(now + 60))
        return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    def fired(self) -> set[tuple[str, str, str]]:
        """(alert, severity, job) of what has fired so far, for however short a time."""
        found = self.query('count_over_time(ALERTS{alertstate="firing"}[1h])')
        return {
            (each["metric"]["alertname"], each["metric"]["severity"], each["metric"].get("job", "")) for each in found
        }
