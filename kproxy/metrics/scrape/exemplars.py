"""The slow exchanges as exemplars of kproxy_request_duration_seconds: the latest of each series and bucket.

Made at a scrape, and sent in OpenMetrics only. OpenMetrics allows 128 characters for the labels of one, names included.
Refuses to know how exchanges became slow.
"""

import re
from bisect import bisect_left
from collections import defaultdict

from prometheus_client.samples import Exemplar, Timestamp

from kproxy.metrics.counters.bounds import DURATION_NS
from kproxy.metrics.counters.slow import Slow
from kproxy.metrics.scrape.families import Exemplars

_MAX_CLIENT_ID = 40
_UNSAFE = re.compile(r'["\\{}\x00-\x1f\x7f]')  # parsers of the format fail at these, even escaped


def exemplars(slow: Slow) -> Exemplars:
    """Return the exemplars by (cluster, api, broker) and bucket index."""
    found: dict[tuple[str, ...], dict[int, Exemplar]] = defaultdict(dict)
    for row in slow.rows.copy():
        labels = {"client": row.client, "correlation_id": str(row.correlation_id)}
        if row.client_id:
            labels["client_id"] = _UNSAFE.sub("?", row.client_id[:_MAX_CLIENT_ID])
        at = Timestamp(*divmod(row.at_ns, 10**9))
        bucket = bisect_left(DURATION_NS, row.broker_ns)
        found[row.cluster, row.api, row.broker][bucket] = Exemplar(labels, row.broker_ns / 1e9, at)
    return found
