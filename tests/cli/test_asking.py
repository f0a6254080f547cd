"""Every job accepts every option of questions; the tests find jobs themselves, so that new ones are included."""

import csv
import io
import json

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from kproxy.analysis import checks
from kproxy.analysis.jobs import JOBS
from kproxy.analysis.question import Question
from kproxy.analysis.questions.pieces import GROUPS
from kproxy.cli import cli
from kproxy.cli.asking import CONDITIONS

OF_QUESTIONS = {"--from", "--to", "--where", "--having", "--limit", "--format", "--out", "--quiet"}


def ask(program, name, *arguments):
    done = CliRunner().invoke(cli, [program, name, *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def options_of(program, name):
    command = cli.get_command(None, program).get_command(None, name)
    return {text for parameter in command.params for text in parameter.opts if text.startswith("--")}


@pytest.mark.parametrize("name", JOBS)
def test_every_job_has_every_option_or_a_reason_for_its_absence(name):
    job = JOBS[name]
    for program in ("analyze", "spark"):
        there = options_of(program, name)
        assert there >= OF_QUESTIONS
        for option, why in (("--every", job.no_steps), ("--replicas", job.no_replicas)):
            assert (option in there) == (not why), f"{name} has neither {option} nor a reason, or both"
    named = checks.names_of(job.tables[0], dict(job.names))
    if job.tables[0] == "exchanges" or (job.has_condition and "exchanges" in job.tables):
        assert {"client", "host", "broker"} <= {*named}


@pytest.mark.parametrize("name", JOBS)
def test_the_example_of_a_condition_fits_the_table_of_its_job(name):
    example = CONDITIONS[JOBS[name].tables[0]]
    Question(JOBS[name], where=example).check()
    help_text = " ".join(CliRunner().invoke(cli, ["analyze", name, "--help"]).stdout.split())
    assert f'"{example}"' in help_text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", JOBS)
def test_every_job_accepts_all_options_at_once(tables, tmp_path, name):
    """Options that exclude no row change nothing; all formats have the same rows; --limit keeps the first ones."""
    job = JOBS[name]
    own = ["--with", tables] if "--with" in options_of("analyze", name) else []
    own += ["--every", "5 seconds"] if not job.no_steps else []
    own += ["--replicas"] if not job.no_replicas else []
    plain = [json.loads(line) for line in ask("analyze", name, tables, *own, "--format", "json").splitlines()]
    known = [
        each for each in checks.names_of(job.tables[0], dict(job.names)) if each in GROUPS or each in dict(job.names)
    ]
    known = known or list(checks.names_of(job.tables[0]))[:1]
    where = " and ".join(f"({each} is null or {each} is not null)" for each in known)
    having = (
        " and ".join(f"(`{each}` is null or `{each}` is not null)" for each in (plain[0] if plain else {})) or "true"
    )
    everything = ["--from", "+1us", "--to", "2100-01-01", "--where", where, "--having", having]
    if job.tables[0] not in ("connections", "quality"):  # those have rows from their first moment on
        everything[1] = "2000-01-01"
    asked = [tables, *own, *everything, "--quiet", "--limit", 3]
    some = [json.loads(line) for line in ask("analyze", name, *asked, "--format", "json").splitlines()]
    assert some == plain[:3], name
    quiet = CliRunner().invoke(cli, ["analyze", name, str(tables), *map(str, own), "--quiet"])
    assert (quiet.exit_code, quiet.stderr) == (0, "")  # also for a table of 50 rows and more
    if not plain:  # the captures have no rows for this job
        return
    of_csv = list(csv.DictReader(io.StringIO(ask("analyze", name, *asked, "--format", "csv"))))
    assert [list(row) for row in of_csv] == [list(row) for row in some]
    ask("analyze", name, *asked, "--format", "parquet", "--out", tmp_path / "answer")
    answer = pq.read_table(tmp_path / "answer")
    assert answer.num_rows == len(some) and answer.column_names == list(some[0])
    times = [field for field in answer.schema if str(field.type).startswith("timestamp")]
    assert all(field.type.tz == "UTC" for field in times)
    shown = ask("analyze", name, *asked).splitlines()
    assert len(shown) == len(some) + 1
    assert all(f"{field.name}_UTC" in shown[0] for field in times)
    assert all(some[0][field.name] is None or some[0][field.name].endswith("Z") for field in times)


def quoted(value):
    return str(value).replace("'", "''")


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if "--by" in options_of("analyze", name)])
def test_every_name_for_by_is_valid_for_where(tables, name):
    job = JOBS[name]
    own = ["--with", tables] if "--with" in options_of("analyze", name) else []
    known = (*checks.names_of(job.tables[0]), *(set(job.groups) & set(dict(job.names))))
    named = [each for each in GROUPS if each in known] or ["topic"]  # group-lag is by groups and topics
    first = [
        json.loads(line)
        for line in ask(
            "analyze", name, tables, *own, "--by", ",".join(named), "--format", "json", "--limit", 1
        ).splitlines()
    ]
    if first:
        where = " and ".join(f"{each} = '{quoted(first[0][each])}'" for each in named)
        found = ask("analyze", name, tables, *own, "--by", ",".join(named), "--where", where, "--format", "json")
        assert [json.loads(line)[each] for line in found.splitlines()[:1] for each in named] == [
            first[0][each] for each in named
        ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shown", ["json", "csv", "parquet", "table"])
def test_an_overview_is_written_in_every_format(tables, tmp_path, shown):
    out = tmp_path / "overview"
    ask("analyze", "overview", tables, "--format", shown, "--out", out, "--quiet", "--limit", 2)
    if shown in ("csv", "parquet"):
        assert len(list(out.iterdir())) > 10 and len(pq.read_table(out / "apis") if shown == "parquet" else [1, 2]) == 2
    else:
        assert "Produce" in out.read_text()


def test_a_limit_beyond_an_engines_range_is_refused(tables):
    for name in ("latency", "overview", "sql"):
        words = ["select 1", tables] if name == "sql" else [tables]
        refused = CliRunner().invoke(cli, ["analyze", name, *map(str, words), "--limit", str(10**30)])
        assert refused.exit_code == 2 and "is not in the range" in refused.stderr
    assert ask("analyze", "latency", tables, "--limit", 2**31 - 2, "--format", "csv")
