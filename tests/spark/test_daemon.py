"""The Python workers of a local session."""

import importlib
import sys

import pyarrow as pa
import pyspark
import pyspark.daemon

from kproxy.spark import daemon


def test_zips_follow_packages_and_everything_else_keeps_its_order(monkeypatch):
    others = [place for place in sys.path if not place.endswith(".zip")]
    monkeypatch.setattr(sys, "path", ["pyspark.zip", *sys.path, "py4j.zip"])
    importlib.reload(daemon)
    assert sys.path[: len(others)] == others and daemon.manager is pyspark.daemon.manager


def test_workers_take_pyspark_from_its_package(spark):
    """Not from its zip, which has no bytecode; both have the same version, since the package contains the zip."""

    def places(_):
        import pyspark

        yield pa.RecordBatch.from_pydict({"place": [pyspark.__file__]})

    ((place,),) = spark.range(1).coalesce(1).mapInArrow(places, "place string").collect()
    assert place == pyspark.__file__
