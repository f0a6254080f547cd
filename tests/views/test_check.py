"""The lines of `kproxy check` for each form of a setting."""

import pytest

from kproxy.checks.filters import Apis, Listed
from kproxy.views.check import faults, filters, runs, warnings

PLAIN = {
    "name": "east",
    "listen": "h:9092",
    "route": "ports",
    "broker_ports": ["1: h:9093", "2: h:9094"],
    "advertise": "h",
    "bootstrap": ["b:9092", "c:9092"],
    **dict.fromkeys(("tls", "upstream_tls", "authentication", "login", "policy", "limits")),
}
FIRST = {
    "listens at": "h:9092 (route ports)",
    "broker ports": "1: h:9093, 2: h:9094",
    "clients dial": "h",
    "brokers at": "b:9092, c:9092",
}
REST = {
    "client TLS": "no",
    "broker TLS": "no",
    "login": "passed through, if clients log in",
    "authentication": "by the brokers",
    "policy": "none: everything passes",
}


def summary(cluster, **more):
    nothing = {"admin": None, "record": None, "flight": None, "audit": None}
    drain = {"delay_s": 0.0, "timeout_s": 27.5}
    return {"clusters": [{**PLAIN, **cluster}], "zookeeper": [], "drain": drain, **nothing, **more}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, {}),
        (
            {"tls": {"certificate": "c.pem", "client_certificates": "no"}},
            {"client TLS": "c.pem, client certificates no"},
        ),
        ({"upstream_tls": {"ca": "system", "verify_hostname": True}}, {"broker TLS": "CA system"}),
        (
            {"upstream_tls": {"ca": "ca.pem", "verify_hostname": False}},
            {"broker TLS": "CA ca.pem, host names NOT verified"},
        ),
        ({"login": "PLAIN"}, {"login": "PLAIN by kproxy"}),
        (
            {"authentication": ["PLAIN", "OAUTHBEARER"]},
            {"login": "none at the brokers", "authentication": "PLAIN, OAUTHBEARER"},
        ),
        (
            {"policy": {"rules": 1, "default": "allow", "read_only": False}},
            {"policy": "1 rule, what none matches is allowed"},
        ),
        (
            {"policy": {"rules": 0, "default": "deny", "read_only": True}},
            {"policy": "read-only, 0 rules, what none matches is denied"},
        ),
        ({"limits": {"max_connections": 9, "max_age_s": 60}}, {"limits": "max_connections 9, max_age_s 60"}),
    ],
)
def test_each_setting_of_a_cluster_has_its_line(settings, said):
    shown = list(runs(summary(settings)))
    assert shown[0] == "cluster east"
    assert {line[2:17].rstrip(): line[18:] for line in shown[1:-2]} == {**FIRST, **REST, **said}
    assert shown[-2:] == [
        "admin             none: no /metrics, /health, /ready",
        "drain             0 s of delay, then at most 27.5 s",
    ]


def test_the_settings_of_the_process_follow():
    zookeeper = [{"name": "z", "listen": "h:2181", "servers": ["a:2181", "b:2181"]}]
    shown = list(runs(summary({}, zookeeper=zookeeper, admin="h:9600", record="/r", flight=None, audit="/a")))
    assert shown[-7:] == [
        "zookeeper z",
        "  listens at      h:2181",
        "  servers at      a:2181, b:2181",
        "admin             h:9600",
        "drain             0 s of delay, then at most 27.5 s",
        "record            /r",
        "audit             /a",
    ]


def test_faults_and_warnings_have_their_places():
    assert list(faults((("a", "b\x1b"), ("", "c")))) == ["a: b\\x1b", "c"]
    assert list(warnings([("place", "mistake", "fix")])) == ["warning: place: mistake: fix"]


def test_filters_in_their_order_and_what_each_decides():
    none, all_apis = Apis((), ("Fetch", "Produce")), Apis(("Fetch", "Produce"), ())
    one, most = Apis(("Fetch",), ("Metadata", "Produce")), Apis(("Fetch", "Metadata"), ("Produce",))
    half = Apis(("Fetch",), ("Produce",))
    chain = [
        Listed("policy", "refuses", all_apis, none),
        Listed("rewrite", "replaces", one, one),
        Listed("versions", "caps", half, most),
    ]
    assert list(filters("east", chain, none)) == [
        "cluster east: a request passes these filters from top to bottom, and so does its answer",
        "  1  policy      refuses",
        f"{'':17}requests all APIs",
        "  2  rewrite     replaces",
        f"{'':17}both     Fetch",
        "  3  versions    caps",
        f"{'':17}requests Fetch",
        f"{'':17}answers  all APIs but Produce",
        "  No filter decides or changes: no API",
    ]
    narrow = list(filters("east", [], Apis(tuple(f"Api{n}" for n in range(9)), tuple(map(str, range(9)))), width=50))
    assert narrow[1:] == [
        "  No filter decides or changes: Api0, Api1, Api2,",
        f"{'':32}Api3, Api4, Api5,",
        f"{'':32}Api6, Api7, Api8",
    ]
