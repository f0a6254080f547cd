"""Differences between two configurations. The documentation lists the effect of each setting."""

import re
from pathlib import Path

import pytest

from kproxy.proxy.config.load import load
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.process.changing.changes import DRAINS, PROCESS, changes

PAGE = (Path(__file__).parents[4] / "docs" / "operations.md").read_text()


@pytest.fixture
def settings(tmp_path):
    def read(text):
        file = tmp_path / "kproxy.toml"
        file.write_text(text)
        return load(file, {})

    return read


ONE = '[[cluster]]\nname = "one"\nlisten = "127.0.0.1:9092"\nbootstrap = ["a:9092", "b:9092"]\n'
TWO = '[[cluster]]\nname = "two"\nlisten = "127.0.0.1:9192"\nbootstrap = ["c:9092"]\n'


def test_a_different_notation_is_no_change(settings):
    same = (
        '# as before\ndrain_timeout_s = 10\n[[cluster]]\nbootstrap="a:9092,b:9092"\nlisten="127.0.0.1:9092"\nname="one"'
    )
    assert not changes(settings(ONE), settings(same))


def test_each_changed_setting_is_listed_by_its_effect(settings):
    new = 'log_level = "debug"\nrecord = "tables"\n' + ONE.replace("a:9092", "x:9092") + 'detail = "topics"\n'
    found = changes(settings(ONE + TWO), settings(new + TWO.replace("two", "three")))
    assert found.process == ("log_level",) and found.restart == ("record (None -> tables)",)
    assert (found.added, found.removed) == (("three",), ("two",))
    assert found.changed == {"one": ("bootstrap", "detail")} and found.drained == ("two",)
    moved = changes(settings(ONE), settings(ONE.replace('"a:9092", "b:9092"', '"x:9092"')))
    assert moved.drained == ("one",)
    assert changes(settings(ONE), settings(ONE + "read_only = true\n")).drained == ("one",)


def test_a_change_of_principals_from_certificates_drains_connections(settings):
    plain = '[cluster.tls]\ncertificate = "one.pem"\n'
    asks = plain + 'ca = "ca.pem"\nclient_certificates = "required"\n'
    rules = 'principal_mapping_rules = "RULE:^CN=(.*?),.*$/$1/"\n'
    for before, after, drains in (
        ("", plain, False),
        (plain, plain.replace("one.pem", "two.pem"), False),
        (plain, asks, True),
        (asks, asks.replace("one.pem", "two.pem"), False),
        (asks, asks.replace("required", "wanted"), True),
        (asks, asks.replace("ca.pem", "other.pem"), True),
        (asks, asks + rules, True),
        (asks, "", True),
    ):
        found = changes(settings(ONE + before), settings(ONE + after))
        assert found.changed == {"one": ("tls",)} and found.drained == (("one",) if drains else ())


def test_the_documentation_lists_every_setting():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    named = {row.split("|")[1]: set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in rows}
    every = set().union(*named.values())
    assert Cluster.model_fields.keys() - {"name"} <= every
    at_once = set().union(*(names for row, names in named.items() if "cluster" not in row and "workers" not in row))
    assert at_once == set(PROCESS)
    drained = next(names for row, names in named.items() if "policy_default" in row)
    assert drained == DRAINS and Cluster.model_fields.keys() >= DRAINS and set(PROCESS) <= Config.model_fields.keys()
