"""One Spark for all tests here: its start costs more than most of them."""

import pytest

import kproxy.spark

SMALL = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",  # nothing to adapt to in a few rows, and one job fewer per shuffle
    "spark.sql.codegen.wholeStage": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@pytest.fixture(scope="session")
def spark():
    session = kproxy.spark.session("local[2]", SMALL)
    yield session
    session.stop()
