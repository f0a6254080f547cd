"""Metrics as clients push them (KIP-714): OTLP in protobuf."""

from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

DELTA, CUMULATIVE = 1, 2


def gauge(name: str, value: float, **labels: str) -> tuple[str, float, dict[str, str], int | None]:
    return name, value, labels, None


def counter(
    name: str, value: float, temporality: int = CUMULATIVE, **labels: str
) -> tuple[str, float, dict[str, str], int | None]:
    return name, value, labels, temporality


def pushed(*points: tuple[str, float, dict[str, str], int | None]) -> bytes:
    """The body of a push with these data points, each a metric of its own."""
    data = MetricsData()
    scope = data.resource_metrics.add().scope_metrics.add()
    for name, value, labels, temporality in points:
        metric = scope.metrics.add(name=name)
        if temporality is None:
            point = metric.gauge.data_points.add()
        else:
            metric.sum.is_monotonic = True
            metric.sum.aggregation_temporality = temporality
            point = metric.sum.data_points.add()
        if isinstance(value, int):
            point.as_int = value
        else:
            point.as_double = value
        for key, text in labels.items():
            point.attributes.add(key=key).value.string_value = text
    return data.SerializeToString()
