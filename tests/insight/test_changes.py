"""Changes: every administrative request of the captures, with the outcomes in the brokers' own logs."""

import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.insight import changes
from kproxy.insight.changes import APIS, TABLE, Changes
from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.topics import Topics
from kproxy.protocol import codec
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.schema import schema
from kproxy.proxy.config.api_groups import ADMIN, BROKER, keys_of_names
from tests import captures
from tests.insight.truth import decoded_exchanges
from tests.protocol.messages import Layout, bodies

BROKERS = range(9091, 9200)  # and controllers
LINE = re.compile(r"b\d \S+ \S+ Completed request:(.*)")

# Administrative APIs that change no resource: coordinators send the markers that end transactions.
NO_CHANGE = {"WriteTxnMarkers"}
# APIs between brokers and controllers by which a node joins or leaves.
OF_BROKERS = {"ControlledShutdown", "BrokerRegistration", "ControllerRegistration", "UpdateRaftVoter", "Envelope"}


def feed_all(found):
    known = Changes("c")
    return [row for each in found for row in known.feed(each, Topics())]


def test_every_administrative_api_is_read():
    names = {schema().apis[key].name for key in APIS}
    assert names == (set(ADMIN) - NO_CHANGE) | OF_BROKERS
    assert set(BROKER) >= OF_BROKERS
    assert set(keys_of_names()) >= names


@pytest.mark.parametrize("key", TABLE)
def test_the_table_names_fields_that_every_version_has(key):
    api, reading = schema().apis[key], TABLE[key]
    for version in api.request.versions:
        asked = {field.name: field for field in api.request.fields_of(version)}
        answered = {field.name: field for field in api.response.fields_of(version)}
        arrays = [asked[name] for name in reading.items if name in asked]
        assert arrays or not reading.items
        assert all(array.is_array for array in arrays)
        for fields in [array.fields for array in arrays] or [tuple(asked.values())]:
            present = {field.name: field.type for field in fields if version in field.versions}
            assert set(reading.name) & present.keys() or not present or not reading.name or (key == 38 and version < 3)
            assert reading.types is None or present[reading.kind] == "int8"
        outcomes = answered.get(reading.outcomes)
        if outcomes is None:  # one outcome for the whole response: its own error code, or those of its parts
            assert "errorCode" in answered or (key == 34 and not reading.outcomes)
        else:
            present = {field.name: field.type for field in outcomes.fields if version in field.versions}
            assert "errorCode" in present or key in (21, 43, 45)  # those have an error code per partition
            assert not reading.repeats or set(reading.repeats) & present.keys()
            assert reading.types is None or not reading.repeats or reading.kind in present


def logged_errors(name):
    """(API, error codes) of each administrative request in the brokers' logs, without forwarded ones."""
    found = Counter()
    for line in (captures.folder("brokerlogs") / f"{name}.brokerlog").open():
        entry = json.loads(LINE.match(line)[1])
        key = entry["requestHeader"]["requestApiKey"]
        if key in TABLE and not entry["isForwarded"]:
            codes = map(int, re.findall(r'"errorCode": ?(-?\d+)', json.dumps(entry["response"])))
            found += Counter((schema().apis[key].name, error_name(code)) for code in codes if code)
    return found


@pytest.mark.parametrize(
    "name", ["k39_zk_cluster", "k41_java_cluster", "k41_kafkajs", "k41_librdkafka", "k41_quota", "k41_sasl_plain"]
)
def test_outcomes_equal_the_brokers_own_log(name):
    exchanges = [each for each in decoded_exchanges(captures.capture(name), BROKERS, APIS) if each.api_key in TABLE]
    rows = feed_all(exchanges)
    refused = Counter((row.api, row.error) for row in rows if row.error)
    assert refused == logged_errors(name)
    assert all(row.answered for row in rows)
    assert len(rows) >= len(exchanges)


def test_each_resource_has_a_row_with_the_requested_change():
    rows = feed_all(decoded_exchanges(captures.capture("k39_zk_cluster"), BROKERS, APIS))
    by_resource = {(row.api, row.resource_type, row.resource_name, row.error): row for row in rows}
    created = by_resource["CreateTopics", "topic", "adm-alpha", None]
    assert json.loads(created.detail)["configs"] == [{"name": "retention.ms", "value": "60000"}]
    assert json.loads(by_resource["CreatePartitions", "topic", "adm-alpha", None].detail)["count"] == 4
    assert "does not exist" in by_resource["CreatePartitions", "topic", "nope", "UNKNOWN_TOPIC_OR_PARTITION"].detail
    quota = json.loads(by_resource["AlterClientQuotas", "client_quota", "client-id=quota-x", None].detail)
    assert quota["ops"] == [{"key": "producer_byte_rate", "value": 1000.0, "remove": False}]
    acl = json.loads(by_resource["CreateAcls", "topic", "alpha", "SECURITY_DISABLED"].detail)
    assert (acl["resourcePatternType"], acl["operation"], acl["principal"]) == ("prefixed", "read", "User:bob")
    assert (
        by_resource["ElectLeaders", "topic", None, None].detail == '{"electionType": "preferred"}'
    )  # for all partitions
    assert {row.resource_name for row in rows if row.api == "ControlledShutdown"} == {"1", "2"}
    scram = json.loads(by_resource["AlterUserScramCredentials", "user", "alice", None].detail)
    assert (scram["salt"], scram["saltedPassword"], scram["iterations"]) == ("[secret]", "[secret]", 4096)


def test_a_forwarded_request_is_attributed_to_the_client_and_its_principal():
    """A KRaft broker forwards requests that only the controller may execute, and names the client's principal."""
    header = {"requestApiKey": 20, "requestApiVersion": 6, "correlationId": 5, "clientId": "admin-7"}
    topics = [{"name": None, "topicId": uuid(7)}, {"name": "gone"}]
    inner = codec.encode_request(header, {"topics": topics, "timeoutMs": 1000})
    outcomes = [{"name": "gone", "errorCode": 3}, {"name": "orders", "topicId": uuid(7), "errorCode": 0}]
    answer = codec.encode_response(20, 6, {"correlationId": 5}, {"throttleTimeMs": 0, "responses": outcomes})
    principal = codec.encode_data("DefaultPrincipalData", 0, {"type": "User", "name": "alice"})
    request = {"requestData": inner, "requestPrincipal": principal, "clientHostAddress": bytes((10, 0, 0, 9))}
    rows = feed_all([DecodedExchange(58, 0, request, {"responseData": answer, "errorCode": 0}, 1, 2)])
    assert [(row.api, row.resource_name, row.error) for row in rows] == [
        ("DeleteTopics", "orders", None),
        ("DeleteTopics", "gone", "UNKNOWN_TOPIC_OR_PARTITION"),
    ]
    assert {(row.principal, row.client_id, row.client_address) for row in rows} == {
        ("User:alice", "admin-7", "10.0.0.9")
    }
    assert not feed_all([DecodedExchange(58, 0, request | {"requestData": b"\0\x14\0"}, None, 1, 2)])


def uuid(number):
    return changes.UUID(int=number)


def test_an_unanswered_request_is_not_reported_as_done():
    (row,) = feed_all([DecodedExchange(42, 2, {"groupsNames": ["g"]}, None, 5, 0)])
    assert (row.time_ns, row.answered, row.error, row.resource_name) == (5, False, None, "g")


def test_the_rows_of_a_request_with_many_changes_are_bounded(monkeypatch):
    monkeypatch.setattr(changes, "MAX_RESOURCES", 3)
    known = Changes("c")
    topics = [{"name": f"t{index}", "count": 9, "assignments": [{"brokerIds": [1] * 5000}]} for index in range(7)]
    rows = list(known.feed(DecodedExchange(37, 3, {"topics": topics, "validateOnly": False}, None, 1, 0), Topics()))
    assert [row.resource_name for row in rows] == ["t0", "t1", "and 5 more"]
    assert known.left_out == {"changes": 5}
    assert all(len(row.detail or "") <= changes.MAX_DETAIL + 1 for row in rows)


LAYOUTS = [(key, version) for key in sorted(APIS) for version in schema().apis[key].request.versions]


@given(data=st.data(), pair=st.sampled_from(LAYOUTS), answered=st.booleans())
def test_any_exchange_gives_rows_and_never_an_error(data, pair, answered):
    key, version = pair
    api = schema().apis[key]
    request = data.draw(bodies(Layout(api.request, version, key, "request")))
    response = data.draw(bodies(Layout(api.response, version, key, "response"))) if answered else None
    known = Changes("c")
    rows = list(known.feed(DecodedExchange(key, version, request, response, 1, 2), Topics()))
    assert all(row.detail is None or len(row.detail) <= changes.MAX_DETAIL + 1 for row in rows)
