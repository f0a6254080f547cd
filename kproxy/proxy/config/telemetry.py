"""Settings for metrics that clients push (KIP-714): `[cluster.telemetry]`.

Refuses to know requests and answers (`filters/telemetry.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kproxy.proxy.config.model import Frozen

ALL_METRICS = "*"  # as brokers' subscriptions call them
_MAX_PREFIXES = 100


def _prefixes(value: Any) -> Any:
    names = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if isinstance(names, list | tuple) and ALL_METRICS in names and len(names) > 1:
        raise ValueError("'*' stands for all metrics: leave the others out, or leave it out")
    for name in names if isinstance(names, list | tuple) else ():
        if isinstance(name, str) and "*" in name and name != ALL_METRICS:
            raise ValueError(f"{name!r} matches no metric: it is a beginning of names, and takes no pattern")
    return names


class Telemetry(Frozen):
    """`[cluster.telemetry]`: kproxy takes the metrics that clients push, and exposes them on /metrics."""

    # missing: kproxy answers where the broker does not; always: brokers get no pushes
    answer: Literal["missing", "always"] = "missing"
    # prefixes of the names of metrics that clients push, like org.apache.kafka.producer.; * stands for all
    metrics: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(min_length=1, max_length=_MAX_PREFIXES),
        BeforeValidator(_prefixes),
    ] = (ALL_METRICS,)
    # seconds between a client's pushes
    push_interval_s: Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)] = 60.0
    # compressed bytes of one push, as announced to clients; 1 MiB is Kafka's own telemetry.max.bytes
    max_push_bytes: Annotated[int, Field(ge=1024, le=1 << 20)] = 1 << 20
    max_clients: Annotated[int, Field(ge=1, le=10_000)] = 200  # clients with their own series; all others share `other`
    max_series_per_client: Annotated[int, Field(ge=1, le=10_000)] = 500  # further series of a client are dropped
