"""One exchange and those before it, also with overlapping captures, which have the connection under the same id."""

import pytest

from kproxy.analysis import jobs
from kproxy.analysis.duck import Tables
from kproxy.analysis.engine import ask
from kproxy.analysis.questions import single
from kproxy.convert.processes import convert
from kproxy.views.answers import dicts
from tests.analysis.lagging import LATEST, Traffic
from tests.capture import packet
from tests.capture.connections.test_flows import Wire, request


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """Five requests of one connection, in two captures."""
    place = tmp_path_factory.mktemp("twice")
    traffic = Traffic()
    traffic.commit("g", "t", 10)
    for end in range(20, 24):
        traffic.list_offsets("t", LATEST, end)
    for name in ("a.pcap", "b.pcap"):
        (place / name).write_bytes(traffic.pcap())
    convert([place / "a.pcap", place / "b.pcap"], place / "tables")
    with Tables(place / "tables") as tables:
        yield tables


def test_an_exchange_in_two_captures_is_explained_from_one(twice):
    (connection,) = {row["connection"] for row in dicts(twice["connections"])}
    (explained,) = dicts(single.explained(twice, connection, 4))
    assert (explained["source"], explained["number"]) == ("a.pcap", 4)
    for source in (None, "b.pcap"):
        before = list(dicts(single.before(twice, connection, 4, 3, source)))
        assert [row["number"] for row in before] == [1, 2, 3, 4]


def test_a_connection_in_two_captures_counts_twice(twice):
    (found,) = dicts(jobs.talkers(twice["exchanges"], by=["client"]))
    assert (found["exchanges"], found["connections"]) == (10, 2)


@pytest.mark.parametrize("others", (0, 20))
def test_an_unanswered_request_waits_until_the_last_connection_ends(tmp_path, others):
    """If the capture ends with the request, it has waited for 0 ns, and the cause is still "unanswered"."""
    waiting, busy = Wire().shake().ask(1).send(0, request(2)), Wire(client=(packet.CLIENT[0], 50000)).shake()
    waiting.packets += busy.ask(*range(others)).packets
    step_ns = 1_000_000_000
    path = tmp_path / "one.pcap"
    path.write_bytes(packet.pcap([(number * step_ns, data) for number, data in enumerate(waiting.packets)]))
    convert([path], tmp_path / "tables")
    with Tables(tmp_path / "tables") as tables:
        (row,) = dicts(ask({"t": tables["exchanges"]}, some="select * from t where outcome = 'unanswered'"))
        (explained,) = dicts(single.explained(tables, row["connection"], row["number"]))
    waited_ns = (3 + 2 * others) * step_ns  # the handshake of the other connection too
    assert (explained["cause"], explained["total_ns"]) == ("unanswered", waited_ns if others else 0)
