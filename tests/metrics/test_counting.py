"""Which reads of a connection are passed to the observers of groups and bodies."""

import pytest

from kproxy.metrics import Metrics
from kproxy.protocol.apis import HEARTBEAT, METADATA
from kproxy.wire.bodies import Found
from kproxy.wire.events import Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.observing.kept import Kept
from tests.metrics.test_metrics import PRODUCE, exchange, info


def beat(group):
    return exchange(Interest().plan(HEARTBEAT << 16 | 4), group_id=group)


def test_heartbeats_are_passed_on_when_the_group_changes_and_then_no_more():
    """On an idle cluster most events are heartbeats."""
    told = []
    connection = Metrics().connection(info(), "main", "1")
    connection.tell(lambda events: told.append([event.group_id for event in events]))
    for group in ("a", "a", "b", "b", "a", "a"):
        connection.events([beat(group)])
    assert told == [["a"], ["b"], ["a"]]
    connection.events([beat("a"), exchange(PRODUCE)])
    connection.events([exchange(PRODUCE, group_id="c")])  # no heartbeat: its group is not followed
    connection.events([beat("a"), beat("a")])
    assert len(told) == 3


def test_an_exchange_whose_frames_are_kept_is_passed_on_unless_it_is_small_and_succeeded():
    plan = Interest(kept=Kept((HEARTBEAT, METADATA), only_failed=(HEARTBEAT,), small=(HEARTBEAT,))).plan
    told = []
    connection = Metrics().connection(info(), "main", "1")
    connection.tell(told.append)
    for key, version in ((HEARTBEAT, 4), (METADATA, 9)):
        for errors in ((), (27,)):
            connection.events([exchange(plan(key << 16 | version), errors=errors)])
    assert [(event.plan.api_key, event.errors) for (event,) in told] == [
        (HEARTBEAT, (27,)),
        (METADATA, ()),
        (METADATA, (27,)),
    ]


@pytest.mark.parametrize("side", ("request_body", "response_body"))
def test_a_decoded_exchange_is_passed_on_with_its_whole_read(side):
    observed = []
    connection = Metrics().connection(info(), "main", "1")
    connection.tell(observed.append)
    plain = exchange(Interest().plan(METADATA << 16 | 9))
    read: list[Exchange] = [plain, exchange(PRODUCE, **{side: Found()})]
    connection.events([plain])
    connection.events(read)
    assert observed == [read]
