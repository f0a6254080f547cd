"""What is wrong with a question is found without an engine; what is right is never refused."""

import pytest

from kproxy.analysis import checks, parties
from kproxy.analysis.jobs import JOBS
from kproxy.errors import KproxyError


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ("api = 'Fetch'", ["api"]),
        ("api = 'it''s `colour`' or API = \"colour = 1\"", ["api", "API"]),
        ("lower(client_id) like 'x%' and not errors > 0", ["client_id", "errors"]),
        ("time > timestamp '2026-01-01' and time < now() - interval 5 minutes", ["time"]),
        ("cast(number as string) rlike '^1' and `group_id` is not null", ["number", "group_id"]),
        ("case when latency_ns between 1e6 and 2.5e6 then true else false end", ["latency_ns"]),
        ("exchanges.api in ('Fetch', 'Produce')", []),
        ("exists(array(api), x -> x = api)", []),
        ("api in (select api from other)", []),
        ("date = date '2026-01-01' and hour >= 5", ["date", "hour"]),
        ("", []),
    ],
)
def test_names_in_a_condition(condition, names):
    assert [name for name in checks.names_in(condition) if name not in checks.BY_HOUR] == [
        name for name in names if name not in checks.BY_HOUR
    ]
    checks.check_condition(condition, "exchanges")


def test_what_is_wrong_is_named_with_what_is_there():
    for condition in ("colour = 1", "api = 'x' and Colour > 3", "`client-id` = 'x'"):
        with pytest.raises(KproxyError, match=r"--where: exchanges has no column '.*': (did you mean|there are)"):
            checks.check_condition(condition, "exchanges")
    with pytest.raises(KproxyError, match="did you mean client"):
        checks.check_groups(["api", "clients"], "exchanges")
    with pytest.raises(KproxyError, match="connections has no column 'client'"):  # it has no client_id
        checks.check_groups(["client"], "connections")
    for wrong in ("a while", "5", "minute", "5 fortnights"):
        with pytest.raises(KproxyError, match="is no span of time"):
            checks.check_span(wrong)


def test_what_is_right_is_not_refused():
    for name, job in JOBS.items():
        words = job.example.split("--where ")
        if len(words) > 1:
            checks.check_condition(words[1].strip('"'), job.tables[0])
        assert name == job.run.__name__
    checks.check_groups(["version", "broker", "client", "host", "cluster", "date", "error"], "exchanges")
    checks.check_groups(["host", "broker"], "connections")
    for span in ("10 seconds", "1 minute", "interval 2 hours", "1 DAY"):
        checks.check_span(span)


@pytest.mark.parametrize(
    ("asked", "release"),
    [
        ("3.7", "3.7.2"),
        ("3.7.1", "3.7.2"),
        ("3.7.2", "3.7.2"),
        ("4.0", "4.0.2"),
        ("4", "4.4.0"),
        ("0.10", "0.10.2.2"),
        ("0.10.1", "0.10.1.1"),
        ("0.10.1.0", "0.10.1.1"),
        ("0.8", "0.8.2.2"),
        ("0.8.0", "0.8.0"),
    ],
)
def test_a_release_is_judged_as_the_last_of_its_line(asked, release):
    known, served = parties.served_by(asked)
    assert known == release
    assert served[0][:2] == (0, 3 if release >= "4" else 0)  # Produce; KIP-896


@pytest.mark.parametrize("asked", ["0.7", "0.8.3", "0.8.0.x", "4.5", "4.9.1", "3.7.", "3.7.x", "3.70", "", "latest"])
def test_an_unknown_release_is_answered_with_all_that_are_known(asked):
    with pytest.raises(
        ValueError, match=r"is not known here; known are 0\.8\.0, 0\.8\.1, .*, 0\.11\.0, 1\.0, .*, 4\.4, "
    ):
        parties.served_by(asked)
