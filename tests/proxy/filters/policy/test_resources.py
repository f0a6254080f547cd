"""The policy reads names where brokers read them, or refuses the request: a client cannot hide a name."""

import struct
from uuid import UUID

import pytest

from kproxy.errors import Malformed
from kproxy.protocol.apis import FETCH
from kproxy.proxy.filters.policy.resources import quick_reader, reader, sliced_reader
from tests.wire.playbook import request

VERSION = 17
PUBLIC, SECRET = UUID(int=1), UUID(int=2)
NO_TAGS = b"\0"
END = b"\1\1" + NO_TAGS  # no forgotten topics, no rack


def topic(name: UUID, tags: bytes = NO_TAGS) -> bytes:
    """A topic with one partition, which has these tagged fields."""
    return name.bytes + b"\2" + struct.pack(">iiqiqi", 0, -1, 0, -1, -1, 1 << 20) + tags + NO_TAGS


def directory(content: bytes) -> bytes:
    """The tagged field 0 of a partition: the directory of a replica, which is a UUID."""
    return bytes((0, len(content))) + content


def fetch(*topics: bytes) -> bytes:
    frame = struct.pack(">hhih", FETCH, VERSION, 1, 2) + b"me" + NO_TAGS
    frame += struct.pack(">iiibii", 500, 1, 1 << 20, 0, 0, -1) + bytes((len(topics) + 1,)) + b"".join(topics) + END
    return len(frame).to_bytes(4, "big") + frame


def in_slices(frame: bytes) -> list[UUID]:
    slices = sliced_reader(FETCH, VERSION)(frame, 12, len(frame))
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value.topic_id


@pytest.mark.parametrize("key, version, body, kind", [
    (10, 6, {"keyType": 2, "coordinatorKeys": ["g:t:0"]}, "group"),
    (32, 4, {"resources": [{"resourceType": 2, "resourceName": "g"}]}, "topic"),
])  # fmt: skip
def test_a_short_request_is_read_in_one_slice(key, version, body, kind):
    frame = request(key, version, 1, body)
    with pytest.raises(StopIteration) as done:
        next(sliced_reader(key, version)(frame, 12, len(frame)))
    assert getattr(done.value.value, kind) == ["g"]


READERS = {
    "whole": lambda frame: reader(FETCH, VERSION)(frame, 12, len(frame)).topic_id,
    "quick": lambda frame: quick_reader(FETCH, VERSION)(frame, 12, len(frame)).topic_id,
    "in slices": in_slices,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_tagged_fields_cannot_hide_a_topic(read):
    """A broker reads a known tagged field by its content, ignoring its size, and continues after that content."""
    assert read(fetch(topic(PUBLIC, b"\1" + directory(bytes(16))), topic(SECRET))) == [PUBLIC, SECRET]
    hides = bytes(16) + NO_TAGS + topic(SECRET) + END
    with pytest.raises(Malformed, match="does not end where its size says"):
        read(fetch(topic(PUBLIC, b"\1" + directory(hides)), topic(PUBLIC)))
    with pytest.raises(Malformed, match="twice or out of order"):
        read(fetch(topic(PUBLIC, b"\2" + 2 * directory(bytes(16)))))
