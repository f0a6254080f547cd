"""A scrape as bytes, in the text format that the scraper asks for.

It takes some microseconds of CPU per sample: call it in a thread, not on the event loop. Refuses to know HTTP.
"""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics


def is_openmetrics(accept: str) -> bool:
    """Return whether an Accept header names OpenMetrics; otherwise the classic format is sent."""
    return "application/openmetrics-text" in accept


def render(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return (text, content type) for an Accept header: OpenMetrics if it is named, else the classic format."""
    # Our names are plain ASCII in every escaping; naming the one that copies them spares a walk over each character.
    if is_openmetrics(accept):
        text = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    text = generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
    return text, CONTENT_TYPE_PLAIN_0_0_4
