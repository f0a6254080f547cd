"""docs/security.md: the tests and settings that it names exist, and each state in which bytes wait has its line."""

import re

import pytest

from tests.project import ROOT

PAGE = (ROOT / "docs/security.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))


@pytest.mark.parametrize("test", TESTS)
def test_a_test_that_keeps_a_promise_exists(test: str) -> None:
    assert (ROOT / test).exists()


def test_each_promise_names_its_adversary_and_its_tests() -> None:
    table = PAGE.split("## What kproxy promises")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 8 and all(len(row) == 3 and row[1] and "`" in row[2] for row in rows)


def test_metrics_that_show_an_attack_exist() -> None:
    metrics = (ROOT / "docs/metrics.md").read_text()
    names = re.findall(r"`(kproxy_[a-z_]+)", PAGE)
    assert len(names) > 2 and all(name in metrics for name in names)
    assert all(f"`{kind}`" in metrics for kind in ("sasl_token", "malformed_request", "held_too_many", "malformed"))
