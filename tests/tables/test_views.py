"""Views join each row with its exchange and its connection, in DuckDB and in Spark."""

import pytest

import kproxy.spark
from kproxy.analysis.duck import Tables
from kproxy.analysis.engine import rows
from kproxy.convert.processes import convert
from kproxy.tables.views import VIEWS
from tests.captures import capture


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("views") / "tables"
    convert([capture("k41_java_cluster")], out)
    return str(out)


QUESTIONS = (
    "select count(*) as n, count(client_id) as clients, count(software_name) as softwares from exchanges_full",
    """select client_id, software_name, broker_id, api, outcome, count(*) as n, sum(bytes) as bytes from partitions_full
        where direction = 'request' group by all order by all""",
    """select client_id, software_version, tls, codec, count(*) as n, sum(records) as records, max(latency_ns) as most
        from batches_full group by all order by all""",
)


def answers(folder):
    with Tables(folder) as tables:
        frames = [tables.sql(text) for text in QUESTIONS]
        return [[dict(zip(frame.columns, row, strict=True)) for row in rows(frame)] for frame in frames]


def test_each_row_appears_once_with_its_client_and_software(folder):
    with Tables(folder) as tables:
        assert VIEWS.keys() <= tables.names().keys()
        for view in VIEWS:
            table = view.removesuffix("_full")
            counts = tables.sql(f"select (select count(*) from {view}), (select count(*) from {table})")
            ((full, plain),) = rows(counts)
            assert full == plain > 0
    whole, by_partition, by_batch = answers(folder)
    assert whole[0]["clients"] == whole[0]["n"] and whole[0]["softwares"] > 0
    assert {row["software_name"] for row in by_partition} >= {"apache-kafka-java"}
    assert all(row["client_id"] for row in by_batch) and any(row["most"] for row in by_batch)


@pytest.mark.ring2
def test_spark_gives_the_same_rows(spark, folder):
    assert set(kproxy.spark.views(spark, folder)) >= {*VIEWS, "exchanges"}
    asked = [[row.asDict() for row in spark.sql(text.replace("order by all", "")).collect()] for text in QUESTIONS]

    def order(some):
        return sorted(some, key=lambda row: [(value is None, str(value)) for value in row.values()])

    assert list(map(order, asked)) == list(map(order, answers(folder)))
