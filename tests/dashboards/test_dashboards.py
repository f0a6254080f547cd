"""Rules, alerts and the dashboard ask for what kproxy really exposes, in a language that Prometheus understands."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kproxy.metrics.collector import registry_of
from kproxy.metrics.exposition import render
from tests.metrics.test_metrics import busy_metrics

HERE = Path(__file__).parent
DASHBOARDS = HERE.parents[1] / "dashboards"
FOREIGN = {"up", "job", "instance", "le"}  # Prometheus' own


def promtool(*arguments, cwd=DASHBOARDS):
    done = subprocess.run(["promtool", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def dashboard_queries():
    board = json.loads((DASHBOARDS / "kproxy.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def without_variables(query):
    return query.replace("$__rate_interval", "5m").replace("$__range", "1h")


def rules():
    """The expressions of both rule files; YAML of so plain a kind needs no parser."""
    for name in ("rules.yml", "alerts.yml"):
        text = (DASHBOARDS / name).read_text()
        yield from re.findall(r"^ +expr: (?:>-\n((?: {10,}.*\n)+)|(.*))", text, re.MULTILINE)


def test_rules_and_alerts_are_valid():
    promtool("check", "rules", "rules.yml", "alerts.yml")


def test_alerts_fire_when_they_should(tmp_path):
    for path in (DASHBOARDS / "rules.yml", DASHBOARDS / "alerts.yml", HERE / "alerts_test.yml"):
        shutil.copy(path, tmp_path)
    promtool("test", "rules", "alerts_test.yml", cwd=tmp_path)


def test_the_queries_of_the_dashboard_are_valid(tmp_path):
    records = [
        {"record": f"query:{index}", "expr": without_variables(query)}
        for index, query in enumerate(dashboard_queries())
    ]
    assert len(records) > 20
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": records}]}))
    promtool("check", "rules", "--lint=none", "rules.yml", cwd=tmp_path)


@pytest.mark.parametrize("query", [*dashboard_queries(), *("".join(found) for found in rules())])
def test_metrics_and_labels_that_are_asked_for_exist(query):
    exposed = {}
    for family in text_string_to_metric_families(render(registry_of(busy_metrics()))[0].decode()):
        for sample in family.samples:
            exposed.setdefault(sample.name, set()).update(sample.labels)
    plain = re.sub(r'"[^"]*"', '""', without_variables(query))
    recorded = set(re.findall(r"\b\w+:kproxy_\w+:\w+\b", plain))
    defined = set(re.findall(r"record: (\S+)", (DASHBOARDS / "rules.yml").read_text()))
    assert recorded <= defined
    metrics = set(re.findall(r"(?<!:)\b(?:kproxy|process)_\w+\b(?!:)", plain))
    assert metrics <= exposed.keys()
    assert metrics or recorded
    labels = {label for found in re.findall(r"\bby \(([^)]*)\)", plain) for label in found.split(", ")}
    for selector in re.findall(r"\{([^}]*)\}", plain):
        labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    known = set().union(FOREIGN, *(exposed[metric] for metric in metrics))
    if not recorded:
        assert labels <= known


# How the proxy itself stands: no panel yet.
OF_THE_PROXY_ITSELF = {
    "kproxy_ready",
    "kproxy_accepting",
    "kproxy_connection_limit",
    "kproxy_listeners",
    "kproxy_dial_seconds",
    "kproxy_dial_failures",
    "kproxy_loops_refused",
    "kproxy_log_lines_dropped",
}


def test_the_dashboard_shows_every_metric():
    shown = " ".join(dashboard_queries())
    names = {
        family.name
        for family in text_string_to_metric_families(render(registry_of(busy_metrics()))[0].decode())
        if family.name.startswith("kproxy_")
    }
    left_out = {name for name in names if name not in shown}
    # Told elsewhere: throttled responses by their times, accepted connections by those open, sizes of answers by bytes.
    assert left_out == {
        "kproxy_throttled_responses",
        "kproxy_response_size_bytes",
        "kproxy_neutralised_addresses",
        "kproxy_start_time_seconds",
        *OF_THE_PROXY_ITSELF,
    }
