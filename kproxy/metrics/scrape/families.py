"""Metric families that sum up cells with more dimensions than their labels. Refuses to know the meaning of counts."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

Exemplars = Mapping[tuple[str, ...], Mapping[int, Exemplar]]  # by labels and bucket


class Sum:
    """A counter that sums up cells with more dimensions than its labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._family = CounterMetricFamily(name, text, labels=labels)
        self._counts: dict[tuple[str, ...], float] = {}

    def add(self, labels: tuple[str, ...], count: float) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + count

    def family(self) -> Metric:
        for labels, count in self._counts.items():
            self._family.add_metric(labels, count)
        return self._family


class Histogram:
    """A histogram that sums up cells with more dimensions than its labels. unit: the cells' units per exposed unit."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[int], unit: int = 10**9) -> None:
        self._family = HistogramMetricFamily(name, text, labels=labels)
        self._les = [_le(bound / unit) for bound in bounds] + ["+Inf"]
        self._unit = unit
        self._cells: dict[tuple[str, ...], tuple[list[int], int]] = {}

    def add(self, labels: tuple[str, ...], counts: list[int], total: int) -> None:
        before = self._cells.get(labels)
        if before is None:
            self._cells[labels] = (counts.copy(), total)
        else:
            self._cells[labels] = ([a + b for a, b in zip(before[0], counts, strict=True)], before[1] + total)

    def family(self, exemplars: Exemplars | None = None) -> Metric:
        for labels, (counts, total) in self._cells.items():
            buckets = list(zip(self._les, accumulate(counts), strict=True))
            named = exemplars.get(labels) if exemplars else None
            if named:
                shown: list[tuple[str, float] | tuple[str, float, Exemplar]] = [
                    (*bucket, named[index]) if index in named else bucket for index, bucket in enumerate(buckets)
                ]
                self._family.add_metric(labels, shown, total / self._unit)
            else:
                self._family.add_metric(labels, buckets, total / self._unit)
        return self._family


def _le(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
