"""One Spark for all tests here: its start costs more than most of them."""

import pytest

import kproxy.spark
from kproxy.convert.processes import convert
from tests.captures import capture

SMALL = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",  # nothing to adapt to in a few rows, and one job fewer per shuffle
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",  # to compile what runs once costs more than to interpret it
    # With one tier of compilation the JVM has 48 MB for code, which hundreds of questions fill.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC",
    "spark.driver.memory": "3g",  # a question about lag takes 1 GB while it is planned
    "spark.connect.grpc.binding.address": "127.0.0.1",  # of the server that a test starts in it
    "spark.connect.grpc.binding.port": "0",
}


@pytest.fixture(scope="session")
def spark():
    session = kproxy.spark.session("local[2]", SMALL)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def tables(tmp_path_factory):
    """What `kproxy convert` makes of traffic with quotas, several clients and an old broker."""
    place = tmp_path_factory.mktemp("tables")
    convert([capture(name) for name in ("k41_quota", "k41_librdkafka", "k0102_python147")], place, processes=1)
    return place
