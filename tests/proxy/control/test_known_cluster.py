"""What a live cluster is known for: rows become cells, and what was said before is not decoded again."""

import pytest

from kproxy.proxy.control.feed import Heard, Whose
from kproxy.proxy.control.known_cluster import KnownCluster
from tests.wire.playbook import request, response

METADATA, COMMIT, JOIN = 3, 8, 11
WHOSE = Whose("default", "10.0.0.1", 3, 1, "live:default", None)


def heard(key, version, asked, told, number=1, at_ns=10**18, correlation_id=7):
    frames = request(key, version, correlation_id, asked), response(key, version, correlation_id, told)
    return Heard(WHOSE, key, version, number, at_ns, at_ns + 1000, *frames)


def metadata(leader=1, isr=(1, 2), throttle=0, **more):
    partitions = [
        {"partitionIndex": 0, "leaderId": leader, "leaderEpoch": leader, "replicaNodes": [1, 2], "isrNodes": list(isr)}
    ]
    topics = [{"name": "t", "partitions": partitions}]
    return {"throttleTimeMs": throttle, "topics": topics, **more}


@pytest.mark.parametrize("version", [9, 12])
def test_an_answer_of_metadata_that_says_the_same_is_not_decoded_again(version):
    known = KnownCluster("default")
    assert known.hear(heard(METADATA, version, {}, metadata()))
    for number in range(5):
        assert known.hear(heard(METADATA, version, {}, metadata(throttle=number), correlation_id=number)) == []
    assert known.same == 5
    assert known.hear(heard(METADATA, version, {}, metadata(leader=2)))
    assert known.hear(heard(METADATA, version, {}, metadata(leader=3, isr=(1,))))
    assert (known.cells.changes["elected"], known.cells.shrunk) == (2, 1)
    known.hear(heard(METADATA, version, {}, metadata(leader=2)))  # an old one: it is looked at again, and says nothing
    assert known.same == 5


def test_what_does_not_decode_is_counted_and_the_rest_goes_on():
    known = KnownCluster("default")
    good = heard(JOIN, 5, {"groupId": "g"}, {"errorCode": 25})
    assert known.hear(good._replace(response=good.response[:-2])) == []
    assert known.cells.left_out["undecodable"] == 1
    assert known.hear(good) and known.cells.groups.cells["g"].failures["join"] == 1


def test_commits_that_fail_are_of_their_group():
    known = KnownCluster("default")
    failed = [{"name": "t", "partitions": [{"partitionIndex": 0, "errorCode": 22}]}]
    known.hear(heard(COMMIT, 8, {"groupId": "g"}, {"topics": failed}))
    assert known.cells.groups.cells["g"].failures["commit"] == 1
    assert list(known.groups("", 10)) == []  # who commits need not be a member
