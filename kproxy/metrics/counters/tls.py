"""Counters of TLS: results and times of handshakes, and the certificates that kproxy loaded.

Bounds: the results below, and the files in the settings. Runs on the event loop's thread; a scrape reads from another
thread and copies each container in one step. Refuses to know certificates and sockets.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping

from kproxy.metrics.counters.bounds import DURATION_NS, cell

# Results of handshakes, by side of the connection.
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

    expiries: returns by file when its first certificate expires, in seconds since the Unix epoch.
    """

    def __init__(self, results: tuple[str, ...], expiries: Callable[[], Mapping[str, int]]) -> None:
        self.results = dict.fromkeys(results, 0)
        self.duration = cell(DURATION_NS)  # of those that succeeded
        self.duration_ns = 0
        self.expiries = expiries
        self.reloads = dict.fromkeys(RELOADS, 0)

    def ended(self, result: str, duration_ns: int) -> None:
        """Count a handshake; its duration counts for the result "ok" only."""
        self.results[result] += 1
        if result == "ok":
            self.duration[bisect_left(DURATION_NS, duration_ns)] += 1
            self.duration_ns += duration_ns
