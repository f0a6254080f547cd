"""Rules, alerts and boards: valid PromQL over series that kproxy really exposes.

A real Prometheus answers the same queries, with the demo's cluster.
"""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.boards.__main__ import BOARDS, text_of
from dashboards.boards.model import panels_of
from tests.broker.cluster import wait_for
from tests.broker.kproxy import Kproxy
from tests.dashboards import __main__ as rehearsal
from tests.dashboards import trouble
from tests.dashboards.traffic import exposition
from tests.demo.running import traffic
from tests.each import each
from tests.prometheus import Prometheus

HERE = Path(__file__).parent
DASHBOARDS = HERE.parents[1] / "dashboards"
# Not in the demo's cluster: it has no login, no policy, and one process.
ELSEWHERE = {
    "kproxy_authentications_total",  # only if kproxy logs in or checks logins
    "kproxy_policy_refusals_total",  # only if a listener has a policy
    "kproxy_worker_cpu_seconds_total",  # only with several workers
    "kproxy_worker_resident_memory_bytes",
}
FOREIGN = {"up", "job", "instance", "le"}  # Prometheus' own


def promtool(*arguments, cwd=DASHBOARDS):
    done = subprocess.run(["promtool", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


FILES = {name: json.loads((DASHBOARDS / name).read_text()) for name in BOARDS}


def queries_of(board):
    """Return the queries of a board: panels, including those of collapsed rows, and annotations."""
    panels = [target["expr"] for panel in panels_of(board["panels"]) for target in panel.get("targets", ())]
    return [*panels, *(each["expr"] for each in board["annotations"]["list"])]


def dashboard_queries():
    return [query for board in FILES.values() for query in queries_of(board)]


def without_variables(query):
    for name, value in (("$__rate_interval", "5m"), ("$__range", "1h"), (" @ end()", "")):
        query = query.replace(name, value)
    return query


@pytest.mark.parametrize("name", BOARDS)
def test_the_board_files_are_up_to_date_with_the_code(name):
    assert (DASHBOARDS / name).read_text() == text_of(BOARDS[name].BOARD), "run: python -m dashboards.boards"


def test_there_is_exactly_one_file_for_each_board():
    assert {path.name for path in DASHBOARDS.glob("*.json")} == set(BOARDS)
    assert len({board["uid"] for board in FILES.values()}) == len(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_has_descriptions_and_links_to_the_others(name):
    board = FILES[name]
    panels = panels_of(board["panels"])
    assert len(panels) >= 10
    numbers = [panel["id"] for panel in panels] + [part["id"] for part in board["panels"] if part["type"] == "row"]
    assert len(set(numbers)) == len(numbers)
    for panel in panels:
        assert len(panel["description"]) > 15 and panel["description"][-1] in ".?", panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and place["w"] > 0
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for part in board["panels"]
        for panel in ([part] if not part.get("collapsed") else [])
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels that overlap"
    assert board["links"][0]["tags"][0] in board["tags"] and board["links"][0]["includeVars"]
    assert {each["name"] for each in board["annotations"]["list"]} == {"Restarts of kproxy", "Rebalances", "Leadership"}
    names = [each["name"] for each in board["templating"]["list"]]
    assert names[:4] == ["datasource", "job", "instance", "cluster"]
    assert set(re.findall(r"\$(?!__)(\w+)", json.dumps(board["panels"]))) == set(names) - {"datasource"}


def rules():
    """Yield the expressions of both rule files; their YAML is simple enough for a regular expression."""
    for name in ("rules.yml", "alerts.yml"):
        text = (DASHBOARDS / name).read_text()
        yield from re.findall(r"^ +expr: (?:>-\n((?: {10,}.*\n)+)|(.*))", text, re.MULTILINE)


def test_rules_and_alerts_are_valid():
    promtool("check", "rules", "rules.yml", "alerts.yml")


def test_every_alert_has_a_dashboard_and_runbook_and_is_tested():
    text = (DASHBOARDS / "alerts.yml").read_text()
    alerts = text.split("- alert: ")[1:]
    assert len(alerts) > 25
    tested = (HERE / "alerts_test.yml").read_text()
    headings = {}
    for alert in alerts:
        name = alert.split()[0]
        found = re.findall(r"^ +(dashboard|runbook|summary|description): (.+)$", alert, re.MULTILINE)
        annotations = dict(found)
        assert annotations["dashboard"] in {board["uid"] for board in FILES.values()}, name
        assert annotations["summary"] and annotations["description"], name
        page, _, part = annotations["runbook"].partition("#")
        document = (DASHBOARDS.parent / page).read_text()
        headings[page] = set(re.findall(r"^#+ `?(\w+)`?$", document, re.MULTILINE))
        assert not part or part in headings[page], (name, part)
        assert f"alertname: {name}\n" in tested, f"{name} is not tested"


def test_every_alert_is_provoked_with_a_real_kafka():
    text = (DASHBOARDS / "alerts.yml").read_text()
    provoked = {*rehearsal.PROVOKED, *rehearsal.OF_AN_OUTAGE, *rehearsal.OF_A_PROCESS, *trouble.PROVOKED}
    assert not provoked & rehearsal.UNPROVOKED.keys()
    assert set(re.findall(r"- alert: (\w+)", text)) == provoked | rehearsal.UNPROVOKED.keys()


def test_alerts_fire_when_they_should(tmp_path):
    for path in (DASHBOARDS / "rules.yml", DASHBOARDS / "alerts.yml", HERE / "alerts_test.yml"):
        shutil.copy(path, tmp_path)
    promtool("test", "rules", "alerts_test.yml", cwd=tmp_path)


def test_the_queries_of_the_dashboard_are_valid(tmp_path):
    records = [
        {"record": f"query:{index}", "expr": without_variables(query)}
        for index, query in enumerate(dashboard_queries())
    ]
    assert len(records) > 120
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": records}]}))
    promtool("check", "rules", "--lint=none", "rules.yml", cwd=tmp_path)


def test_values_that_several_kproxies_report_for_one_cluster_count_once(tmp_path):
    """Two kproxies report on one cluster, one of them incompletely; a third reports on another cluster."""
    seen = {
        "kproxy_partitions_offline": ("", 3, 2, 1),
        "kproxy_partitions_isr_shrunk": ("", 5, 5, 2),
        "kproxy_group_rebalancing": (', group="g"', 1, 1, 1),
        "kproxy_group_members": (', group="g"', 3, 2, 4),
    }
    series = [
        {"series": f'{name}{{job="k", instance="{instance}", cluster="{cluster}"{more}}}', "values": f"{value}x10"}
        for name, (more, *values) in seen.items()
        for value, instance, cluster in zip(values, "abc", ("one", "one", "two"), strict=True)
    ]
    expected = {
        ("overview.json", "Partitions offline"): {"{}": 4},
        ("overview.json", "Groups that rebalance"): {"{}": 2},
        ("groups.json", "Groups that rebalance"): {"{}": 2},
        ("groups.json", "Members"): {"{}": 7},
        ("groups.json", "Members of each group"): {
            '{job="k", cluster="one", group="g"}': 3,
            '{job="k", cluster="two", group="g"}': 4,
        },
        ("groups.json", "Partitions without a leader"): {'{job="k", cluster="one"}': 3, '{job="k", cluster="two"}': 1},
        ("groups.json", "Partitions with replicas that are not in sync"): {
            '{job="k", cluster="one"}': 5,
            '{job="k", cluster="two"}': 2,
        },
    }
    tests = [
        {
            "expr": re.sub(r'=~"\$\w+"', '=~".*"', panel["targets"][0]["expr"]),
            "eval_time": "10m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in wanted.items()],
        }
        for (name, title), wanted in expected.items()
        for panel in panels_of(FILES[name]["panels"])
        if panel["title"] == title
    ]
    assert len(tests) == len(expected)
    case = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    (tmp_path / "test.yml").write_text(json.dumps({"evaluation_interval": "1m", "tests": [case]}))
    promtool("test", "rules", "test.yml", cwd=tmp_path)


QUERIES = [*dashboard_queries(), *("".join(found) for found in rules())]
SELECTOR = re.compile(r"(?<![\w:])((?:kproxy|process)_\w+)\b(?!:)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def selectors(query):
    """Yield (metric, matchers) of every selector in a query; a variable of the board matches all."""
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


@cache
def samples(text):
    """{sample name: [labels]} of a scrape."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def missing(text):
    """Return the selectors of all queries that match no sample of a scrape."""
    exposed = samples(text)
    return {
        f"{metric} {matchers}"
        for query in QUERIES
        for metric, matchers in selectors(query)
        if metric not in ELSEWHERE and not any(matches(labels, matchers) for labels in exposed.get(metric, ()))
    }


@pytest.fixture(scope="module")
def scraped():
    """Return the exposition of a kproxy after real traffic."""
    return exposition(lambda text: not missing(text))


def test_traffic_creates_every_series_that_panels_and_alerts_query(scraped):
    assert len(QUERIES) > 60
    assert not missing(scraped)


@each("query", QUERIES)
def test_queried_labels_exist(scraped, query):
    exposed = samples(scraped)
    plain = re.sub(r'"[^"]*"', '""', without_variables(query))
    recorded = set(re.findall(r"\b\w+:kproxy_\w+:\w+\b", plain))
    assert recorded <= set(re.findall(r"record: (\S+)", (DASHBOARDS / "rules.yml").read_text()))
    metrics = {metric for metric, _ in selectors(query)}
    assert metrics or recorded
    if metrics & ELSEWHERE:
        return
    labels = {label for found in re.findall(r"\bby \(([^)]*)\)", plain) for label in found.split(", ")}
    for selector in re.findall(r"\{([^}]*)\}", plain):
        labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    if not recorded:
        assert labels <= FOREIGN.union(*(each for metric in metrics for each in exposed[metric]))


@pytest.mark.parametrize("name", BOARDS)
def test_the_variables_of_a_board_filter_all_of_its_panels(scraped, name):
    """If its series have the label of a variable, a panel filters by the variable."""
    exposed = samples(scraped)
    board = FILES[name]
    variables = {each["name"] for each in board["templating"]["list"]} - {"datasource"}
    for panel in panels_of(board["panels"]):
        for target in panel["targets"]:
            for metric, matchers in SELECTOR.findall(without_variables(target["expr"])):
                if not matchers:
                    assert metric == "kproxy_build_info", target["expr"]  # only selects kproxy processes
                    continue
                labels = {"job", "instance", "cluster" if metric in ELSEWHERE and "worker" not in metric else "job"}
                labels = labels.union(*exposed.get(metric, ())) & variables
                fixed = {label for label, _, _ in MATCHER.findall(matchers)}
                assert labels <= fixed, (panel["title"], metric, labels - fixed)


def test_the_boards_show_every_metric(scraped):
    shown = " ".join(
        target["expr"]
        for board in FILES.values()
        for panel in panels_of(board["panels"])
        for target in panel["targets"]
    )
    names = {family.name for family in text_string_to_metric_families(scraped) if family.name.startswith("kproxy_")}
    left_out = {name for name in names if name not in shown}
    assert left_out == {
        "kproxy_start_time_seconds",  # an annotation
    }


# Not in the demo's cluster: series of groups and of optional settings of a listener.
NOT_IN_MINIATURE = re.compile(
    r"kproxy_group_|group!=|kproxy_tls_|kproxy_certificate_|kproxy_authentications|kproxy_policy|kproxy_unanswered|"
    r"kproxy_zookeeper_|kproxy_watch_|kproxy_telemetry_|kproxy_client_telemetry_|kproxy_otlp_|kproxy_lag_questions|"
    r"kproxy_lag_partition_series_left_out|kproxy_consumer_lag_seconds_exact"
)


@pytest.mark.ring2
def test_a_real_prometheus_fills_the_boards_and_its_alerts_fire(tmp_path):
    """Takes seconds: durations in the rules are divided by 60. Quotas and errors come from the demo."""
    (tmp_path / "broken").mkdir()
    broken = Kproxy("127.0.0.1:1", tmp_path / "broken")
    options = ("--detail", "topics", "--workers", "2", "--flight", str(tmp_path / "flight"))
    with traffic() as demo, Kproxy(demo.bootstrap, tmp_path, *options) as kproxy:
        demo.admit(kproxy.bootstrap)
        broken.start(waits_until_ready=False)
        try:
            wait_for("a kproxy without a cluster", broken.is_alive, 60)
            targets = {"kproxy": kproxy.admin, "broken": broken.admin}
            with Prometheus(tmp_path / "prometheus", targets, 60) as prometheus:

                def empty():
                    return [line for line in prometheus.empty_panels() if not NOT_IN_MINIATURE.search(line)]

                def fired():
                    return {(alert, job) for alert, _, job in prometheus.fired()}

                wait_for("data in every panel", lambda: not empty(), 90, pause_s=1)
                prometheus.check_rules()
                exemplars = prometheus.exemplars("kproxy_request_duration_seconds_bucket")
                assert exemplars and {each["client"] for each in exemplars} == {"127.0.0.1"}
                assert all(each["correlation_id"].isdigit() for each in exemplars)
                wait_for("not ready", lambda: ("KproxyNotReady", "broken") in fired(), 60)
                wait_for("errors", lambda: ("KproxyErrors", "kproxy") in fired(), 90)
                wait_for("throttles", lambda: ("KproxyClientsThrottled", "kproxy") in fired(), 90)
                broken.stop(kill=True)
                wait_for("down", lambda: ("KproxyDown", "broken") in fired(), 60)
                ours = {alert for alert, job in fired() if job == "kproxy"}
                assert not ours & {"KproxyNotReady", "KproxyDown", "KproxyBrokerUnbound", "KproxyAddressLeaks"}
        finally:
            broken.stop(kill=True)
