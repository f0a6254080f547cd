"""The jobs: tables -> answers to an operator's questions, each a function from frames to a frame.

Duty: name them, and the tables that each reads. They read only the columns of `kproxy.tables`, so that a job runs the
same on tables of `kproxy convert`, `kproxy spark ingest` and the live recorder, on DuckDB or Spark, in a notebook or
from the command line:

    from kproxy.analysis import jobs
    from kproxy.analysis.duck import Tables
    with Tables("tables") as tables:
        print(jobs.latency(tables["exchanges"], by=["api", "client"], every="1 minute").arrow())

    from kproxy.spark import table
    jobs.latency(table(spark, "tables/", "exchanges"), by=["api", "client"]).show()

The questions themselves: `timing`, `parties`, `topics`, `lags`, `knowledge`. Percentiles are approximate on Spark,
exact below 10,000 rows of a group; thus the number of groups bounds the memory. On DuckDB they are exact. Refuses to
know files, sessions and formats of output.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from kproxy.analysis.engine import Frame
from kproxy.analysis.lags import TABLES as OF_LAG
from kproxy.analysis.lags import group_lag, lag
from kproxy.analysis.lags.brought import TABLES as OF_FETCHES
from kproxy.analysis.questions.distributions import batch_sizes, behind, leader_changes, retransmissions, spread
from kproxy.analysis.questions.knowledge import (
    assignments,
    changes,
    coordinators,
    groups,
    leadership,
    rebalances,
    split_brain,
    topology,
    transactions,
)
from kproxy.analysis.questions.parties import clients, connections, errors, quality, talkers, throttle
from kproxy.analysis.questions.pieces import TOPIC
from kproxy.analysis.questions.registry import REGISTRY_WHERE, consumers, registry
from kproxy.analysis.questions.timing import compare, latency, slow
from kproxy.analysis.questions.topics import batching, fetching, offsets, skew

__all__ = [
    "JOBS",
    "Job",
    "assignments",
    "batch_sizes",
    "batching",
    "behind",
    "changes",
    "clients",
    "compare",
    "connections",
    "consumers",
    "coordinators",
    "errors",
    "fetching",
    "group_lag",
    "groups",
    "lag",
    "latency",
    "leader_changes",
    "leadership",
    "offsets",
    "quality",
    "rebalances",
    "registry",
    "retransmissions",
    "skew",
    "slow",
    "split_brain",
    "spread",
    "talkers",
    "throttle",
    "topology",
    "transactions",
]


@dataclass(frozen=True)
class Job:
    """A job, the tables that it takes, in order, and options to try.

    A job with a parameter `where` applies a condition itself, after computing over rows that the condition would
    leave out. names: further names for such a condition, in addition to the first table's columns, with their texts;
    only: the only names for it, and conditions with others go to a parameter `traffic`. groups: further names for `by`,
    in addition to the first table's columns. timed: further tables whose rows are also chosen by time, since the job
    counts them.

    Each job has the parameters `every` and `replicas`, or the reason why it has not: no_steps, no_replicas.
    """

    run: Callable[..., Frame]
    tables: tuple[str, ...]
    example: str = ""
    names: tuple[tuple[str, str], ...] = ()
    groups: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    timed: tuple[str, ...] = ()
    no_steps: str = ""
    no_replicas: str = ""

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", "-")

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The parameters after the tables."""
        return list(inspect.signature(self.run).parameters.values())[len(self.tables) :]

    @property
    def has_condition(self) -> bool:
        return any(parameter.name == "where" for parameter in self.parameters)


_MOMENTS = "each row is a moment or a span of its own"
_OF_GROUPS = "only clients are members of groups"
_OF_BATCHES = "brokers write no batches by Produce"
_COMMITS = "only clients commit"
_CONTROL = "what brokers tell of the cluster is the answer"
_OF_EXCHANGE = tuple((name, f"`{name}`") for name in ("client", "host", "broker", "client_id"))

JOBS = {
    job.name: job
    for job in (
        Job(latency, ("exchanges",), " --by api,client --every '1 minute'"),
        Job(spread, ("exchanges",), " --every '10 seconds' --where \"api = 'Produce'\""),
        Job(
            slow,
            ("exchanges", "connections", "partitions"),
            " --slower-than-ms 500 --where \"api = 'Produce'\"",
            groups=("cause", "topic"),
        ),
        Job(throttle, ("exchanges",), " --by client"),
        Job(errors, ("exchanges", "partitions", "connections"), " --by api,error,client --format json"),
        Job(talkers, ("exchanges",), " --by host --limit 10"),
        Job(
            skew,
            ("partitions", "exchanges", "topology"),
            " --where \"topic = 'orders'\"",
            _OF_EXCHANGE,
            only=("cluster", "topic", "api", "partition"),
        ),
        Job(batching, ("batches", "exchanges"), " --where \"client = 'app'\"", _OF_EXCHANGE, no_replicas=_OF_BATCHES),
        Job(
            batch_sizes,
            ("batches", "exchanges"),
            " --where \"topic = 'orders'\"",
            _OF_EXCHANGE,
            no_replicas=_OF_BATCHES,
        ),
        Job(fetching, ("exchanges",), " --by client"),
        Job(lag, OF_LAG, " --format parquet --out lag", _OF_EXCHANGE),
        Job(
            behind,
            OF_FETCHES,
            " --by client,broker,topic --every '10 seconds'",
            (*_OF_EXCHANGE, ("topic", TOPIC)),
            groups=("client", "host", "broker", "client_id"),
        ),
        Job(
            offsets,
            ("partitions", "exchanges"),
            " --where \"group_id = 'billing'\"",
            (*_OF_EXCHANGE, ("group_id", "asked_group"), ("topic", "of_topic")),
            no_replicas=_COMMITS,
        ),
        Job(
            group_lag,
            OF_LAG,
            " --where \"group_id = 'billing'\"",
            (*_OF_EXCHANGE, ("group_id", "of_group"), ("topic", "of_topic")),
            no_replicas=_COMMITS,
        ),
        Job(clients, ("exchanges", "connections"), " --kafka 4.1 --format csv"),
        Job(connections, ("connections", "exchanges"), " --by client", groups=("client", "client_id")),
        Job(retransmissions, ("exchanges",), " --by client,broker --having 'retransmissions > 0'"),
        Job(compare, ("exchanges",), " --with tables-after --by api,broker"),
        Job(quality, ("quality",), no_replicas="it is of packets, whoever sent them"),
        Job(
            registry,
            ("registry",),
            " --where \"kind in ('broker', 'controller', 'session')\"",
            only=REGISTRY_WHERE,
            no_steps=_MOMENTS,
            no_replicas=_CONTROL,
        ),
        Job(
            consumers,
            ("rebalances", "group_events", "assignments", "partitions", "exchanges"),
            " --format json",
            no_steps=_MOMENTS,
            no_replicas=_OF_GROUPS,
        ),
        Job(
            groups,
            ("group_events", "rebalances"),
            " --where \"group_id like 'billing%'\"",
            timed=("rebalances",),
            no_steps=_MOMENTS,
            no_replicas=_OF_GROUPS,
        ),
        Job(
            rebalances,
            ("rebalances", "group_events", "exchanges"),
            " --having 'took_ns > 1e9' --where \"cause = 'session_expired'\"",
            no_steps=_MOMENTS,
            no_replicas=_OF_GROUPS,
        ),
        Job(
            assignments,
            ("assignments",),
            " --having 'not agrees or shared > 0'",
            no_steps=_MOMENTS,
            no_replicas=_OF_GROUPS,
        ),
        Job(
            split_brain,
            ("partitions", "exchanges", "group_events", "assignments"),
            " --having 'together_ns > 1e9'",
            no_steps=_MOMENTS,
            no_replicas=_OF_GROUPS,
        ),
        Job(
            coordinators,
            ("group_events", "rebalances", "exchanges", "connections"),
            " --where \"group_id = 'billing'\"",
            no_steps=_MOMENTS,
            no_replicas=_OF_GROUPS,
        ),
        Job(
            leadership,
            ("leadership",),
            " --from 10:15 --where \"topic = 'orders'\"",
            no_steps=_MOMENTS,
            no_replicas=_CONTROL,
        ),
        Job(topology, ("topology",), " --where \"kind = 'broker'\"", no_steps=_MOMENTS, no_replicas=_CONTROL),
        Job(
            transactions,
            ("exchanges", "partitions", "transactions"),
            " --having 'ended_by is null'",
            no_steps=_MOMENTS,
            no_replicas="only clients have transactions",
        ),
        Job(changes, ("changes",), " --having \"outcome != 'done'\"", no_steps=_MOMENTS, no_replicas=_CONTROL),
        Job(
            leader_changes,
            ("leadership",),
            " --every '10 seconds' --where \"change != 'created'\"",
            no_replicas=_CONTROL,
        ),
    )
}
