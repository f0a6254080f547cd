"""docs/inside/bounds.md says the bounds that the code has."""

import re

import pytest

from kproxy.metrics.counters.named import MAX_CLIENTS, MAX_TOPICS
from kproxy.proxy.config.flight import Flight
from kproxy.proxy.config.settings import MAX_HELD_BYTES, MAX_REQUEST_BYTES
from kproxy.proxy.sockets.descriptors import DEFAULT_CONNECTIONS
from tests.project import ROOT

PAGE = (ROOT / "docs/inside/bounds.md").read_text().partition("## The full list")[0]
MIB = 1 << 20


@pytest.mark.parametrize(
    "what, bound",
    [
        ("connections", f"{DEFAULT_CONNECTIONS:,}, "),
        ("answers buffered for rewriting", f"{MAX_HELD_BYTES // MIB} MiB of all"),
        ("one request", f"{MAX_REQUEST_BYTES // MIB} MiB, "),
        ("series of topics and of clients", f"{MAX_TOPICS} each per cluster"),
        ("the flight recorder", f"{Flight(folder='dumps').frame_memory // MIB} MiB of frames"),
    ],
)
def test_a_bound_is_that_of_the_code(what: str, bound: str) -> None:
    (said,) = re.findall(rf"^\| {what}\b(?! of)[^|]*\| ([^|]*) \|", PAGE, re.MULTILINE)
    assert bound in said and MAX_TOPICS == MAX_CLIENTS
