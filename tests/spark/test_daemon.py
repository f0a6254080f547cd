"""Python's workers of a local session."""

import pyarrow as pa
import pyspark


def test_workers_take_pyspark_from_its_package(spark):
    """Not from its zip, which has no bytecode; of the same version, since the zip is in the package."""

    def places(_):
        import pyspark

        yield pa.RecordBatch.from_pydict({"place": [pyspark.__file__]})

    ((place,),) = spark.range(1).coalesce(1).mapInArrow(places, "place string").collect()
    assert place == pyspark.__file__
