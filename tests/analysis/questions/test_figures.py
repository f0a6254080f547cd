"""The figures of a report: time steps, the lines that are shown, and commands with the same answers."""

import shlex
from collections import Counter
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kproxy.analysis import jobs
from kproxy.analysis.checks import condition
from kproxy.analysis.duck import Tables
from kproxy.analysis.questions import figures
from kproxy.analysis.questions.pieces import FEW, span_us
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from tests.captures import capture


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("figures")
    convert([capture("k41_quota"), capture("k41_java_cluster")], place)
    return place


@pytest.fixture(scope="module")
def whole(place):
    """The answered questions of a report on the whole time."""
    with Tables(place) as tables:
        return figures.answered(tables)


def test_time_steps_are_round_and_their_number_is_about_sixty():
    spans = [10**power * step for power in range(3, 14) for step in (1, 3, 7)]
    steps = [span_us(figures.step_of(0, span)) for span in spans]
    assert all(span / step <= figures.STEPS for span, step in zip(spans, steps, strict=True))
    assert all(step == 1000 or span / step > figures.STEPS / 3.1 for span, step in zip(spans, steps, strict=True))
    assert all(one <= other for one, other in pairwise(steps))
    assert figures.step_of(0, 0) == "1 ms" and figures.step_of(0, 3_600_000_000) == "1 minutes"


def test_every_exchange_of_a_client_is_either_immediate_or_a_long_poll(place):
    known = {"api": "api", "max_wait_ms": "max_wait_ms"}
    with Tables(place) as tables:
        tables["exchanges"]
        sides = [condition(text, known, "exchanges") for text in (figures.AT_ONCE, figures.WAITING)]
        counts = [f"count_if({side})" for side in (*sides, f"{sides[0]} and {sides[1]}")]
        (row,) = tables.query(f"select count(*), {', '.join(counts)} from exchanges").fetched()
    assert row[0] == row[1] + row[2] and row[3] == 0 and row[2] > 0


def test_apis_with_many_exchanges_have_their_own_plots(place, whole):
    with Tables(place) as tables:
        by_api = jobs.latency(tables["exchanges"], by=["api"]).arrow().to_pylist()
    exchanges = {row["api"]: row["exchanges"] for row in whole["latency_at_once"].to_pylist()}
    waiting = {row["api"]: row["exchanges"] for row in whole["latency_waiting"].to_pylist()}
    assert Counter(exchanges) + Counter(waiting) == {row["api"]: row["exchanges"] for row in by_api}  # no API in both
    shown = set(whole["spread_at_once"]["api"].to_pylist())
    assert shown and len(shown) <= figures.APIS and all(exchanges[api] >= FEW for api in shown)
    assert set(whole["spread_waiting"]["api"].to_pylist()) <= {"Fetch", "JoinGroup", "SyncGroup"}
    assert {row["client"] for row in whole["throttle_over_time"].to_pylist()} == {"thr", "thr-req"}
    first, last = whole.first_us, whole.last_us
    assert all(
        first - span_us(whole.every) <= t.timestamp() * 1e6 <= last for t in whole["talkers"]["time"].to_pylist()
    )


@pytest.mark.ring2
def test_since_and_until_apply_to_all_questions(place, whole):
    with Tables(place) as tables:
        part = figures.answered(tables, until="+2s")
        assert figures.answered(tables, since="2031-01-01") is None
    assert part.last_us - part.first_us < 2_000_000 < whole.last_us - whole.first_us
    for name in ("latency_at_once", "talkers", "connections"):
        assert whole.by_name[name].question.since is None and part.by_name[name].question.until == "+2s"
    assert "--to +2s" in part.by_name["talkers"].command(["tables"])


NAMES = ("plain", "it's", 'quo"te', "back\\slash", "a''b", "\\", "--", "{x}", "$(rm)", "` or 1=1", "עברית", "x" * 200)


@pytest.mark.ring2
def test_names_in_commands_are_quoted_correctly(place, tmp_path):
    """Clients with quotes, backslashes and other special characters in their names: each command selects its client."""
    for folder in place.iterdir():
        (tmp_path / folder.name).mkdir() if folder.is_dir() else (tmp_path / folder.name).write_bytes(
            folder.read_bytes()
        )
        if folder.is_dir():
            table = pa.concat_tables(pq.ParquetFile(path).read() for path in sorted(folder.glob("*.parquet")))
            if folder.name == "exchanges":
                clients = [NAMES[number % len(NAMES)] for number in range(len(table))]
                throttles = [1 + 10_000 * (client in NAMES[-figures.NAMES :]) for client in clients]
                for name, values in (("client_id", clients), ("throttle_ms", throttles)):
                    at = table.column_names.index(name)
                    table = table.set_column(at, table.field(at), pa.array(values, table.field(at).type))
            pq.write_table(table, tmp_path / folder.name / "all.parquet")
    with Tables(tmp_path) as tables:
        found = figures.answered(tables)
        asked = found.by_name["throttle_over_time"]
        assert {row["client"] for row in asked.rows.to_pylist()} == set(NAMES[-figures.NAMES :])
        words = shlex.split(asked.command(["a place"]))
        assert words[:4] == ["kproxy", "analyze", "throttle", "a place"]
        again = asked.question.__class__(
            asked.question.job, asked.question.options, where=words[words.index("--where") + 1]
        )
        assert again.answer(tables).arrow().equals(asked.rows)


def test_a_missing_table_is_an_error(tmp_path):
    with pytest.raises(KproxyError), Tables(tmp_path / "none") as tables:
        figures.answered(tables)
