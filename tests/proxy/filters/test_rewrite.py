"""A patched answer equals the answer that is decoded, changed and encoded; all other bytes stay the same."""

import copy
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.errors import Malformed
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS
from kproxy.protocol.schema import ADDRESS_CARRIERS, address_path, schema
from kproxy.proxy.filters.rewrite import add_offers, cap_versions, rewrite_addresses
from tests.each import each

VECTORS = Path(__file__).parents[2] / "data" / "vectors-dev.jsonl.gz"
KEPT = ("_tags", "_trailing")


def responses(keys):
    return list(_responses(keys))


def _responses(keys):
    with gzip.open(VECTORS) as lines:
        for line in lines:
            vector = json.loads(line)
            if vector["dir"] == "response" and vector["api_key"] in keys:
                yield vector["api_key"], vector["version"], bytes.fromhex(vector["hex"])


def sized(frame):
    return memoryview(len(frame).to_bytes(4, "big") + frame)


def unsized(frame):
    frame = bytes(frame)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    return frame[4:]


def ours(node_id, host, port):
    """An address that is longer or shorter than the broker's, depending on the node."""
    return ("k" * (node_id % 200 + 1), 20000 + node_id % 1000)


def replaced(value):
    """The decoded answer with the address of every structure that has one changed, wherever it stands."""
    if isinstance(value, list):
        return [replaced(element) for element in value]
    if not isinstance(value, dict):
        return value
    value = {name: replaced(member) for name, member in value.items()}
    if value.get("host"):
        node_id = value["nodeId"] if "nodeId" in value else value["brokerId"]
        value["host"], value["port"] = ours(node_id, value["host"], value["port"])
    return value


def check_addresses(api_key, version, frame):
    header, body = codec.decode_response(frame, api_key, version)
    learned = []

    def advertise(node_id, host, port):
        learned.append((node_id, host, port))
        return ours(node_id, host, port)

    changed = rewrite_addresses(api_key, version, sized(frame), advertise)
    expected = body if body.get("endpointType") == 2 else replaced(body)
    if changed is None:
        assert expected == body
    else:
        assert codec.decode_response(unsized(changed), api_key, version) == (header, expected)
        assert learned


@each(("api_key", "version", "frame"), responses(ADDRESS_CARRIERS))
def test_vectors(api_key, version, frame):
    if address_path(api_key, version) is not None:
        check_addresses(api_key, version, frame)


@each(("api_key", "version", "frame"), responses(ADDRESS_CARRIERS))
def test_unknown_tags_and_trailing_bytes_stay(api_key, version, frame):
    if address_path(api_key, version) is None:
        return
    header, body = codec.decode_response(frame, api_key, version)
    flexible = version in schema().apis[api_key].response.flexible_versions
    if flexible:
        header, body = tagged(header), tagged(body)
    frame = codec.encode_response(api_key, version, header, body) + b"\x00\x01\x02"
    assert codec.decode_response(frame, api_key, version)[1]["_trailing"] == b"\x00\x01\x02"
    check_addresses(api_key, version, frame)


def tagged(value):
    """An unknown tagged field in every structure: one of a newer Kafka than we know."""
    if isinstance(value, list):
        return [tagged(element) for element in value]
    if not isinstance(value, dict) or value.keys() & set(KEPT):
        return value
    return {name: tagged(member) for name, member in value.items()} | {"_tags": {777: b"new" * 50}}


NODES = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.text(st.characters(codec="ascii"), max_size=300), st.integers(-1, 65535)),
    max_size=40,
)
CARRIED = [
    (key, version)
    for key in ADDRESS_CARRIERS
    for version in schema().apis[key].response.versions
    if address_path(key, version)
]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CARRIED), NODES)
def test_any_addresses(carried, nodes):
    """Lengths cross every boundary of their varints: the strings', the tagged field's."""
    api_key, version = carried
    path = address_path(api_key, version)
    id_name = "brokerId" if api_key == 60 else "nodeId"
    entries = [{id_name: node_id, "host": host, "port": port} for node_id, host, port in nodes]
    body = {path: entries} if path else (entries[0] if entries else {})
    check_addresses(api_key, version, codec.encode_response(api_key, version, {"correlationId": 7}, body))


def test_no_coordinator_is_left_alone():
    for version in range(7):
        nobody = {"nodeId": -1, "host": "", "port": -1, "errorCode": 15}
        body = nobody if version < 4 else {"coordinators": [{"key": "group", **nobody}]}
        frame = codec.encode_response(10, version, {"correlationId": 1}, body)
        assert rewrite_addresses(10, version, sized(frame), ours) is None


def test_controllers_are_left_alone():
    nodes = [{"brokerId": 1, "host": "controller", "port": 9093}]
    for version in (1, 2):
        for endpoint_type, is_changed in ((1, True), (2, False)):
            body = {"endpointType": endpoint_type, "brokers": nodes}
            frame = codec.encode_response(60, version, {"correlationId": 1}, body)
            assert (rewrite_addresses(60, version, sized(frame), ours) is not None) == is_changed
    # A client that learned controllers asks them for controllers (KIP-919); a broker answers that it is none.
    mismatch = codec.encode_response(60, 2, {"correlationId": 1}, {"errorCode": 114, "endpointType": 1})
    assert rewrite_addresses(60, 2, sized(mismatch), ours) is None


def test_every_structure_with_an_address_is_known():
    """This fails if a newer Kafka has addresses in structures that the rewriting does not cover."""
    left_alone = {  # protocol-level reasons: traffic between controllers, or the application's own address
        "Vote",
        "BeginQuorumEpoch",
        "EndQuorumEpoch",
        "FetchSnapshot",
        "DescribeQuorum",
        "UpdateRaftVoter",
        "StreamsGroupHeartbeat",
        "StreamsGroupDescribe",
    }

    def carries(fields, version):
        fields = [field for field in fields if version in field.versions]
        return {"host", "port"} <= {field.name for field in fields} or any(
            carries(field.fields, version) for field in fields
        )

    for api in schema().apis.values():
        for version in api.response.versions:
            if api.name not in left_alone:
                found = carries(api.response.fields, version)
                assert found == (address_path(api.key, version) is not None), (api.name, version)


@each(("api_key", "version", "frame"), responses(ADDRESS_CARRIERS))
def test_a_cut_answer_is_malformed(api_key, version, frame):
    if address_path(api_key, version) is None:
        return
    for end in {4, 5, 8, len(frame) // 2, len(frame) - 1}:
        cut = sized(frame[: min(end, len(frame) - 1)])
        try:
            rewrite_addresses(api_key, version, cut, ours)
        except Malformed:
            continue


# --- ApiVersions -----------------------------------------------------------------------------------------------------

NEWER = 99


def capped(version, body, **further):
    """(the decoded answer after the cut, or None if it was left as it was)"""
    frame = codec.encode_response(API_VERSIONS, version, {"correlationId": 3}, body)
    changed = cap_versions(version, sized(frame), **further)
    if changed is None:
        return None
    header, after = codec.decode_response(unsized(changed), API_VERSIONS, version)
    assert header["correlationId"] == 3
    return after


@each(("api_key", "version", "frame"), responses({API_VERSIONS}))
def test_versions_of_vectors(api_key, version, frame):
    _, body = codec.decode_response(frame, api_key, version)
    body = copy.deepcopy(body)
    body["apiKeys"] = [
        {"apiKey": key, "minVersion": 0, "maxVersion": NEWER} for key in (0, 1, 2, 3, 10, 18, 60, 78, 79, 12345)
    ]
    after = capped(version, body)
    highest = {offer["apiKey"]: offer["maxVersion"] for offer in after["apiKeys"]}
    for key in (*ADDRESS_CARRIERS, API_VERSIONS):
        assert highest[key] == schema().apis[key].response.versions[-1]
    assert highest[2] == highest[12345] == NEWER  # the broker alone decides about APIs that need no rewriting
    del after["apiKeys"], body["apiKeys"]
    assert after == body  # the features above all


def test_versions_that_kproxy_knows_stay():
    for version in range(6):
        offers = [{"apiKey": 3, "minVersion": 0, "maxVersion": 13}, {"apiKey": 500, "minVersion": 7, "maxVersion": 9}]
        assert capped(version, {"apiKeys": offers}) is None


@given(
    st.integers(0, 5), st.lists(st.tuples(st.sampled_from((0, 1, 2, 3, 18, 60, 99)), st.integers(0, 40)), max_size=200)
)
def test_an_api_whose_lowest_version_is_above_our_highest_is_removed(version, offers):
    offers = [{"apiKey": key, "minVersion": lowest, "maxVersion": lowest + 3} for key, lowest in offers]
    if any(offer["apiKey"] == 3 for offer in offers):
        offers = [offer for offer in offers if offer["apiKey"] not in (0, 1)]
    after = capped(version, {"apiKeys": offers})
    expected = []
    for offer in offers:
        api = schema().apis[offer["apiKey"]] if offer["apiKey"] in (*ADDRESS_CARRIERS, API_VERSIONS) else None
        cap = api.response.versions[-1] if api else NEWER
        if offer["minVersion"] <= cap:
            expected.append(offer | {"maxVersion": min(offer["maxVersion"], cap)})
    assert (after or {"apiKeys": offers})["apiKeys"] == expected


def test_what_a_broker_offers_to_old_clients_on_purpose_stays():
    """Produce from 0 on, though no broker takes its versions 0 to 2 (KAFKA-18659): old librdkafka asks."""
    offers = [{"apiKey": 0, "minVersion": 0, "maxVersion": 90}, {"apiKey": 3, "minVersion": 0, "maxVersion": 90}]
    after = capped(3, {"apiKeys": offers})
    assert [(offer["minVersion"], offer["maxVersion"]) for offer in after["apiKeys"]] == [(0, 13), (0, 13)]


def test_versions_that_a_policy_could_not_read_are_not_offered():
    """Those of address carriers have their own limit, which stays."""
    offers = [{"apiKey": key, "minVersion": 0, "maxVersion": NEWER} for key in (3, 8, 12)]
    after = capped(3, {"apiKeys": offers}, further={8: 10, 3: 50})
    assert [offer["maxVersion"] for offer in after["apiKeys"]] == [13, 10, NEWER]


@pytest.mark.parametrize("version", range(6))
def test_refused_versions_leave_the_upper_end_of_a_range(version):
    refused = {
        1: frozenset({*range(3), *range(8, 19)}),  # librdkafka infers features of a broker from old versions
        8: frozenset({5}),  # in the middle: a range cannot leave it out
        9: frozenset(range(20)),  # an authorization error explains more than a missing API
        12: frozenset({4}),
    }
    offers = [{"apiKey": key, "minVersion": 0, "maxVersion": 9} for key in (1, 8, 9, 12)]
    after = capped(version, {"apiKeys": offers}, refused=refused)
    assert [(offer["minVersion"], offer["maxVersion"]) for offer in after["apiKeys"]] == [(0, 7), *[(0, 9)] * 3]


def test_topic_ids_are_not_offered_if_the_versions_of_metadata_that_have_them_are_refused():
    offers = [{"apiKey": key, "minVersion": 4, "maxVersion": 13} for key in (0, 1, 3)]
    after = capped(3, {"apiKeys": offers}, refused={3: frozenset(range(10, 14))})
    assert [offer["maxVersion"] for offer in after["apiKeys"]] == [12, 12, 9]


def test_topic_ids_are_not_offered_without_a_way_to_learn_them():
    offers = [
        {"apiKey": 0, "minVersion": 0, "maxVersion": 13},
        {"apiKey": 1, "minVersion": 4, "maxVersion": 18},
        {"apiKey": 3, "minVersion": 0, "maxVersion": 9},
    ]
    after = capped(3, {"apiKeys": offers})
    assert [offer["maxVersion"] for offer in after["apiKeys"]] == [12, 12, 9]


def test_the_answer_to_an_unsupported_version_is_version_0():
    body = {"errorCode": 35, "apiKeys": [{"apiKey": API_VERSIONS, "minVersion": 0, "maxVersion": NEWER}]}
    frame = codec.encode_response(API_VERSIONS, 0, {"correlationId": 3}, body)
    changed = cap_versions(4, sized(frame))
    assert codec.decode_response(unsized(changed), API_VERSIONS, 0)[1]["apiKeys"][0]["maxVersion"] == 5


@each(("api_key", "version", "frame"), responses({API_VERSIONS}))
def test_apis_that_kproxy_answers_are_offered_and_all_else_stays(api_key, version, frame):
    before = codec.decode_response(frame, api_key, version)
    offered, of_broker = add_offers(version, sized(frame), (72, 71))
    own = [{"apiKey": key, "minVersion": 0, "maxVersion": 0} for key in (71, 72)]
    if before[1]["errorCode"]:
        assert offered is None and not of_broker
        return
    keys = {offer["apiKey"] for offer in before[1]["apiKeys"]}
    assert of_broker == (keys >= {71, 72}) == (offered is None)
    if offered is None:
        return
    header, after = codec.decode_response(unsized(offered), api_key, version)
    added = [offer for offer in after["apiKeys"] if offer not in before[1]["apiKeys"]]
    assert [{name: offer[name] for name in own[0]} for offer in added] == [o for o in own if o["apiKey"] not in keys]
    after["apiKeys"] = after["apiKeys"][: -len(added)]
    assert (header, after) == before
    again, of_broker = add_offers(version, memoryview(offered), (71, 72))
    assert again is None and of_broker


@pytest.mark.parametrize("version", schema().apis[API_VERSIONS].response.versions)
def test_apis_are_offered_beside_many_and_beside_none(version):
    for count in (0, 70, 126, 127, 300):
        offers = [{"apiKey": 1000 + number, "minVersion": 0, "maxVersion": 1} for number in range(count)]
        frame = codec.encode_response(API_VERSIONS, version, {"correlationId": 3}, {"errorCode": 0, "apiKeys": offers})
        offered, _ = add_offers(version, sized(frame), (71, 72))
        after = codec.decode_response(unsized(offered), API_VERSIONS, version)[1]
        assert [offer["apiKey"] for offer in after["apiKeys"]] == [*(1000 + n for n in range(count)), 71, 72]
        assert not after.get("_trailing")
