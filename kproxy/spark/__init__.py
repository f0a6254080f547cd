"""Captures at any size on Spark: source.py reads them, pipeline.py makes tables of them, jobs.py asks the tables.

    from kproxy.analysis import jobs
    from kproxy.spark import session, table
    from kproxy.spark.reading import read

    spark = session()          # or register(spark) with any session of yours
    spark.read.format("kafka-pcap").option("table", "exchanges").load("captures/*.pcap")
    with read(spark, "captures/*.pcap") as tables:  # large captures are shared out over tasks
        tables["exchanges"].groupBy("api").count().show()
    jobs.latency(table(spark, "tables/", "exchanges"), by=["api", "client"]).show()

Heavy imports wait until something is called.
"""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from kproxy.errors import KproxyError
from kproxy.interrupts import ComesLater

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}

ANSWER_S = 20.0  # a master of Spark, or a server of Spark Connect, has for a connection

# Of sessions that are ours: times in SQL mean UTC, as the tables have them, and Arrow batches stay small, since one row
# of `ingest` may hold some megabytes of packets.
_OURS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
}


def session(
    master: str | None = None, config: Mapping[str, str] = MappingProxyType({}), *, with_source: bool = True
) -> "SparkSession":
    """A session that knows the format `kafka-pcap`, unless `with_source` is False, which saves two seconds of CPU.

    The session that runs is returned with its settings as they are, but for those of `config`. Otherwise one is
    started, as `spark-submit`, SPARK_REMOTE or `master` says (sc://HOST:PORT is a server of Spark Connect), and by
    default on all cores of this machine with every port on loopback; `config` has more of Spark's settings. Raises
    KproxyError where Spark does not start.
    """
    import os
    import sys

    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from kproxy.spark.classes import used

    running = SparkSession.getActiveSession()
    builder = SparkSession.builder.appName("kproxy")
    remote = is_remote(master)
    if running is None:
        settings = dict(_OURS)
        if remote:
            builder = builder.remote(master or os.environ["SPARK_REMOTE"])
            config = {name: value for name, value in config.items() if not name.startswith("spark.driver.")}
        else:
            _check_user()
        if not remote and master is None and "PYSPARK_GATEWAY_PORT" not in os.environ:  # which spark-submit sets
            master = "local[*]"
        if not remote and "PYSPARK_GATEWAY_PORT" not in os.environ:  # the JVM is ours
            config = used(config)
        if not remote and master is not None:
            builder = builder.master(master)
            if master.startswith("local"):
                os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
                python = os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers know what we know
                if python == sys.executable:
                    settings["spark.python.daemon.module"] = "kproxy.spark.daemon"
                settings |= _LOCAL
        config = {**settings, **config}
    for key, value in config.items():
        builder = builder.config(key, value)
    try:
        if running is None:
            _require_answer(os.environ["SPARK_REMOTE"] if master is None and remote else master or "")
        if running is None or config:
            with ComesLater():  # else a JVM stays that nobody knows, and that never ends
                spark = builder.getOrCreate()
        else:
            spark = running
        if with_source:
            register(spark)
    except (PySparkException, OSError) as fault:
        if remote:
            said = str(fault).strip().partition("\n")[0]
            raise KproxyError(
                f"{master or 'SPARK_REMOTE'}: no session of Spark Connect: {said}; the client needs pyspark[connect], "
                "the server kproxy in its Python"
            ) from fault
        raise KproxyError(f"Spark does not start: {fault}; it needs Java 17 or newer, found by JAVA_HOME") from fault
    except Py4JJavaError as fault:  # of the JVM, and pyspark has no word for it
        said = " ".join(str(fault.java_exception.getMessage()).split())
        said = re.sub(r"^\[[A-Z_.]+\] | SQLSTATE: \w+", "", said)
        raise KproxyError(f"Spark does not start: {said}") from fault
    return spark


def _require_answer(url: str) -> None:
    """Raise KproxyError where nobody listens: Spark would ask a master for a minute, and a server for ten."""
    if url.startswith("spark://"):
        faults = []
        for place in url.removeprefix("spark://").split(","):
            host, _, port = place.rpartition(":")
            if not host or not port.isdecimal():
                return  # Spark says how it is written
            try:
                socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
            except OSError as fault:
                faults.append(f"{place}: {fault.strerror or fault}")
            else:
                return
        raise KproxyError(f"{url}: no master of Spark answers: {'; '.join(faults)}")
    if url.startswith("sc://"):
        try:
            import grpc
            from pyspark.sql.connect.client import DefaultChannelBuilder
        except ImportError:  # Spark says what is missing
            return
        channel = DefaultChannelBuilder(url).toChannel()
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc.FutureTimeoutError:
            raise KproxyError(
                f"{url.partition(';')[0]}: no server of Spark Connect has answered within {ANSWER_S:g} s: is it "
                "started, and is that its port (15002 by default)?"
            ) from None
        finally:
            channel.close()


def is_remote(master: str | None) -> bool:
    """Whether a session is to be one of a Spark Connect server."""
    return master.startswith("sc://") if master is not None else "SPARK_REMOTE" in os.environ


def is_connect(spark: "SparkSession") -> bool:
    """Whether a session is one of a Spark Connect server: its driver, and the JVM, are elsewhere."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _check_user() -> None:
    """Hadoop, which is in Spark, asks the system for the name of its user and takes no number for it."""
    import os
    import pwd

    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        text = f"Spark does not start for user {os.getuid()}, who has no name in /etc/passwd"
        raise KproxyError(f"{text}: add one, or run as another user") from None


def register(spark: "SparkSession") -> None:
    """Make the format `kafka-pcap` known to a session."""
    from kproxy.spark.source import CaptureSource

    spark.dataSource.register(CaptureSource)


def table(spark: "SparkSession", folder: str, name: str) -> "DataFrame":
    """A table of a dataset that `kproxy convert`, `kproxy spark ingest` or a recorder wrote.

    Its columns are those that this kproxy knows, whichever kproxy wrote the files: what a file lacks is null. Tables by
    date and hour have the columns `date` and `hour` too. Raises KproxyError where the folder has no such table, or a
    newer kproxy wrote it.
    """
    from kproxy.spark.source import spark_schema
    from kproxy.tables import dataset, schema

    known = spark_schema(schema.BY_NAME[name].schema)
    if not dataset.has_rows(folder, name):
        return spark.createDataFrame([], known)
    return spark.read.schema(known).parquet(_place(folder) + "/" + name)


def views(spark: "SparkSession", folder: str) -> list[str]:
    """Make temporary views of the tables that are there, and of `kproxy.tables.views`; returns their names.

    So that `spark.sql("select * from partitions_full")` asks them. Raises KproxyError as `table` does for `exchanges`.
    """
    from kproxy.tables import schema
    from kproxy.tables.views import NEEDED, VIEWS

    table(spark, folder, "exchanges")
    names = []
    for name in schema.BY_NAME:
        with suppress(KproxyError):
            table(spark, folder, name).createOrReplaceTempView(name)
            names.append(name)
    for name, text in VIEWS.items():
        if all(needed in names for needed in NEEDED[name]):
            spark.sql(text).createOrReplaceTempView(name)
            names.append(name)
    return names


def _place(folder: str) -> str:
    """A folder as Spark takes it literally: a path of its own may hold a colon, or what would be a glob."""
    if "://" in folder:
        return folder.rstrip("/")
    return "file:" + re.sub(r"([][{}*?\\])", r"\\\1", os.path.abspath(folder))  # noqa: PTH100 - links stay
