"""Rules, alerts and the dashboard ask for what kproxy really exposes, in a language that Prometheus understands."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.dashboards.traffic import exposition

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


QUERIES = [*dashboard_queries(), *("".join(found) for found in rules())]
SELECTOR = re.compile(r"(?<![\w:])((?:kproxy|process)_\w+)\b(?!:)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def selectors(query):
    """(metric, matchers) of every series that a query asks for; a variable of the board matches all."""
    plain = re.sub(r'=~"\$\w+"', '=~".*"', without_variables(query))
    for metric, matchers in SELECTOR.findall(re.sub(r"\b(?:by|on|group_left) \([^)]*\)", "", plain)):
        yield metric, MATCHER.findall(matchers)


def matches(labels, matchers):
    for name, operator, wanted in matchers:
        value = labels.get(name, "")
        equal = value == wanted if operator in ("=", "!=") else re.fullmatch(wanted, value) is not None
        if equal != (operator in ("=", "=~")):
            return False
    return True


def samples(text):
    """{sample name: [labels]} of a scrape."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def missing(text):
    """The selectors of all queries that no sample of a scrape answers."""
    exposed = samples(text)
    return {
        f"{metric} {matchers}"
        for query in QUERIES
        for metric, matchers in selectors(query)
        if not any(matches(labels, matchers) for labels in exposed.get(metric, ()))
    }


@pytest.fixture(scope="module")
def scraped():
    """What a kproxy exposes after real traffic."""
    return exposition(lambda text: not missing(text))


def test_traffic_makes_every_series_that_panels_and_alerts_ask_for(scraped):
    assert len(QUERIES) > 60
    assert not missing(scraped)


@pytest.mark.parametrize("query", QUERIES)
def test_labels_that_are_asked_for_exist(scraped, query):
    exposed = samples(scraped)
    plain = re.sub(r'"[^"]*"', '""', without_variables(query))
    recorded = set(re.findall(r"\b\w+:kproxy_\w+:\w+\b", plain))
    assert recorded <= set(re.findall(r"record: (\S+)", (DASHBOARDS / "rules.yml").read_text()))
    metrics = {metric for metric, _ in selectors(query)}
    assert metrics or recorded
    labels = {label for found in re.findall(r"\bby \(([^)]*)\)", plain) for label in found.split(", ")}
    for selector in re.findall(r"\{([^}]*)\}", plain):
        labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    if not recorded:
        assert labels <= FOREIGN.union(*(each for metric in metrics for each in exposed[metric]))


def test_the_dashboard_shows_every_metric(scraped):
    shown = " ".join(dashboard_queries())
    names = {family.name for family in text_string_to_metric_families(scraped) if family.name.startswith("kproxy_")}
    left_out = {name for name in names if name not in shown}
    # Told elsewhere: throttled responses by their times, sizes of answers by bytes.
    assert left_out == {
        "kproxy_throttled_responses",
        "kproxy_response_size_bytes",
        "kproxy_neutralised_addresses",
        "kproxy_start_time_seconds",
        "kproxy_address_leaks",  # the log names each once per API
        "kproxy_config_reloads",
        "kproxy_config_last_reload_successful",  # an alert
        "kproxy_config_last_reload_success_timestamp_seconds",
        "kproxy_failed_upgrades",
        "kproxy_predecessor_connections",
        "kproxy_authentications",  # there where kproxy logs in, or checks logins
        "kproxy_policy_refusals",  # there where a listener has a policy
        "kproxy_audit_lines",
        "kproxy_audit_lines_dropped",
        "kproxy_group_generation",
        "kproxy_insight_left_out",
        "kproxy_workers",  # with one process there is nothing to see
        "kproxy_worker_restarts",
        "kproxy_worker_cpu_seconds",
        "kproxy_worker_resident_memory_bytes",
    }
