"""How connections are called in the labels `broker` and `listener` of metrics."""

from kproxy.proxy.cluster import transparent

BOOTSTRAP = "bootstrap"


def broker_label(broker_id: int | None) -> str:
    """The label `broker`."""
    return BOOTSTRAP if broker_id is None else str(broker_id)


def listener_label(node_id: int | None, route: str = "ports") -> str:
    """The label `listener`: of the port for a broker's clients, or of the one where clients bootstrap."""
    if route == transparent.ROUTE:
        return route
    return BOOTSTRAP if node_id is None else f"broker-{node_id}"
