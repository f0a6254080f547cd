"""The file of assigned ports is read as it was written, or refused and left unchanged."""

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.proxy.cluster import ports_file
from kproxy.proxy.cluster.port_assignment import Held
from kproxy.proxy.cluster.ports_file import NotOurs, read, write

IDS = st.integers(0, 2**31 - 1)


@given(st.dictionaries(IDS, st.tuples(st.integers(1, 65535), st.none() | st.integers(0, 10**6)), max_size=20))
def test_round_trip(tmp_path_factory, given_ports):
    path = tmp_path_factory.mktemp("ports") / "ports.json"
    held = {node_id: Held(port, absent) for node_id, (port, absent) in given_ports.items()}
    held = {each.port: (node_id, each) for node_id, each in held.items()}  # one id for each port
    held = dict(held.values())
    write(path, "default", held)
    found = read(path, "default")
    assert {node_id: each.port for node_id, each in found.items()} == {k: each.port for k, each in held.items()}
    for node_id, each in found.items():
        absent = held[node_id].absent_s
        assert (each.absent_s is None) == (absent is None)
        assert absent is None or absent - 1 <= each.absent_s <= absent + 60


def test_only_its_owner_may_read_it_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "ports.json"
    assert read(path, "default") == {}
    write(path, "default", {1840211337: Held(9201)})
    write(path, "default", {1840211337: Held(9201), 7: Held(9202, 3.0)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["ports.json"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "volume").mkdir()
    link = tmp_path / "ports.json"
    link.symlink_to(tmp_path / "volume" / "ports.json")
    for port in (9201, 9202):
        write(link, "default", {7: Held(port)})
        assert link.is_symlink() and read(link, "default") == {7: Held(port)}
    assert [each.name for each in (tmp_path / "volume").iterdir()] == ["ports.json"]


def test_the_largest_file_that_is_written_is_read(tmp_path):
    held = {2**31 - 1 - number: Held(1 + number, 1.0) for number in range(4096)}
    write(tmp_path / "ports.json", "x" * 200, held)
    assert read(tmp_path / "ports.json", "x" * 200).keys() == held.keys()


OURS = {"kproxy": "broker ports", "version": 1, "cluster": "default", "ports": {"7": 9201}, "absent_since": {}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no JSON"),
        (json.dumps(OURS)[:-9], "no JSON"),
        ("\xff\xfe", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "kproxy has not written it"),
        ('[[cluster]]\nlisten = "x:1"', "no JSON"),
        ('{"kproxy": "users"}', "kproxy has not written it"),
        (json.dumps(OURS | {"version": 2}), "its version is 2"),
        (json.dumps(OURS | {"cluster": "other"}), "it has the ports of cluster 'other'"),
        (json.dumps(OURS | {"ports": []}), "'ports' is missing"),
        (json.dumps(OURS | {"ports": {"7": 0}}), "'ports' has '7': 0"),
        (json.dumps(OURS | {"ports": {"7": 65536}}), "'ports' has '7': 65536"),
        (json.dumps(OURS | {"ports": {"7": True}}), "'ports' has '7': True"),
        (json.dumps(OURS | {"ports": {"7": "9201"}}), "'ports' has '7': 9201"),
        (json.dumps(OURS | {"ports": {"-1": 9201}}), "'ports' has '-1'"),
        (json.dumps(OURS | {"ports": {"2147483648": 9201}}), "'ports' has '2147483648'"),
        (json.dumps(OURS | {"ports": {"7": 9201, "8": 9201}}), "a port for two node ids"),
        (json.dumps(OURS | {"absent_since": {"7": 0.5}}), "'absent_since' has '7'"),
        (json.dumps(OURS) + " " * ports_file.MAX_BYTES, "more than"),
    ],
)
def test_a_file_that_is_damaged_or_not_ours_is_refused_and_not_overwritten(tmp_path, content, reason):
    path = tmp_path / "ports.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(NotOurs, match=reason):
        read(path, "default")
    with pytest.raises(NotOurs, match=reason):
        write(path, "default", {1: Held(9201)})
    assert path.read_text(encoding="latin-1") == content


def test_a_folder_that_cannot_be_written_leaves_what_was_there(tmp_path):
    with pytest.raises(OSError):
        write(tmp_path / "missing" / "ports.json", "default", {1: Held(9201)})
    (tmp_path / "ports.json").mkdir()
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for somebody who writes
    for name in ("ports.json", "pipe"):
        with pytest.raises(OSError):
            write(tmp_path / name, "default", {1: Held(9201)})
    assert {each.name for each in tmp_path.iterdir()} == {"ports.json", "pipe"}
