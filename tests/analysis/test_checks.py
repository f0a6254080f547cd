"""Errors in a question are found without an engine; a valid question is never refused."""

import pytest

from kproxy.analysis import checks
from kproxy.analysis.jobs import JOBS
from kproxy.analysis.questions import parties
from kproxy.errors import KproxyError

EXCHANGES = checks.names_of("exchanges")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("api = 'Fetch'", "(`api` = 'Fetch')"),
        ("api = 'it''s `colour`' or API = \"colour = 1\"", "(`api` = 'it''s `colour`' or `api` = 'colour = 1')"),
        ("lower(client_id) like 'x%' and not errors > 0", "(lower(`client_id`) like 'x%' and not `errors` > 0)"),
        ("time > timestamp '2026-01-01'", "(`time` > timestamp '2026-01-01')"),
        ("time < now() - interval 5 minutes", "(`time` < now() - interval 5 minutes)"),
        ("cast(number as string) = '1'", "(cast(`number` as string) = '1')"),
        ("latency_ns between 1e6 and 2.5e-6", "(`latency_ns` between 1e6 and 2.5e-6)"),
        ("client = 'x'", "(coalesce(nullif(client_id, ''), client_address) = 'x')"),
        ("date = date '2026-01-01' and hour >= 5", "(`date` = date '2026-01-01' and `hour` >= 5)"),
        (r"client_id = 'a\\b'", "(`client_id` = concat('a', chr(92), 'b'))"),
        (r"client_id = 'a\'b'", "(`client_id` = 'a''b')"),
    ],
)
def test_a_condition_is_translated_for_both_engines(given, meant):
    text = checks.condition(given, EXCHANGES, "exchanges")
    assert text.replace(EXCHANGES["client"], "coalesce(nullif(client_id, ''), client_address)") == meant


@pytest.mark.parametrize("text", ["", "  ", "1)", "((1)", "1; 2", "1 -- 2", "1 /* 2", "1 -> b", "'", '"', "`", "{x}"])
def test_text_that_is_not_a_single_condition_is_refused(text):
    with pytest.raises(KproxyError, match="--where cannot be read near"):
        checks.condition(text, EXCHANGES, "exchanges")


def test_an_error_names_the_unknown_column_or_span_with_a_suggestion():
    for text in ("colour = 1", "api = 'x' and Colour > 3", "`client-id` = 'x'"):
        with pytest.raises(KproxyError, match=r"--where: exchanges has no column '.*': (did you mean|there are)"):
            checks.condition(text, EXCHANGES, "exchanges")
    with pytest.raises(KproxyError, match="regexp_like"):
        checks.condition("api rlike 'F'", EXCHANGES, "exchanges")
    with pytest.raises(KproxyError, match="did you mean client"):
        checks.check_groups(["api", "clients"], "exchanges")
    with pytest.raises(KproxyError, match="connections has no column 'client'"):  # the table has no client_id
        checks.check_groups(["client"], "connections")
    for wrong in ("a while", "5", "minute", "5 fortnights", "0 s", "-5m"):
        with pytest.raises(KproxyError, match="is no span of time"):
            checks.check_span(wrong)


def test_the_examples_of_all_jobs_are_accepted():
    for name, job in JOBS.items():
        words = job.example.split("--where ")
        if len(words) > 1:
            checks.condition(words[1].strip('"'), checks.names_of(job.tables[0], dict(job.names)), job.tables[0])
        assert name == job.run.__name__.replace("_", "-")
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
def test_a_minor_release_is_checked_as_its_last_patch_release(asked, release):
    known, served = parties.served_by(asked)
    assert known == release
    assert served[0][:2] == (0, 3 if release >= "4" else 0)  # Produce; KIP-896


@pytest.mark.parametrize("asked", ["0.7", "0.8.3", "0.8.0.x", "4.5", "4.9.1", "3.7.", "3.7.x", "3.70", "", "latest"])
def test_the_error_of_an_unknown_release_lists_the_known_ones(asked):
    with pytest.raises(
        ValueError, match=r"is not known here; known are 0\.8\.0, 0\.8\.1, .*, 0\.11\.0, 1\.0, .*, 4\.4, "
    ):
        parties.served_by(asked)
