import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.errors import Malformed
from kproxy.protocol.schema import schema
from kproxy.wire import bodies
from tests.protocol.messages import Layout, vectors
from tests.protocol.messages import bodies as bodies_of
from tests.wire.bodies.walking import DETAILED, LOGS, check_details, details, random_sizes


def test_details_of_the_vectors() -> None:
    partitions = 0
    for layout, frame, _, _ in vectors():
        if layout in DETAILED:
            partitions += check_details(layout, frame, layout.decode(frame)[1], range(4))
    assert partitions > 400


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_details_of_any_body(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(DETAILED))
    body = data.draw(bodies_of(layout))
    fragments = [log for _, log in LOGS]
    for topic in body.get("topicData") or body.get("responses") or []:
        for one in topic.get("partitionData") or topic.get("partitions") or []:
            if "records" in one:
                one["records"] = b"".join(data.draw(st.lists(st.sampled_from(fragments), max_size=3)))
    check_details(layout, layout.encode(body), body, [data.draw(st.integers(0, 99))])


def test_details_of_every_kind_of_records() -> None:
    """Each log fragment of the official library, whole and cut at two places, in each API that carries records."""
    carriers = [Layout(schema().apis[0].request, 9, 0, "request"), Layout(schema().apis[1].response, 12, 1, "response")]
    for number, (name, log) in enumerate(LOGS):
        cuts = (len(log) - 1, len(log) // 2, 70, 61, 30, 17, 16, 0)
        for records in (log, *(log[:cut] for cut in cuts[number % 4 :: 4])):
            one = {"records": records}
            for layout in carriers:
                key, inner = ("topicData", "partitionData") if layout.side == "request" else ("responses", "partitions")
                frame = layout.encode({key: [{inner: [one, {"records": None}, one]}]})
                assert check_details(layout, frame, layout.decode(frame)[1], [len(name)]) == 3


def test_a_cut_batch_is_partial() -> None:
    _, log = next(entry for entry in LOGS if entry[0].startswith("m2-none"))
    layout = Layout(schema().apis[1].response, 12, 1, "response")
    frame = layout.encode({"responses": [{"topic": "t", "partitions": [{"records": log + log[:-1]}]}]})
    _, partitions, batches = details(layout, frame, random_sizes(1), bodies.CHECKED)
    assert [batch.partial for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert [batch.crc_valid for batch in batches] == [True] * (len(batches) - 1) + [None]
    assert {(batch.topic, batch.partition) for batch in batches} == {(partitions[0].topic, partitions[0].partition)}


@pytest.mark.parametrize("size", [127, 16_383, 32_767, 32_768, 100_000])
@pytest.mark.parametrize(("version", "side"), [(12, "response"), (9, "request")])
def test_a_string_may_be_as_long_as_before_flexible_versions_and_no_longer(size: int, version: int, side: str) -> None:
    """A compact length could claim more; whole or in pieces it is a fault, or the text."""
    name = "t" * size
    if side == "response":
        layout = Layout(schema().apis[1].response, version, 1, side)
        frame = layout.encode({"responses": [{"topic": name, "partitions": [{"records": b""}]}]})
    else:
        layout = Layout(schema().apis[0].request, version, 0, side)
        frame = layout.encode({"topicData": [{"name": name, "partitionData": [{"records": b"r"}]}]})
    read = bodies.body_reader(layout.api_key, version, side, bodies.TOPICS)
    walker, partitions, _ = details(layout, frame, random_sizes(size), bodies.TOPICS)
    if size > 0x7FFF:
        with pytest.raises(Malformed, match="a text of more than 32767 bytes"):
            read(frame, layout.start, len(frame))
        assert "a text of more than 32767 bytes" in str(walker.fault)
    else:
        assert [one.topic for one in read(frame, layout.start, len(frame)).partitions] == [name]
        assert walker.fault is None and [one.topic for one in partitions] == [name]
