"""The share of exchanges converted by column in captures, with windows of the usual size: a line of `shares.csv` each.

The captures of tests/data are short, and mostly have exchanges that sessions read: those of groups, of brokers, and the
first of each kind. `generated` has long connections, like captures of a cluster in use. Reordering does not prevent
columns; a gap loses only the exchanges around it.
"""

import csv
import random
from functools import cache
from pathlib import Path

import pytest

from bench.offline import KINDS, generate
from tests import captures
from tests.capture import packet
from tests.capture.connections.test_flows import WHOLE, Seen
from tests.native import reads_by_core

pytestmark = reads_by_core
TABLE = Path(__file__).with_name("shares.csv")
EXCHANGES = 6000


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The packets of many exchanges on a few connections: (time_ns, bytes)."""
    path = tmp_path_factory.mktemp("generated") / "generated.pcap"
    with path.open("wb") as file:
        generate(KINDS[0], file, EXCHANGES)
    return [(time_ns, data) for time_ns, data, _ in packet.records(path.read_bytes())]


def as_it_is(packets, dice):
    return packets


def twice(packets, dice):
    """As `-i any` captures a bridge and its member."""
    return [found for time_ns, data in packets for found in ((time_ns, data), (time_ns + 1000, data))]


def swapped(packets, dice):
    """Two packets in a thousand are swapped with the next one."""
    order = list(range(len(packets)))
    for place in dice.sample(range(len(packets) - 1), len(packets) // 500):
        order[place], order[place + 1] = order[place + 1], order[place]
    return [(time_ns, packets[place][1]) for (time_ns, _), place in zip(packets, order, strict=True)]


def lost(packets, dice):
    """One packet in a thousand was not captured."""
    gone = set(dice.sample(range(len(packets)), len(packets) // 1000))
    return [found for place, found in enumerate(packets) if place not in gone]


@cache
def table():
    with TABLE.open(newline="") as file:
        return {row["capture"]: (int(row["by_column"]), int(row["exchanges"])) for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", WHOLE)
def test_the_share_of_a_capture_is_as_listed(name):
    seen = Seen(captures.capture(name))
    assert (seen.at_once, len(seen.exchanges)) == table()[name]


@pytest.mark.parametrize("harm", (as_it_is, twice, swapped, lost))
def test_the_share_of_long_connections_is_as_listed(tmp_path, generated, harm):
    path = tmp_path / "generated.pcap"
    path.write_bytes(packet.pcap(harm(generated, random.Random(1))))
    seen = Seen(path)
    assert (seen.at_once, len(seen.exchanges)) == table()[f"generated, {harm.__name__}"]


def test_every_line_names_a_capture():
    assert set(table()) == {*WHOLE, *(f"generated, {harm.__name__}" for harm in (as_it_is, twice, swapped, lost))}
