"""The values of the labels `broker` and `listener` of metrics."""

from kproxy.proxy.cluster import transparent

BOOTSTRAP = "bootstrap"


def broker_label(broker_id: int | None) -> str:
    """Return the label `broker`."""
    return BOOTSTRAP if broker_id is None else str(broker_id)


def listener_label(node_id: int | None, route: str = "ports") -> str:
    """Return the label `listener`: the port of a broker, or the bootstrap port."""
    if route == transparent.ROUTE:
        return route
    return BOOTSTRAP if node_id is None else f"broker-{node_id}"
