"""The command line of questions: every job from its options to its answer, in every format, and mistakes."""

import csv
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from kproxy.analysis.jobs import JOBS
from kproxy.cli import cli
from kproxy.cli.analyze import tables_at
from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from tests.captures import capture


def run(*arguments):
    done = CliRunner().invoke(cli, ["analyze", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def rows_of(*arguments):
    return [json.loads(line) for line in run(*arguments, "--format", "json").splitlines()]


@pytest.mark.parametrize("program", ["analyze", "spark"])
def test_the_help_of_each_job_has_an_example(program):
    """The help of each job: its purpose, its options with their defaults, and a command that its own options allow."""
    whole = CliRunner().invoke(cli, [program, "--help"]).output
    assert all(f"  {name} " in whole for name in JOBS)
    for name in JOBS:
        help_text = CliRunner().invoke(cli, [program, name, "--help"], terminal_width=200).output
        example = next(
            line for line in help_text.splitlines() if line.startswith(f"    kproxy {program} {name} tables")
        )
        options = [word for word in example.split() if word.startswith("--")]
        assert all(f"  {option} " in help_text for option in options), name
    assert "Default: api." in CliRunner().invoke(cli, [program, "latency", "--help"], terminal_width=200).output


def test_the_examples_of_the_help_run(tables, tmp_path, monkeypatch):
    """The examples of the help texts, unchanged."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tables, "tables")
    shutil.copytree(tables, "tables-after")
    for name in JOBS:
        help_text = CliRunner().invoke(cli, ["analyze", name, "--help"], terminal_width=200).output
        example = next(
            line.strip() for line in help_text.splitlines() if line.startswith(f"    kproxy analyze {name} ")
        )
        done = CliRunner().invoke(cli, shlex.split(example)[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output


@pytest.mark.ring2
def test_the_commands_of_the_docs_run(tables, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "analyze.md").read_text()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tables, "tables")
    shutil.copy(capture("k41_quota"), "incident.pcap")
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()]
    assert len(lines) > 9 and all(line.startswith(("kproxy analyze ", "kproxy show ")) for line in lines)
    for line in lines:
        done = CliRunner().invoke(cli, shlex.split(line)[1:], catch_exceptions=False)
        assert done.exit_code == 0 and "No rows" not in done.output, line
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(compile(program, "docs/analyze.md", "exec"), {})
    assert all(f"`{name}`" in page for name in ("overview", *JOBS))


def test_the_commands_of_the_docs_about_groups_run(tables, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "groups.md").read_text()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tables, "tables")
    lines = [line for line in page.splitlines() if line.startswith("kproxy analyze ")]
    assert len(lines) > 3
    for line in lines:
        done = CliRunner().invoke(cli, shlex.split(line, comments=True)[1:], catch_exceptions=False)
        assert done.exit_code == 0, line


def test_formats_have_the_same_rows(tables, tmp_path):
    by = ("latency", tables, "--by", "api,client")
    lines = rows_of(*by)
    table = list(csv.DictReader(io.StringIO(run(*by, "--format", "csv"))))
    assert [{name: str(value) for name, value in line.items()} for line in lines] == table and lines
    run(*by, "--format", "parquet", "--out", tmp_path / "latency")
    assert pq.read_table(tmp_path / "latency").to_pylist() == lines
    shown = run(*by, "--limit", "3").splitlines()
    assert len(shown) == 4 and shown[0].split()[:4] == ["api", "client", "exchanges", "errors"]
    assert any(unit in shown[1] for unit in (" ms", " s", " µs"))
    assert run(*by, "--format", "csv", "--out", tmp_path / "latency.csv") == ""
    assert (tmp_path / "latency.csv").read_text() == run(*by, "--format", "csv")


def test_notes_report_omitted_rows_and_chosen_versions(tables, tmp_path):
    done = CliRunner().invoke(cli, ["analyze", "clients", "--replicas", str(tables)])
    assert len(done.stdout.splitlines()) == 51 and done.stderr.endswith("Only the first 50 rows: --limit shows more.\n")
    assert run("throttle", tables, "--where", "false") == "No rows.\n"
    shutil.copy(tables / "_kproxy.json", tmp_path)
    (tmp_path / "exchanges").mkdir()
    assert run("latency", tmp_path) == "No rows.\n"  # the captures had nothing for that table
    done = CliRunner().invoke(cli, ["analyze", "clients", str(tables), "--kafka", "3.7.1"])
    assert "Kafka 3.7.1 is judged as 3.7.2, the newest of its line" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rebalances --from 23:00", r"rebalances has 1 row, from 2026-11-21 09:\S+ to 2026-11-21 09:\S+ UTC; none is"),
        ("slow --where false --having false", "; none is chosen by --where and --having."),
        ("slow --from 23:00 --to 22:00", "--from 23:00 is not before --to 22:00; the table exchanges has"),
        ("registry", "The table registry has no rows: no packet or message that was read has operations of ZooKeeper."),
        ("split-brain", "; split-brain finds nothing in it."),
        ("slow --where api='produce'", "none is chosen by --where. api is never 'produce': did you mean 'Produce'?"),
        ("groups --where group_id='payments'", "group_id is never 'payments': there is '"),
        ("group-lag --where api='Produce'", r"--where chooses [\d,]+ rows? of partitions; group-lag finds nothing"),
    ],
)
def test_an_answer_without_rows_has_a_reason(tmp_path, words, message):
    where = shutil.copy(capture("k41_quota"), tmp_path)
    done = CliRunner().invoke(cli, ["analyze", *words.split(), str(where)], catch_exceptions=False)
    assert done.stdout == "No rows.\n" and re.search(message, done.stderr), done.stderr


@pytest.mark.parametrize("column", ("api", "client"))
def test_the_command_that_lists_the_values_of_a_column_runs_as_it_stands(tables, column):
    done = CliRunner().invoke(cli, ["analyze", "latency", "--where", f"{column}='###'", str(tables)])
    (words, count) = re.findall(r"`kproxy (.*)` lists its (\d+) values", done.stderr)[0]
    *command, _ = shlex.split(words)
    listed = CliRunner().invoke(cli, [*command, "--limit", "9999", str(tables)], catch_exceptions=False)
    assert listed.exit_code == 0 and 0 <= len(listed.stdout.splitlines()) - 1 - int(count) <= 1  # null is no value


def test_an_error_inside_an_answer_comes_with_the_command_that_decodes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(capture("k41_java_cluster"), "c.pcap")
    done = CliRunner().invoke(cli, ["analyze", "errors", "c.pcap"], catch_exceptions=False)
    assert re.search(r"AddPartitionsToTxn +errors inside the answer +19", done.stdout)
    (command,) = re.findall(r"An answer with errors inside, with its frames and packets: kproxy (.*)", done.stderr)
    shown = CliRunner().invoke(cli, command.split(), catch_exceptions=False).stdout
    assert "partitionErrorCode 51 CONCURRENT_TRANSACTIONS" in shown


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", ["analyze slow --format json", "analyze overview --format json", "report"])
def test_an_answer_that_does_not_fit_is_reported_and_leaves_no_file(tables, tmp_path, words):
    out = tmp_path / "answer"
    limited = ("sh", "-c", 'ulimit -f 1; exec "$@"', "sh", sys.executable, "-m", "kproxy", *words.split())
    done = subprocess.run(
        [*limited, str(tables), "--out", str(out), "-q"][: None if "analyze" in words else -1],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        f"kproxy: --out {out} cannot be written: File too large",
    )
    assert not list(tmp_path.iterdir())


def test_a_string_without_quotes_is_recognised(tables):
    with pytest.raises(KproxyError, match=r"no column 'billing' \(a text stands in quotes: 'billing'\)"):
        run("slow", tables, "--where", "client = billing")


def test_options_reach_the_job(tables):
    slow = rows_of("slow", tables, "--slower-than-ms", 1000, "--limit", 2, "--where", "api = 'Produce'")
    assert len(slow) == 2 and all(row["api"] == "Produce" and row["total_ns"] > 1_000_000_000 for row in slow)
    both = rows_of("compare", tables, "--with", tables, "--by", "api")
    assert both and all(row["exchanges"] == row["b_exchanges"] and row["p99_change"] in (1.0, None) for row in both)


def test_conditions_do_not_affect_values_computed_over_all_rows(tables):
    """Such as gaps between commits, and a partition's share of its topic."""
    for job in ("offsets", "skew"):
        everything, some = rows_of(job, tables), rows_of(job, tables, "--where", "partition = 0")
        assert some == [row for row in everything if row["partition"] == 0] and 0 < len(some) <= len(everything)
    # The exchanges before a slow request come from all requests; a series of slow ones consists of chosen requests.
    some = rows_of("slow", tables, "--where", "api = 'Fetch'")
    assert some and {row["api"] for row in some} == {"Fetch"}


def test_conditions_accept_group_names_and_reserved_words(tables):
    clients = {row["client"] for row in rows_of("talkers", tables, "--by", "client")}
    one = sorted(clients)[0]
    for job in ("latency", "talkers", "fetching", "slow", "throttle", "errors", "clients"):
        asked = ["--by", "client"] if job in ("latency", "talkers", "fetching", "throttle", "errors") else []
        for row in rows_of(job, tables, *asked, "--where", f"CLIENT = '{one}'"):
            assert row["client"] == one
    for job, column in (("lag", "client"), ("batching", "client"), ("offsets", "group_id")):
        everything = rows_of(job, tables)
        value = everything[0][column]
        quoted = value.replace("'", "''")
        assert rows_of(job, tables, "--where", f"{column} = '{quoted}'") == [
            row for row in everything if row[column] == value
        ]
    assert rows_of("offsets", tables, "--where", "offset >= 0 and `partition` < 1000") == rows_of("offsets", tables)
    assert rows_of("latency", tables, "--where", 'api = "Fetch" and client_id != \'a\\\\b""c{}\'', "--replicas")


@pytest.mark.ring2
def test_time_options_choose_rows(tables):
    seconds = rows_of("latency", tables, "--by", "source", "--every", "1 second")
    first, last = min(row["time"] for row in seconds), max(row["time"] for row in seconds)
    total = sum(row["exchanges"] for row in seconds)
    middle = sorted(row["time"] for row in seconds)[len(seconds) // 2]
    before, after = (
        sum(row["exchanges"] for row in rows_of("latency", tables, "--by", "source", option, middle))
        for option in ("--to", "--from")
    )
    assert before + after == total and 0 < before < total
    assert before == sum(row["exchanges"] for row in seconds if row["time"] < middle)
    clock = sum(row["exchanges"] for row in rows_of("latency", tables, "--by", "source", "--from", middle[11:19]))
    assert clock == after
    tail = rows_of("latency", tables, "--by", "source", "--every", "1 second", "--from", "-2s")
    assert tail and min(row["time"] for row in tail) >= last[:17] and sum(row["exchanges"] for row in tail) < total
    head = rows_of("latency", tables, "--by", "source", "--every", "1 second", "--to", "+2s")
    assert head and head[0]["time"] == first and sum(row["exchanges"] for row in head) < total
    assert rows_of("connections", tables, "--from", "-1s") and rows_of("quality", tables, "--from", "-1s")
    for name in JOBS:
        if name != "compare":
            run(name, tables, "--from", first, "--to", last)


def test_special_characters_in_file_names_are_literal(tables, tmp_path):
    """DuckDB reads a path as a glob, Spark's SQL a name in braces as a table."""
    odd = tmp_path / "it's [x]*? {1}"
    odd.mkdir()
    shutil.copytree(tables, odd / "tab[le]s")
    assert rows_of("latency", odd / "tab[le]s") == rows_of("latency", tables)
    shutil.copy(capture("k41_quota"), odd / "trace[1]*.pcap")
    there = rows_of("latency", odd / "trace[1]*.pcap")
    shutil.copy(capture("k41_quota"), tmp_path / "plain.pcap")
    assert there == rows_of("latency", tmp_path / "plain.pcap") and there
    with pytest.raises(KproxyError, match="Cannot access file"):
        run("sql", f"select * from read_parquet('{tables}/exchanges/*.parquet')", tmp_path / "plain.pcap")


def test_a_table_that_an_older_kproxy_did_not_write_is_reported(tables, tmp_path):
    """An empty answer would mean that nothing happened in any group."""
    older = tmp_path / "older"
    shutil.copytree(tables, older, ignore=shutil.ignore_patterns("group_events", "rebalances", "topology"))
    manifest = json.loads((older / "_kproxy.json").read_text())
    (older / "_kproxy.json").write_text(json.dumps(manifest | {"schema_version": 2}))
    for job, lacking in (("groups", "group_events, rebalances"), ("skew", "topology"), ("latency", None)):
        done = CliRunner().invoke(cli, ["analyze", job, str(older)], catch_exceptions=False)
        message = f"an older kproxy, which made no {lacking}: convert the captures again"
        assert done.exit_code == 0 and (message in done.stderr if lacking else not done.stderr)
    assert not CliRunner().invoke(cli, ["analyze", "groups", str(tables)], catch_exceptions=False).stderr


def test_time_limits_apply_to_every_table_of_a_question(tables):
    """To both sides of a comparison, and to a group's rebalances as to its events, from the same moment."""
    both = rows_of("compare", tables, "--with", tables, "--by", "api", "--to", "+2s")
    assert both and all(row["exchanges"] == row["b_exchanges"] for row in both)
    whole = {row["api"]: row["exchanges"] for row in rows_of("compare", tables, "--with", tables, "--by", "api")}
    assert any(row["exchanges"] < whole[row["api"]] for row in both)
    later = {
        row["api"]: row["exchanges"]
        for row in rows_of("compare", tables, "--with", tables, "--by", "api", "--from", "+2s")
    }
    parts = rows_of("compare", tables, "--with", tables, "--by", "api", "--to", "+2s", "--with-from", "+2s")
    assert {row["api"]: row["exchanges"] for row in both} == {r["api"]: r["exchanges"] for r in parts if r["exchanges"]}
    assert later == {row["api"]: row["b_exchanges"] for row in parts if row["b_exchanges"]}
    assert rows_of("compare", tables, "--with", tables, "--from", "2100-01-01") == []

    def began(*times):
        query = "select started_ns from rebalances where started_ns >= (select min(time_ns) from group_events) + "
        query = f"{query}{times[0]} order by 1" if times else "select started_ns from rebalances order by 1"
        return [json.loads(line) for line in run("sql", query, tables, "--format", "json").splitlines()]

    everything = began()
    (first,) = rows_of("sql", "select min(time_ns) as at from group_events", tables)
    middle = (everything[len(everything) // 2]["started_ns"] - first["at"]) // 1_000_000_000
    some = sum(row["rebalances"] for row in rows_of("groups", tables, "--from", f"+{middle}s"))
    assert some == len(began(middle * 1_000_000_000)) and 0 < some < len(everything)


def test_mistakes_are_reported(mistakes, tables):
    for arguments, message in mistakes:
        with pytest.raises(KproxyError) as fault:
            run(*arguments)
        assert message in str(fault.value) and "\n" not in str(fault.value)
    for where, message in (
        ("foo(api)", "foo does not exist"),
        ("api", "--where is no condition, since it is neither true nor false: give a condition in SQL"),
        ("api =", "--where cannot be read"),
    ):
        with pytest.raises(KproxyError, match=message) as fault:
            run("latency", tables, "--where", where)
        assert "\n" not in str(fault.value) and "Error:" not in str(fault.value)


def test_sql_queries_the_tables(tables):
    query = "select api, count(*) as n, max(time) as last from exchanges group by api order by n desc, api"
    found = [json.loads(line) for line in run("sql", query, tables, "--format", "json", "--limit", "2").splitlines()]
    assert [row["n"] for row in found] == sorted((row["n"] for row in found), reverse=True) and len(found) == 2
    assert found[0]["last"].endswith("Z") and found[0]["api"] == "Fetch"
    assert run("sql", "describe partitions", tables).splitlines()[1].split() == ["source", "VARCHAR", "YES"]
    assert run("sql", "select try_divide(1, 0) as none, unix_micros(min(time)) > 0 from batches;", tables)
    assert run("sql", "select count(*) as n from registry", tables).split() == ["n", "0"]  # no file of this table
    titles = run("sql", "select * from topology", tables, "--limit", "1").splitlines()[0].split()
    assert "time_UTC" in titles and "time_time" not in titles  # `time_ns` is the same time


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select apii from exchanges", "there is no column 'apii': did you mean api?"),
        ("select api from exchange", "there is no table 'exchange': did you mean exchanges"),
        ("select from where", 'the query cannot be read near "where"'),
        ("select cast(1 as varchar)::varchar[1:3]", "the query cannot be read: Subscript/slice cannot be applied"),
        ("select offset from partitions", 'offset is a word of SQL, as a column it is written "offset"'),
        ("select 1; select 2", "one SELECT is asked for"),
        ("copy exchanges to 'x.csv'", "one SELECT is asked for"),
        ("create table x as select 1", "one SELECT is asked for"),
        ("attach 'x.db'", "one SELECT is asked for"),
        ("set enable_external_access = true", "one SELECT is asked for"),
        ("install httpfs", "one SELECT is asked for"),
        ("", "one SELECT is asked for"),
        ("select * from read_csv('/etc/passwd')", "Cannot access file"),
        ("select * from read_text('/etc/passwd')", "Cannot access file"),
        ("select * from '/etc/passwd'", "there is no table"),
        ("select * from glob('/etc/*')", "Cannot access|disabled|no rows"),
        ("select api / 0 from exchanges", "."),
    ],
)
def test_sql_reads_the_tables_and_nothing_else(tables, query, message):
    with pytest.raises(KproxyError, match=message) as fault:
        run("sql", query, tables)
    assert "\n" not in str(fault.value)


def test_sql_after_the_tables_is_refused_with_the_right_command(tables):
    with pytest.raises(KproxyError, match="stands before the tables it is about: kproxy analyze sql 'select 1 as n' "):
        run("sql", tables, "select 1 as n")


@pytest.mark.ring2
def test_the_overview_has_the_figures_of_the_jobs(tables, tmp_path):
    """Its figures equal those of the jobs."""
    overview = json.loads(run("overview", tables, "--format", "json", "--limit", 1000))
    (span,) = overview["span"]
    counted = sum(row["exchanges"] for row in rows_of("latency", tables, "--by", "cluster", "--replicas"))
    assert span["exchanges"] >= counted > 0 and span["sources"] == 3
    assert sum(row["exchanges"] for row in overview["brokers"]) == span["exchanges"]
    assert sum(row["bytes"] for row in overview["clients"]) == sum(row["bytes"] for row in rows_of("talkers", tables))
    by_api = {row["api"]: row for row in rows_of("latency", tables)}
    assert all(row["p99_ns"] == by_api[row["api"]]["p99_ns"] for row in overview["apis"] if row["api"] in by_api)
    assert overview["errors"] == rows_of("errors", tables) and overview["throttles"] == rows_of("throttle", tables)
    read = {row["topic"]: row["read_bytes"] for row in overview["topics"]}
    fetched = [row for row in rows_of("skew", tables) if row["api"] == "Fetch"]
    assert {row["topic"]: sum(r["bytes"] for r in fetched if r["topic"] == row["topic"]) for row in fetched} == {
        topic: size for topic, size in read.items() if size is not None
    }
    assert overview["slowest"][0]["cause"] == "throttle"
    assert "kproxy analyze findings" in overview["next"][0] and "kproxy analyze slow" in overview["next"][1]
    shown = run("overview", tables)
    first, _, rest = shown.partition("\n\n")
    assert rest.startswith("2026-11-21 09:48:53") and "Ask next" in rest and max(map(len, shown.splitlines())) < 300
    assert "12 of 20 answers throttled" in first and [line.split()[0] for line in first.splitlines()[-4:]] == [
        *("failed", "stood", "p99", "behind")
    ]
    assert overview["verdict"]["sentence"].split() == " ".join(first.splitlines()[:-4]).split()
    assert overview["verdict"]["findings"] == sum(1 + one["more"] for one in rows_of("findings", tables))
    late = json.loads(run("overview", tables, "--format", "json", "--from", "-10s"))
    assert late["span"][0]["exchanges"] < span["exchanges"] and late["span"][0]["lasted_ns"] <= 10_000_000_000
    none = run("overview", tables, "--from", "2030-01-01")
    of = f"of {span['exchanges']:,} exchanges, from 2026-11-21 09:48:53 to "
    assert none.startswith(f"No exchanges. --from 2030-01-01: {of}")
    assert len(run("overview", shutil.copy(capture("k41_BASE"), tmp_path)).splitlines()) > 20
    with_holes = run("overview", shutil.copy(capture("k41_gaps"), tmp_path))
    assert "The capture is incomplete: bytes are missing" in " ".join(with_holes.split())


def test_the_engine_is_silent_and_help_imports_no_engine(tables):
    code = "import sys; from kproxy.cli import main; sys.argv[0] = 'kproxy'\ntry: main()\nfinally: "
    code += "print('LOADED', *({'pyarrow', 'duckdb', 'pyspark', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    command = [sys.executable, "-c", code, "analyze"]
    done = subprocess.run([*command, "quality", str(tables)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "pyspark" not in done.stderr and done.stderr.startswith("LOADED")
    done = subprocess.run([*command, "slow", "--help"], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "LOADED"


def same_but_queues(text):
    """The rows without queue and mute times, which before schema version 6 began at a request's last byte."""
    rows = map(json.loads, text.splitlines())
    return [{name: value for name, value in row.items() if not name.startswith(("queue_", "muted_"))} for row in rows]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version", [1, 2])
def test_tables_of_older_kproxys_are_answered_as_far_as_possible(tmp_path, version):
    """Tables written with these schema versions; missing columns are reported with the remedy."""
    with tarfile.open(Path(__file__).parents[1] / "data" / "older" / f"v{version}.tar.xz") as bundle:
        bundle.extractall(tmp_path)
    assert json.loads((tmp_path / "_kproxy.json").read_text())["schema_version"] == version
    now = shutil.copy(capture("k41_quota"), tmp_path)
    for name in ("overview", "latency", "slow", "errors", "skew", "group-lag", "rebalances", "connections"):
        asked = ["analyze", name, "--format", "json"]
        done = CliRunner().invoke(cli, [*asked, str(tmp_path)], catch_exceptions=False)
        assert done.exit_code == 0
        if name in ("overview", "rebalances", "skew"):
            assert "was written by an older kproxy, which made no " in done.stderr
            assert done.stderr.splitlines()[0].endswith(": convert the captures again")
        if name in ("latency", "errors", "connections"):
            today = CliRunner().invoke(cli, [*asked, str(now)], catch_exceptions=False)
            assert same_but_queues(done.stdout) == same_but_queues(today.stdout)


@pytest.mark.parametrize("fault", (None, KproxyError("Out of buffer")))
def test_tables_that_are_replaced_during_a_question_are_refused(tmp_path, fault):
    """DuckDB may have read the old file of one table and the new one of another, or parts of both."""
    first, second = capture("k41_midstream"), capture("k41_quota")
    convert([first], tmp_path)
    with (
        pytest.raises(KproxyError, match="the tables were replaced while they were read: ask again"),
        tables_at([str(tmp_path)], ["exchanges"], {}),
    ):
        convert([second], tmp_path, Settings(append=True))
        if fault is not None:
            raise fault
    with tables_at([str(tmp_path)], ["exchanges"], {}) as folder:
        assert folder(False) == str(tmp_path)
