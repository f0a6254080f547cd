"""`kproxy.spark.reading.read` distributes captures over tasks and returns the tables of `kproxy convert`."""

import logging
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from bench.offline import KINDS, generate
from kproxy.convert.job import Settings
from kproxy.convert.parts import reader
from kproxy.convert.processes import convert
from kproxy.spark import source
from kproxy.spark.reading import read
from kproxy.tables import schema
from kproxy.tables.records import chosen
from tests.captures import capture
from tests.spark.test_source import in_order


def converted(paths, place, settings=None):
    convert(paths, place, settings or Settings(), processes=1)
    return {
        folder.name: pa.concat_tables([pq.read_table(file) for file in sorted(folder.iterdir())])
        for folder in place.iterdir()
        if folder.is_dir()
    }


def assert_same_rows(tables, theirs):
    assert set(tables) == set(theirs) and len(tables) == len(theirs)
    for name, rows in theirs.items():
        if not len(rows):  # no job needed
            assert tables[name].columns == rows.schema.names, name
            continue
        ours = tables[name].toArrow()
        flat = rows.select([field.name for field in rows.schema if not pa.types.is_nested(field.type)])
        assert in_order(ours, flat).equals(in_order(flat, flat)), name


def test_large_and_small_captures_give_the_tables_of_convert(spark, tmp_path, monkeypatch):
    """One capture of two connections in four parts, each byte read once; further files, one of which is no capture."""
    path = tmp_path / "busy.pcap"
    with path.open("wb") as file:
        generate(replace(KINDS[0], connections=2), file, 13_000)
    (tmp_path / "notes.txt").write_text("no capture")
    monkeypatch.setattr(reader, "OVERLAP_PART", 40)
    size = path.stat().st_size
    paths = [path, capture("k41_quota"), capture("k41_gz")]
    theirs = converted(paths, tmp_path / "converted")
    with read(spark, [*paths, tmp_path / "notes.txt"], split_bytes=size // 4) as tables:
        assert not tables.unsplittable and size <= tables.read_bytes <= 1.1 * size
        assert [str(fault) for fault in tables.failed] and "notes.txt" in str(tables.failed[0])
        assert_same_rows(tables, theirs)
        with pytest.raises(KeyError):
            tables["records"]


def test_records_and_an_empty_folder_are_read(spark, tmp_path):
    settings = Settings(records=chosen("rdk2", "hash"))
    path = capture("k41_librdkafka")
    theirs = converted([path], tmp_path / "converted", settings)
    with read(spark, path, settings, split_bytes=250_000) as tables:
        assert_same_rows(tables, theirs)
        assert tables["records"].count() == len(theirs["records"]) > 10
    (tmp_path / "empty.pcap").write_bytes(b"")
    with read(spark, str(tmp_path / "empty.pcap")) as tables:
        assert tables["exchanges"].count() == 0 and len(tables.failed) == 1
        assert tables["exchanges"].columns == schema.EXCHANGES.schema.names


def test_a_source_that_reads_a_large_capture_in_one_task_warns(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(source, "LARGE_BYTES", 100_000)
    reader = source.CaptureReader(source._Settings({"path": str(capture("k41_BASE"))}))
    with caplog.at_level(logging.WARNING):
        assert len(reader.partitions()) == 1
    assert "k41_BASE.pcap: one task reads all of its" in caplog.text


class _ContextSource(DataSource):
    """Reports what planning and tasks of a Python data source can access."""

    @classmethod
    def name(cls):
        return "context"

    def schema(self):
        return "context boolean, barrier boolean"

    def reader(self, schema):
        return _ContextReader()


class _ContextReader(DataSourceReader):
    def partitions(self):
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        has = SparkContext._active_spark_context, SparkContext._gateway, SparkSession.getActiveSession()
        return [InputPartition(any(each is not None for each in has))] * 2

    def read(self, partition):
        from pyspark import BarrierTaskContext, TaskContext

        yield partition.value, isinstance(TaskContext.get(), BarrierTaskContext)


def test_a_python_data_source_can_neither_start_jobs_nor_use_barriers(spark):
    """So the source cannot split a capture over tasks; once it can do one of both, this test fails."""
    spark.dataSource.register(_ContextSource)
    found = [tuple(row) for row in spark.read.format("context").load().collect()]
    assert found == [(False, False)] * 2
