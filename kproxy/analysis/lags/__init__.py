"""Questions about how far consumers are behind: clients by what they fetch, groups by what they commit.

Lag is the difference of two offsets, and both are here: the end of a log (`ends`) and what a group has committed in it
(`committed`). The rules are those of the live model (`kproxy.metrics.offsets`), and unknown is not zero.
"""

from kproxy.analysis.lags.clients import lag
from kproxy.analysis.lags.committed import COMMITS, COMMITTING
from kproxy.analysis.lags.groups import TABLES, group_lag

__all__ = ["COMMITS", "COMMITTING", "TABLES", "group_lag", "lag"]
