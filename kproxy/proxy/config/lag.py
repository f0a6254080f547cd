"""Settings of consumer lag: `[cluster.lag]`.

Refuses to know the computation of lag (`metrics/consumers/offsets.py`, `metrics/consumers/lag.py`), and requests to
brokers.
"""

from typing import Annotated

from pydantic import Field

from kproxy.metrics.consumers.lag import PARTITION_SERIES
from kproxy.proxy.config.model import Frozen


class Lag(Frozen):
    """`[cluster.lag]`: kproxy's own requests for lag that traffic does not show; `detail` must be topics or batches."""

    # seconds between two rounds of ListOffsets and OffsetFetch that kproxy itself sends; 0: it sends none
    ask_interval_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 15.0
    # maximum number of series by partition, for log ends and committed offsets each; a cluster with more has none
    partition_series: Annotated[int, Field(ge=0, le=100_000)] = PARTITION_SERIES
