"""One exchange and what stood before it, also where captures overlap: both have the connection, under one id."""

import pytest

from kproxy.analysis import jobs, single
from kproxy.analysis.duck import Tables
from kproxy.convert.processes import convert
from kproxy.views.answers import dicts
from tests.analysis.lagging import LATEST, Traffic


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


def test_an_exchange_is_explained_by_one_source(twice):
    (connection,) = {row["connection"] for row in dicts(twice["connections"])}
    (explained,) = dicts(single.explained(twice, connection, 4))
    assert (explained["source"], explained["number"]) == ("a.pcap", 4)
    for source in (None, "b.pcap"):
        before = list(dicts(single.before(twice, connection, 4, 3, source)))
        assert [row["number"] for row in before] == [1, 2, 3, 4]


def test_each_source_has_its_connection(twice):
    (found,) = dicts(jobs.talkers(twice["exchanges"], by=["client"]))
    assert (found["exchanges"], found["connections"]) == (10, 2)
