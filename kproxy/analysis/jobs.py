"""The jobs: tables -> answers to an operator's questions, each a plain function DataFrame -> DataFrame.

Duty: name them, and the tables that each reads. They read only the columns of `kproxy.tables`, so that a job runs the
same on what `kproxy convert`, `kproxy spark ingest` and the live recorder wrote, in a notebook or from the command
line:

    from kproxy.analysis import jobs
    from kproxy.spark import table
    jobs.latency(table(spark, "tables/", "exchanges"), by=["api", "client"], every="1 minute").show()

The questions themselves: `timing`, `parties`, `topics`. Percentiles are Spark's approximate ones, exact below 10,000
rows of a group; so memory is bounded by the number of groups. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kproxy.analysis.parties import clients, connections, errors, quality, talkers, throttle
from kproxy.analysis.timing import compare, latency, slow
from kproxy.analysis.topics import batching, fetching, lag, offsets, skew

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "JOBS",
    "Job",
    "batching",
    "clients",
    "compare",
    "connections",
    "errors",
    "fetching",
    "lag",
    "latency",
    "offsets",
    "quality",
    "skew",
    "slow",
    "talkers",
    "throttle",
]


@dataclass(frozen=True)
class Job:
    """A job, the tables that it takes, in order, and options to try.

    where: columns of which a condition is the job's own to apply, behind what it computes over rows that the condition
    would leave out; empty: conditions choose rows of the first table. None of its own stands for all columns.
    """

    run: "Callable[..., DataFrame]"
    tables: tuple[str, ...]
    example: str = ""
    where: tuple[str, ...] | None = ()


JOBS = {
    job.run.__name__: job
    for job in (
        Job(latency, ("exchanges",), " --by api,client --every '1 minute'"),
        Job(slow, ("exchanges", "connections"), " --slower-than-ms 500 --where \"api = 'Produce'\""),
        Job(throttle, ("exchanges",), " --by client"),
        Job(errors, ("exchanges", "partitions", "connections"), " --by api,error,client --format json"),
        Job(talkers, ("exchanges",), " --by host --limit 10"),
        Job(
            skew,
            ("partitions", "exchanges"),
            " --where \"topic = 'orders'\"",
            ("cluster", "topic", "api", "partition"),
        ),
        Job(batching, ("batches", "exchanges")),
        Job(fetching, ("exchanges",), " --by client"),
        Job(lag, ("partitions", "exchanges"), " --format parquet --out lag"),
        Job(offsets, ("partitions", "exchanges"), " --where \"group_id = 'billing'\"", None),
        Job(clients, ("exchanges", "connections"), " --kafka 4.1 --format csv"),
        Job(connections, ("connections",), " --by host"),
        Job(compare, ("exchanges",), " --with tables-after --by api,broker"),
        Job(quality, ("quality",)),
    )
}
