"""What is counted of TLS: handshakes with their ends and times, and the certificates that kproxy loaded.

Bounded by the results below and by the files of the settings. Runs on the thread of the event loop; a scrape reads from
another one and copies each container in one step. Refuses to know certificates and sockets.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping

from kproxy.metrics.bounds import DURATION_NS, cell

# How a handshake ends, by the side whose connection it is.
CLIENT_RESULTS = (
    "ok",
    "plaintext",
    "http",
    "closed",
    "timeout",
    "version",
    "server_name",
    "no_certificate",
    "certificate",
    "principal",
    "rejected",
    "other",
)
BROKER_RESULTS = ("ok", "plaintext", "closed", "timeout", "version", "name", "certificate", "rejected", "other")
RELOADS = ("ok", "failed")


class TlsSide:
    """The cells of one side of a cluster: handshakes with clients, or with brokers.

    expiries: file -> when its first certificate expires, in seconds since the epoch.
    """

    def __init__(self, results: tuple[str, ...], expiries: Callable[[], Mapping[str, int]]) -> None:
        self.results = dict.fromkeys(results, 0)
        self.duration = cell(DURATION_NS)  # of those that succeeded
        self.duration_ns = 0
        self.expiries = expiries
        self.reloads = dict.fromkeys(RELOADS, 0)

    def ended(self, result: str, duration_ns: int) -> None:
        """A handshake has ended."""
        self.results[result] += 1
        if result == "ok":
            self.duration[bisect_left(DURATION_NS, duration_ns)] += 1
            self.duration_ns += duration_ns
