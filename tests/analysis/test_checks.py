"""What is wrong with a question is found without an engine; what is right is never refused."""

import pytest

from kproxy.analysis import checks
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
