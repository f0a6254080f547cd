"""What the settings of logins become: steps on the way to brokers, and counters for them.

Refuses to know sockets and frames.
"""

import logging
from functools import partial

from kproxy.errors import LOGIN_CAUSES, ConfigError, UpstreamError
from kproxy.metrics.cells import ClusterCells
from kproxy.proxy.access.sasl.identities import Identities
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.upstream.login import BrokerLogin
from kproxy.proxy.upstream.loops import LoopGuard

BROKER_OUTCOMES = ("success", "renewed", "timeout", *LOGIN_CAUSES)

log = logging.getLogger("kproxy.logins")


def broker_login(cluster: Cluster, loops: LoopGuard, cells: ClusterCells) -> BrokerLogin | None:
    """kproxy's login at the brokers of a cluster; None: there is none. Raises ConfigError for what cannot be read."""
    if cluster.login is None:
        return None
    identities = Identities(cluster.login)
    try:
        identities.check()
    except UpstreamError as fault:
        raise ConfigError([(f"{cluster.name}: login", str(fault))]) from None
    for mechanism in sorted(identities.mechanisms):
        cells.expect_authentications("broker", mechanism, BROKER_OUTCOMES)
    return BrokerLogin(identities, loops, partial(cells.authenticated, "broker"))
