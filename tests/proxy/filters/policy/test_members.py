"""DescribeGroups hides topics that the client may not see from the metadata and assignments of classic members."""

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import DESCRIBE_GROUPS
from kproxy.protocol.schema import schema
from tests.proxy.filters.policy.policies import Decided
from tests.wire.playbook import request, sized

SUBSCRIPTION, ASSIGNMENT = "ConsumerProtocolSubscription", "ConsumerProtocolAssignment"
TOPICS = ("orders", "secret-1")


def encoded(message, version, topics=TOPICS, user_data=None):
    partitions = [{"topic": topic, "partitions": [0, 7]} for topic in topics]
    if message == ASSIGNMENT:
        return codec.encode_data(message, version, {"assignedPartitions": partitions, "userData": user_data})
    body = {"topics": list(topics), "userData": user_data, "generationId": 3, "rackId": "r"}
    return codec.encode_data(message, version, body | {"ownedPartitions": partitions})


def described(version, groups, **settings):
    """The response that a client gets for these groups: (protocol type, [(metadata, assignment)])."""
    talk = Decided({"action": "deny", "topic": "secret-*"}, **settings)
    talk.client(request(DESCRIBE_GROUPS, version, 1, {"groups": [f"g{number}" for number in range(len(groups))]}))
    body = {
        "groups": [
            {
                "groupId": f"g{number}",
                "groupState": "Stable",
                "protocolType": kind,
                "members": [{"memberId": "m", "memberMetadata": one, "memberAssignment": two} for one, two in members],
            }
            for number, (kind, members) in enumerate(groups)
        ]
    }
    talk.broker(sized(bytes(codec.encode_response(DESCRIBE_GROUPS, version, {"correlationId": 1}, body))))
    answer = talk.answer(DESCRIBE_GROUPS, version)
    return [
        [(bytes(one["memberMetadata"]), bytes(one["memberAssignment"])) for one in group["members"]]
        for group in answer["groups"]
    ]


@pytest.mark.parametrize("version", schema().apis[DESCRIBE_GROUPS].response.versions)
def test_members_are_described_without_topics_that_the_client_may_not_see(version):
    versions = schema().data[SUBSCRIPTION].versions
    own = [(encoded(SUBSCRIPTION, each), encoded(ASSIGNMENT, each)) for each in versions]
    sticky = (
        encoded(SUBSCRIPTION, 1, user_data=b"secret-1 by an assignor"),
        encoded(ASSIGNMENT, 1, user_data=b"secret-1"),
    )
    odd = [(b"\x7f\xffsecret-1", b"\0"), (b"", b""), (b"\0\1secret-1", encoded(ASSIGNMENT, 0)[:-5])]
    foreign = [(b"\0\1secret-1", b"anything")]
    groups = [("consumer", [*own, sticky]), ("connect", foreign), ("consumer", odd), ("consumer", own[:1])]
    seen = [(encoded(SUBSCRIPTION, each, ["orders"]), encoded(ASSIGNMENT, each, ["orders"])) for each in versions]
    assert described(version, groups) == [
        [*seen, (encoded(SUBSCRIPTION, 1, ["orders"]), encoded(ASSIGNMENT, 1, ["orders"]))],
        foreign,
        [(b"", b"")] * 3,
        seen[:1],
    ]
    assert described(version, groups, filter_lists=False) == [members for _, members in groups]
