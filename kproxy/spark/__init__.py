"""Captures of any size on Spark: source.py reads them, pipeline.py writes tables, analysis/jobs.py queries the tables.

    from kproxy.analysis import jobs
    from kproxy.spark import session, table
    from kproxy.spark.reading import read

    spark = session()          # or register(spark) with any session of yours
    spark.read.format("kafka-pcap").option("table", "exchanges").load("captures/*.pcap")
    with read(spark, "captures/*.pcap") as tables:  # large captures are shared out over tasks
        tables["exchanges"].groupBy("api").count().show()
    jobs.latency(table(spark, "tables/", "exchanges"), by=["api", "client"]).show()

pyspark and py4j are imported when a function is called, not with this module.
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

# Settings of a Spark inside this process. Its heap must hold a query of hundreds of steps: each sort, window and
# aggregate of a task allocates a whole page for its first row, 4 to 64 MB by default, and Spark keeps the plans of a
# thousand queries for a user interface that is off.
_LOCAL = {
    "spark.buffer.pageSize": "1m",
    "spark.sql.ui.retainedExecutions": "10",
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "1000",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}

CONNECT_TIMEOUT_S = 20.0  # timeout of a connection to a Spark master or a Spark Connect server

# Settings of sessions that kproxy starts: SQL reads times as UTC, which the tables use. Arrow batches stay small, since
# one row of an ingest may hold some megabytes of packets.
_OURS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
}


def session(
    master: str | None = None, config: Mapping[str, str] = MappingProxyType({}), *, with_source: bool = True
) -> "SparkSession":
    """Return a Spark session with the format `kafka-pcap` registered.

    with_source: False leaves the format out, which saves two seconds of CPU. If a session is active, return it and
    change only the settings in `config`. Otherwise start a session from the settings of `spark-submit`, SPARK_REMOTE or
    `master` (sc://HOST:PORT is a Spark Connect server). The default uses all cores of this machine, and binds every
    port to loopback. config: further settings of Spark. Raises KproxyError if Spark does not start.
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
        if not remote and master is None and "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit sets it
            master = "local[*]"
        if not remote and "PYSPARK_GATEWAY_PORT" not in os.environ:  # kproxy starts the JVM
            config = used(config)
        if not remote and master is not None:
            builder = builder.master(master)
            if master.startswith("local"):
                os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
                python = os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers need kproxy's packages
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
            with ComesLater():  # an interrupt here would leave a JVM that nothing ends
                spark = builder.getOrCreate()
        else:
            spark = running
        if with_source:
            register(spark)
    except (PySparkException, OSError) as fault:
        if remote:
            reason = str(fault).strip().partition("\n")[0]
            raise KproxyError(
                f"{master or 'SPARK_REMOTE'}: no session of Spark Connect: {reason}; the client needs "
                "pyspark[connect], "
                "the server kproxy in its Python"
            ) from fault
        raise KproxyError(f"Spark does not start: {fault}; it needs Java 17 or newer, found by JAVA_HOME") from fault
    except Py4JJavaError as fault:  # an exception of the JVM that pyspark does not translate
        reason = " ".join(str(fault.java_exception.getMessage()).split())
        reason = re.sub(r"^\[[A-Z_.]+\] | SQLSTATE: \w+", "", reason)
        raise KproxyError(f"Spark does not start: {reason}") from fault
    return spark


def _require_answer(url: str) -> None:
    """Raise KproxyError if nothing listens at `url`: Spark would retry a master for one minute, a server for ten."""
    if url.startswith("spark://"):
        faults = []
        for place in url.removeprefix("spark://").split(","):
            host, _, port = place.rpartition(":")
            if not host or not port.isdecimal():
                return  # Spark reports the syntax error
            try:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
            except OSError as fault:
                faults.append(f"{place}: {fault.strerror or fault}")
            else:
                return
        raise KproxyError(f"{url}: no master of Spark answers: {'; '.join(faults)}")
    if url.startswith("sc://"):
        try:
            import grpc
            from pyspark.sql.connect.client import DefaultChannelBuilder
        except ImportError:  # Spark reports the missing package
            return
        channel = DefaultChannelBuilder(url).toChannel()
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            raise KproxyError(
                f"{url.partition(';')[0]}: no server of Spark Connect has answered within {CONNECT_TIMEOUT_S:g} s: is "
                "it started, and is that its port (15002 by default)?"
            ) from None
        finally:
            channel.close()


def is_remote(master: str | None) -> bool:
    """Return whether a session for `master` would be one of a Spark Connect server."""
    return master.startswith("sc://") if master is not None else "SPARK_REMOTE" in os.environ


def is_connect(spark: "SparkSession") -> bool:
    """Return whether a session belongs to a Spark Connect server, where its driver and the JVM run."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _check_user() -> None:
    """Raise KproxyError if the user has no name: Hadoop, a part of Spark, requires one and takes no number for it."""
    import os
    import pwd

    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        text = f"Spark does not start for user {os.getuid()}, who has no name in /etc/passwd"
        raise KproxyError(f"{text}: add one, or run as another user") from None


def register(spark: "SparkSession") -> None:
    """Register the format `kafka-pcap` with a session."""
    from kproxy.spark.source import CaptureSource

    spark.dataSource.register(CaptureSource)


def table(spark: "SparkSession", folder: str, name: str) -> "DataFrame":
    """Return a table of a dataset that `kproxy convert`, `kproxy spark ingest` or a recorder wrote.

    The columns are those of this kproxy's schema, whichever version wrote the files; a column that a file lacks is
    null. Tables partitioned by date and hour also have the columns `date` and `hour`. Raises KproxyError if the folder
    has no such table, or if a newer kproxy wrote it.
    """
    from kproxy.spark.source import spark_schema
    from kproxy.tables import dataset, schema

    known = spark_schema(schema.BY_NAME[name].schema)
    if not dataset.has_rows(folder, name):
        return spark.createDataFrame([], known)
    return spark.read.schema(known).parquet(_place(folder) + "/" + name)


def views(spark: "SparkSession", folder: str) -> list[str]:
    """Create temporary views of the tables in a folder, and of `kproxy.tables.views`; return the names of the views.

    `spark.sql("select * from partitions_full")` then queries them. Raises KproxyError as `table` does for `exchanges`.
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
    """Return a folder as a URL that Spark takes literally: a path may contain a colon, or characters of a glob."""
    if "://" in folder:
        return folder.rstrip("/")
    return "file:" + re.sub(r"([][{}*?\\])", r"\\\1", os.path.abspath(folder))  # noqa: PTH100 - links stay
