"""Settings of consumer lag: `[cluster.lag]`.

Refuses to know how lag is computed (`metrics/offsets.py`, `metrics/lag.py`), and how brokers are asked.
"""

from typing import Annotated

from pydantic import Field

from kproxy.metrics.lag import PARTITION_SERIES
from kproxy.proxy.config.model import Frozen


class Lag(Frozen):
    """`[cluster.lag]`: what kproxy asks brokers where traffic does not show lag; `detail` must be topics or batches."""

    # between two rounds of ListOffsets and OffsetFetch that kproxy itself sends; 0: it asks nothing
    ask_interval_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 15.0
    # series by partition, of ends of logs and of committed offsets, each; of a cluster with more there are none
    partition_series: Annotated[int, Field(ge=0, le=100_000)] = PARTITION_SERIES
