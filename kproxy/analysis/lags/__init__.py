"""Questions about consumer lag: the lag of clients by their fetches, and the lag of groups by their commits.

Lag is the difference of two offsets: the end of a log (`ends`) and a group's committed offset in it (`committed`). The
rules are those of the live model (`kproxy.metrics.consumers.offsets`): an unknown lag is not zero.
"""

from kproxy.analysis.lags.clients import lag
from kproxy.analysis.lags.committed import COMMITS, COMMITTING
from kproxy.analysis.lags.groups import TABLES, group_lag, group_lag_while_active

__all__ = ["COMMITS", "COMMITTING", "TABLES", "group_lag", "group_lag_while_active", "lag"]
