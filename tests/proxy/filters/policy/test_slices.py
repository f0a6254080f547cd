"""Each slice of the policy's work is exactly as long as its bound: it limits how long other connections wait.

Each row of the table is one loop. It yields once per slice, at the element with which the slice is full.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from kproxy.protocol.apis import CREATE_TOPICS, DESCRIBE_GROUPS, LIST_GROUPS, METADATA
from kproxy.protocol.codec import encode_data
from kproxy.proxy.filters.policy import lists, members, refusals, resources
from kproxy.proxy.filters.policy.judging import SLICE_NAMES, in_slices, judge
from kproxy.proxy.filters.policy.resources import GROUP, TOPIC, TRANSACTIONAL_ID, Names
from kproxy.wire.events import Exchange
from kproxy.wire.interest import Interest
from tests.proxy.filters.policy.policies import Decided
from tests.wire.playbook import request, response

DENY = {"action": "deny", "topic": "secret-*"}


def stops(slices: Any) -> Counter[str]:
    """How many times work yields, by the function that yields."""
    found: Counter[str] = Counter()
    for _ in slices:
        inner = slices
        while (below := getattr(inner, "gi_yieldfrom", None)) is not None:
            inner = below
        found[inner.gi_code.co_name] += 1
    return found


def short(number: int) -> list[str]:
    return [f"secret-{each}" for each in range(number)]


def judged(number: int, kind: str, name: Callable[[int], Any] = "n-{}".format) -> Iterator[None]:
    talk, names = Decided(DENY), Names()
    setattr(names, kind, [name(each) for each in range(number)])
    rules = talk.authorizer._clearance.api(METADATA, 12)
    return judge(rules, names, "Metadata", talk.authorizer._names.get)


def rest_asked_for(number: int, *, by_id: bool) -> Iterator[None]:
    """A Metadata that names so many denied topics by their ids, or so many allowed ones and one that is not."""
    talk, names = Decided(DENY), Names()
    exchange = Exchange(Interest().plan(METADATA << 16 | 12), 1, 0, 0, 100, 0)
    if by_id:
        names.topic_id = [UUID(int=each + 1) for each in range(number)]
        denied: Any = {(TOPIC, each): 29 for each in names.topic_id}
        topics: list[dict[str, Any]] = [{"topicId": each, "name": None} for each in names.topic_id]
    else:
        names.topic = [f"t-{each}" for each in range(number)]
        denied = {(TOPIC, "secret"): 29}
        topics = [{"name": each} for each in names.topic]
    frame = memoryview(request(METADATA, 12, 1, {"topics": topics}))
    verdict = talk.authorizer._clearance.unknown(METADATA, 12)
    return talk.authorizer._ask_for_the_rest(exchange, frame, names, denied, verdict)


def listed(number: int) -> Iterator[None]:
    groups = [{"groupId": each, "protocolType": "", "groupState": ""} for each in short(number)]
    frame = memoryview(response(LIST_GROUPS, 4, 1, {"groups": groups}))
    return lists.filter_list(LIST_GROUPS, 4, frame, lambda found: True)


def created(number: int) -> Iterator[None]:
    topics = [{"name": each, "configs": []} for each in short(number)]
    frame = memoryview(response(CREATE_TOPICS, 5, 1, {"topics": topics}))
    return lists.hide_settings(5, frame, lambda name: True)


def expressions(number: int) -> Iterator[None]:
    members_ = [{"subscribedTopicRegex": "x", "assignment": {}, "targetAssignment": {}} for _ in range(number)]
    frame = memoryview(response(69, 1, 1, {"groups": [{"members": members_}]}))
    return lists.hide_mentioned(69, 1, frame, lambda kind, name: True, True)


def errors_added(number: int) -> Iterator[None]:
    frame = memoryview(response(METADATA, 12, 1, {"topics": [], "brokers": []}))
    return lists.metadata_answer(12, frame, lambda found: True, [(each, 29) for each in short(number)])


def subscribed(number: int) -> Iterator[None]:
    subscription = encode_data("ConsumerProtocolSubscription", 0, {"topics": short(number), "userData": None})
    member = {"memberMetadata": subscription, "memberAssignment": b""}
    groups = [{"protocolType": "consumer", "members": [member]}]
    frame = memoryview(response(DESCRIBE_GROUPS, 5, 1, {"groups": groups}))
    return members.hide_in_members(5, frame, lambda topic: True)


class Loop(NamedTuple):
    function: str  # the generator that yields
    size: int  # elements in a slice
    work: Callable[[int], Iterator[None]]  # argument: number of elements
    each: int = 1  # weight of an element
    first: int = 0  # weight without any element


LOOPS = {
    "topics judged": Loop("judge", SLICE_NAMES, partial(judged, kind=TOPIC), first=-1),
    "groups judged": Loop("judge", SLICE_NAMES, partial(judged, kind=GROUP), first=-1),
    "transactions judged": Loop("judge", SLICE_NAMES, partial(judged, kind=TRANSACTIONAL_ID), first=-1),
    "ids judged": Loop("judge", SLICE_NAMES, partial(judged, kind="topic_id", name=lambda n: UUID(int=n)), first=-1),
    "names of 63 judged": Loop("judge", SLICE_NAMES, partial(judged, kind=TOPIC, name="{:63}".format), 1, -1),
    "names of 64 judged": Loop("judge", SLICE_NAMES, partial(judged, kind=TOPIC, name="{:64}".format), 2, -2),
    "names of 255 judged": Loop("judge", SLICE_NAMES, partial(judged, kind=TOPIC, name="{:255}".format), 4, -4),
    "denied topics": Loop("_ask_for_the_rest", SLICE_NAMES, partial(rest_asked_for, by_id=True)),
    "topics left": Loop("_ask_for_the_rest", SLICE_NAMES, partial(rest_asked_for, by_id=False)),
    "a list": Loop("_removed", lists._SLICE_SPANS, listed, 2, 1),  # each: a group and its name; first: the array
    "new topics": Loop("hide_settings", lists._SLICE_SPANS, created),
    "expressions": Loop("hide_mentioned", lists._SLICE_SPANS, expressions),
    "errors of topics": Loop("_error_entries", lists._SLICE_SPANS, errors_added),
    "topics of a member": Loop("_without", members._SLICE_TOPICS, subscribed),
    "share keys": Loop(
        "_note_keys", resources._SLICE_NOTED, lambda n: resources._note_keys(Names(), 2, ["g:t:0"] * n)
    ),
    "resources": Loop(
        "_note_resources", resources._SLICE_NOTED, lambda n: resources._note_resources(Names(), [(2, "t")] * n)
    ),
    "values freed": Loop(
        "freed_in_slices", refusals._SLICE_FREED, lambda n: refusals.freed_in_slices([0] * n)
    ),
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_yields_once_for_each_full_slice(loop):
    for slices in (1, 2):
        full = next(number for number in count() if number * loop.each + loop.first >= slices * loop.size)
        found = [stops(loop.work(number))[loop.function] for number in (full - 1, full, full + 1)]
        assert found == [slices - 1, slices, slices], full


def test_long_names_fill_a_slice_sooner():
    for length, names in ((1, 128), (63, 128), (64, 64), (127, 64), (128, 43), (64 * 127, 1), (64 * 200, 1)):
        lengths = [len(some) for some in in_slices(["x" * length] * (2 * names + 1))]
        assert lengths == [names, names, 1] or (names == 1 and lengths == [1, 1, 1, 0])


def test_a_slice_reads_a_limited_number_of_member_bytes():
    for more, slices in ((-1, 0), (0, 0), (1, 1)):
        fixed = 2 + len("connect") + 4 + 4  # the group's type, the sizes of a member's two fields
        member = {"memberMetadata": bytes(members._SLICE_BYTES - fixed + more), "memberAssignment": b""}
        groups = [{"protocolType": "connect", "members": [member]}]
        frame = memoryview(response(DESCRIBE_GROUPS, 0, 1, {"groups": groups}))
        assert stops(members.hide_in_members(0, frame, lambda topic: True))["hide_in_members"] == slices
