"""A scrape as bytes, in the text format that the scraper asks for.

Some microseconds a sample of pure work: meant for a thread, not for the event loop. Refuses to know HTTP.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics


def render(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """(the text, its content type) for an Accept header: OpenMetrics where it is named, else the classic format."""
    # Our names are plain ASCII in every escaping; naming the one that copies them spares a walk over each character.
    if "application/openmetrics-text" in accept:
        text = openmetrics.generate_latest(_Unambiguous(registry), escaping=openmetrics.ALLOWUTF8)
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry, escaping=openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


class _Unambiguous:
    """The registry for OpenMetrics, where a counter's family is named without its `_total`.

    There the gauge kproxy_connections and the counter kproxy_connections_total would be two families of one name, which
    the format forbids: the counter becomes a family of unknown type under its full name. Its samples are the same.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        families = list(self._registry.collect())
        gauges = {family.name for family in families if isinstance(family, GaugeMetricFamily)}
        for family in families:
            if family.type == "counter" and family.name in gauges:
                unknown = UnknownMetricFamily(f"{family.name}_total", family.documentation)
                unknown.samples = family.samples
                yield unknown
            else:
                yield family
