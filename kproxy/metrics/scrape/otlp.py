"""Prometheus metric families as metrics of OpenTelemetry's SDK, for its exporters.

A family has in OTLP the name that its samples have on /metrics (counters end in `_total`), the same labels as
attributes, and the same value. Counters are monotonic sums since the start of counting, histograms have the same
buckets, all else is a gauge. Exemplars are left out: OTLP's are links to traces. Needs the extra `otlp`. Refuses to
know where they go.
"""

from collections.abc import Iterable, Mapping

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from kproxy import __version__

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_SCOPE = InstrumentationScope("kproxy", __version__)


def metrics_data(families: Iterable[Family], resource: Mapping[str, str], started_ns: int, now_ns: int) -> MetricsData:
    """Return the content of one push. started_ns: when counting began; both times in ns since the Unix epoch."""
    metrics = [metric for family in families for metric in _metrics(family, started_ns, now_ns)]
    scope = ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
    of_kproxy = Resource(dict(resource))
    return MetricsData([ResourceMetrics(resource=of_kproxy, scope_metrics=[scope], schema_url="")])


def _metrics(family: Family, started_ns: int, now_ns: int) -> Iterable[Metric]:
    if family.type == "histogram":
        points = _histograms(family, started_ns, now_ns)
        if points:
            data = Histogram(data_points=points, aggregation_temporality=_CUMULATIVE)
            yield Metric(name=family.name, description=family.documentation, unit="", data=data)
        return
    is_counter = family.type == "counter"
    by_name: dict[str, list[NumberDataPoint]] = {}
    for sample in family.samples:
        since_ns = started_ns if is_counter else None
        point = NumberDataPoint(dict(sample.labels), since_ns, now_ns, float(sample.value))  # type: ignore[arg-type]
        by_name.setdefault(sample.name, []).append(point)
    for name, numbers in by_name.items():
        of = Sum(numbers, _CUMULATIVE, is_monotonic=True) if is_counter else Gauge(numbers)
        yield Metric(name=name, description=family.documentation, unit="", data=of)


def _histograms(family: Family, started_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    """Return a point for each set of labels; cumulative buckets of Prometheus become counts per bucket."""
    buckets: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        if sample.name == f"{family.name}_bucket":
            buckets.setdefault(labels, []).append(sample)
        elif sample.name == f"{family.name}_sum":
            sums[labels] = float(sample.value)
    points = []
    for labels, samples in buckets.items():
        below = [int(sample.value) for sample in samples]
        points.append(
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=started_ns,
                time_unix_nano=now_ns,
                count=below[-1],
                sum=sums.get(labels, 0.0),
                bucket_counts=[count - before for count, before in zip(below, (0, *below), strict=False)],
                explicit_bounds=[float(sample.labels["le"]) for sample in samples[:-1]],
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )
        )
    return points
