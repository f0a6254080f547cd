"""Rows of two captures side by side: each figure is from its own capture, and only rows with equal keys are paired."""

import pytest

from kproxy.analysis.beside import COMPARED, SHOWN, beside
from kproxy.analysis.duck import Tables
from kproxy.analysis.questions.figures import TABLES, answered
from kproxy.convert.processes import convert
from tests.analysis.findings.made import Made
from tests.captures import capture


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    place = tmp_path_factory.mktemp("beside")
    convert([capture("k41_quota"), capture("k41_java_cluster"), capture("k111_java_cluster")], place / "ours")
    convert([capture("k111_java_cluster"), capture("k41_java_cluster")], place / "theirs")  # both have two clusters
    with Tables(place / "ours") as ours, Tables(place / "theirs") as theirs:
        yield ours, theirs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COMPARED)
def test_each_row_is_paired_with_the_row_of_the_same_keys(both, name):
    compared = COMPARED[name]
    found = beside(name, *both)
    answers = [compared.ask(tables).arrow().to_pylist() for tables in both]
    assert set(found.keys) | set(found.numbers) <= set(answers[0][0])

    def key(row):
        return tuple(row[each] for each in found.keys)

    for side, rows in enumerate(answers):
        by_key = {key(row): row for row in rows}
        assert len(by_key) == len(rows), "the keys are not unique"
        for pair in found.pairs:
            assert pair[side] == by_key.get(key(pair[0] or pair[1]))
    wanted = [key(row) for rows in answers for row in rows[:SHOWN]]
    assert [key(ours or theirs) for ours, theirs in found.pairs] == list(dict.fromkeys(wanted))
    if name in ("brokers", "quality", "topics", "connections"):
        assert any(ours and theirs for ours, theirs in found.pairs)


def test_several_clusters_are_distinguished(tmp_path):
    made = Made()
    for cluster in ("one", "two"):
        for number in range(3):
            made.exchange("app", "Produce", number, cluster=cluster)
    place = made.write(tmp_path / "tables")
    with Tables(place) as tables:
        found = beside("brokers", tables, tables)
        assert found.keys == ("cluster", "broker") and [ours["cluster"] for ours, _ in found.pairs] == ["one", "two"]
        assert all(ours == theirs for ours, theirs in found.pairs)


@pytest.mark.ring2
def test_a_comparing_report_has_every_paired_table(both):
    ours, theirs = both
    found = answered(ours, other={name: theirs[name] for name in TABLES})
    assert found is not None and list(found.beside) == list(COMPARED)
