"""Events of sessions in plain integer cells, and a Prometheus collector that reads the cells when it is asked."""

from kproxy.metrics.counting import ConnectionMetrics
from kproxy.metrics.process import Metrics

__all__ = ["ConnectionMetrics", "Metrics"]
