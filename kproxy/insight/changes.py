"""An audit of administrative requests: a row for each resource with its outcome.

Duty: one reader for all of these APIs, with a table of the fields that name a resource and of the fields with its
outcome. All other fields of a resource are its detail, without secrets (`protocol.shown.secrets`). Outcomes are matched
to resources by the names that they repeat, or by their order if they repeat none. A request that a broker forwards in
an Envelope (KIP-590) is read like any other, with the principal that the broker passes on.

Bounds: MAX_RESOURCES rows of a request, the last one for the rest; MAX_DETAIL characters of detail. Refuses to know
the effects of a change on topics and partitions: see `topology` and `leadership`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.errors import ProtocolError
from kproxy.insight.decoded import Body, DecodedExchange
from kproxy.insight.rows import Change
from kproxy.insight.topics import Topics
from kproxy.protocol import codec
from kproxy.protocol.apis import ENVELOPE
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.schema import schema
from kproxy.protocol.shown.render import uuid_text
from kproxy.protocol.shown.secrets import redact

MAX_RESOURCES = 10_000
MAX_DETAIL = 2000
MASKED = "[secret]"

# Codes of Kafka's ConfigResource.Type, ResourceType (of ACLs), PatternType, AclOperation, AclPermissionType.
CONFIG_TYPES = {2: "topic", 4: "broker", 8: "broker_logger", 16: "client_metrics", 32: "group"}
ACL_TYPES = {1: "any", 2: "topic", 3: "group", 4: "cluster", 5: "transactional_id", 6: "delegation_token", 7: "user"}
PATTERNS = {1: "any", 2: "match", 3: "literal", 4: "prefixed"}
OPERATIONS = (
    *("unknown", "any", "all", "read", "write", "create", "delete", "alter", "describe", "cluster_action"),
    *("describe_configs", "alter_configs", "idempotent_write", "create_tokens", "describe_tokens", "two_phase_commit"),
)
PERMISSIONS = {1: "any", 2: "deny", 3: "allow"}
CODES: dict[str, dict[int, str]] = {
    "resourcePatternType": PATTERNS,
    "patternTypeFilter": PATTERNS,
    "operation": dict(enumerate(OPERATIONS)),
    "permissionType": PERMISSIONS,
    "configOperation": {0: "set", 1: "delete", 2: "append", 3: "subtract"},
    "mechanism": {1: "SCRAM-SHA-256", 2: "SCRAM-SHA-512"},
    "electionType": {0: "preferred", 1: "unclean"},
    "upgradeType": {1: "upgrade", 2: "safe_downgrade", 3: "unsafe_downgrade"},
}


class Reading(NamedTuple):
    """The places of an API's resources and outcomes. Fields have their names in the schema."""

    kind: str  # type of the resources; or the int8 field of a resource that has it
    items: tuple[str, ...]  # arrays of the request with a resource per element; none: the request is about one resource
    name: tuple[str, ...]  # fields that name an element; the first one that it has counts
    outcomes: str = ""  # the array of the answer; "": the answer itself
    repeats: tuple[str, ...] = ()  # fields of an outcome that repeat the name; none: outcomes are in order
    types: dict[int, str] | None = None  # resource type by code in the field `kind`


TABLE: dict[int, Reading] = {
    7: Reading("broker", (), ("brokerId",)),  # ControlledShutdown
    19: Reading("topic", ("topics",), ("name",), "topics", ("name",)),  # CreateTopics
    20: Reading("topic", ("topicNames", "topics"), ("name", "topicId"), "responses", ("name", "topicId")),
    21: Reading("topic", ("topics",), ("name",), "topics", ("name",)),  # DeleteRecords
    30: Reading("resourceType", ("creations",), ("resourceName",), "results", types=ACL_TYPES),  # CreateAcls
    31: Reading("resourceTypeFilter", ("filters",), ("resourceNameFilter",), "filterResults", types=ACL_TYPES),
    33: Reading("resourceType", ("resources",), ("resourceName",), "responses", ("resourceName",), CONFIG_TYPES),
    34: Reading("log_dir", ("dirs",), ("path",)),  # AlterReplicaLogDirs; its answer is by topic
    37: Reading("topic", ("topics",), ("name",), "results", ("name",)),  # CreatePartitions
    38: Reading("delegation_token", (), ("ownerPrincipalName",)),  # CreateDelegationToken
    39: Reading("delegation_token", (), ()),  # RenewDelegationToken
    40: Reading("delegation_token", (), ()),  # ExpireDelegationToken
    42: Reading("group", ("groupsNames",), (), "results", ("groupId",)),  # DeleteGroups
    43: Reading("topic", ("topicPartitions",), ("topic",), "replicaElectionResults", ("topic",)),  # ElectLeaders
    44: Reading("resourceType", ("resources",), ("resourceName",), "responses", ("resourceName",), CONFIG_TYPES),
    45: Reading("topic", ("topics",), ("name",), "responses", ("name",)),  # AlterPartitionReassignments
    47: Reading("group", (), ("groupId",)),  # OffsetDelete
    49: Reading("client_quota", ("entries",), ("entity",), "entries", ("entity",)),  # AlterClientQuotas
    51: Reading("user", ("deletions", "upsertions"), ("name",), "results", ("user",)),  # AlterUserScramCredentials
    57: Reading("feature", ("featureUpdates",), ("feature",), "results", ("feature",)),  # UpdateFeatures
    62: Reading("broker", (), ("brokerId",)),  # BrokerRegistration
    64: Reading("broker", (), ("brokerId",)),  # UnregisterBroker
    70: Reading("controller", (), ("controllerId",)),  # ControllerRegistration
    80: Reading("controller", (), ("voterId",)),  # AddRaftVoter
    81: Reading("controller", (), ("voterId",)),  # RemoveRaftVoter
    82: Reading("controller", (), ("voterId",)),  # UpdateRaftVoter
    91: Reading("group", (), ("groupId",)),  # AlterShareGroupOffsets
    92: Reading("group", (), ("groupId",)),  # DeleteShareGroupOffsets
    94: Reading("controller", (), ("controllerId",)),  # UnregisterController
}
APIS = frozenset((*TABLE, ENVELOPE))

_NOT_DETAIL = ("throttleTimeMs", "errorCode", "errorMessage")  # fields of an outcome
_CONFIGS = "configs"  # omitted: the broker lists all effective configs of a created topic


class Changes:
    """The administrative requests of one cluster."""

    apis = APIS

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.left_out = Counter[str]()  # resources that have no row of their own

    def feed(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Change]:
        """Yield the rows of an exchange of an API in `APIS`, answered or not."""
        if exchange.api_key == ENVELOPE:
            inner = opened(exchange)
            if inner is not None and inner.api_key in TABLE:
                yield from self._read(inner, topics)
        elif exchange.api_key in TABLE:
            yield from self._read(exchange, topics)

    def finish(self) -> Iterator[Change]:
        """Yield nothing: no state is pending."""
        return iter(())

    def _read(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Change]:
        api, reading = schema().apis[exchange.api_key], TABLE[exchange.api_key]
        request = redact(f"{api.name}Request", exchange.request, _masked)
        answer = None
        if exchange.response is not None:
            answer = redact(f"{api.name}Response", exchange.response, _masked)
        around = {name: value for name, value in request.items() if name not in reading.items}
        outcomes = _Outcomes(reading, answer)
        items = _items(reading, request)
        for place, item in enumerate(items):
            if place == MAX_RESOURCES - 1 and len(items) > MAX_RESOURCES:
                self.left_out["changes"] += len(items) - place
                yield self._row(exchange, api.name, None, f"and {len(items) - place} more", outcomes.top(), None)
                return
            outcome = outcomes.of(place, item)
            name, rest = _named(reading, item)
            if item.get("name") is None and "topicId" in item:  # the request names the topic by its id
                name = outcome.get("name") or topics.names.get(item["topicId"], name)
            detail = _rest(around if reading.items else {}) | _rest(rest)
            yield self._row(exchange, api.name, _kind(reading, item), name, outcome, detail)

    def _row(
        self,
        exchange: DecodedExchange,
        api: str,
        kind: str | None,
        name: str | None,
        outcome: Body,
        detail: Body | None,
    ) -> Change:
        code, message = _error(outcome)
        if detail is not None:
            reported = {key: value for key, value in outcome.items() if key not in (*_NOT_DETAIL, _CONFIGS)}
            added = {key: value for key, value in reported.items() if value != name and detail.get(key) != value}
            detail |= {"answer": _rest(added), "message": message}
            detail = _rest(detail)
            detail.pop(TABLE[exchange.api_key].kind, None)
        return Change(
            exchange.response_start if exchange.response is not None else exchange.request_end,
            self.cluster,
            api,
            kind or TABLE[exchange.api_key].kind,
            name,
            exchange.client_id,
            exchange.client_address,
            exchange.principal,
            error_name(code) if code else None,
            _written(detail) if detail else None,
            exchange.connection,
            exchange.number,
            exchange.response is not None,
        )


def opened(exchange: DecodedExchange) -> DecodedExchange | None:
    """Return the exchange inside an Envelope; None: it cannot be decoded, or the response lacks it."""
    try:
        header, request = codec.decode_request(exchange.request["requestData"])
        key, version = header["requestApiKey"], header["requestApiVersion"]
        response = None
        data = exchange.response["responseData"] if exchange.response is not None else None
        if data:
            response = codec.decode_response(data, key, version)[1]
        elif exchange.response is not None and not exchange.response["errorCode"]:
            return None
    except ProtocolError:
        return None
    return replace(
        exchange,
        api_key=key,
        api_version=version,
        request=request,
        response=response,
        client_id=header.get("clientId"),
        client_address=_address(exchange.request["clientHostAddress"]),
        principal=_principal(exchange.request["requestPrincipal"]),
    )


def _principal(data: bytes | None) -> str | None:
    """Return the principal in DefaultPrincipalData, in Kafka's notation: "User:alice"."""
    if not data:
        return None
    try:
        _, principal = codec.decode_data("DefaultPrincipalData", data)
    except ProtocolError:
        return None  # a custom principal builder's format
    return f"{principal['type']}:{principal['name']}"


def _address(data: bytes) -> str | None:
    if len(data) == 4:
        return ".".join(map(str, data))
    return (
        ":".join(f"{int.from_bytes(data[at : at + 2], 'big'):x}" for at in range(0, 16, 2)) if len(data) == 16 else None
    )


def _items(reading: Reading, request: Body) -> list[Body]:
    """Return the resources of a request: elements of its arrays, or the request itself."""
    if not reading.items:
        return [request]
    found: list[Body] = []
    arrays = [request.get(array) for array in reading.items]
    for array in arrays:
        for each in array or ():
            found.append(each if isinstance(each, dict) else {"name": each})
    if not found and any(array is None for array in arrays) and not any(arrays):
        return [{}]  # null means all resources, as in ElectLeaders
    return found


def _named(reading: Reading, item: Body) -> tuple[str | None, Body]:
    """Return the name of a resource, and its other fields."""
    for field in reading.name or ("name",):
        value = item.get(field)
        if value is not None and value != UUID(int=0):
            return _name(value), {key: each for key, each in item.items() if key != field}
    return None, item


def _name(value: Any) -> str:
    if isinstance(value, list):  # a quota's entity, in the notation of kafka-configs
        return ", ".join(f"{each['entityType']}={_or_default(each['entityName'])}" for each in value[:16])
    return uuid_text(value) if isinstance(value, UUID) else str(value)


def _or_default(name: str | None) -> str:
    return "<default>" if name is None else name


def _kind(reading: Reading, item: Body) -> str | None:
    if reading.types is None:
        return reading.kind
    code = item.get(reading.kind, 0)
    return reading.types.get(code, f"unknown_{code}")


class _Outcomes:
    """The outcomes in one response."""

    def __init__(self, reading: Reading, answer: Body | None) -> None:
        self._reading = reading
        self._answer = answer or {}
        outcomes = self._answer.get(reading.outcomes) if reading.outcomes else None
        self._in_order: list[Body] | None = outcomes if isinstance(outcomes, list) else None
        self._by_name: dict[tuple[Any, str], Body] = {}
        for outcome in self._in_order or ():
            kind = outcome.get(reading.kind) if reading.types else None
            for field in reading.repeats:
                value = outcome.get(field)
                if value is not None and value != UUID(int=0):
                    self._by_name.setdefault((kind, _name(value)), outcome)

    def top(self) -> Body:
        """Return the fields of the response that apply to all resources."""
        return {key: value for key, value in self._answer.items() if key in _NOT_DETAIL}

    def of(self, place: int, item: Body) -> Body:
        """Return the outcome of a resource, with the response's own error if that has one or the outcome is missing."""
        if not self._reading.outcomes:
            return self._answer
        found: Body | None = None
        if self._reading.repeats:
            name, _ = _named(self._reading, item)
            kind = item.get(self._reading.kind) if self._reading.types else None
            found = self._by_name.get((kind, name or ""))
        elif self._in_order is not None and place < len(self._in_order):
            found = self._in_order[place]
        return (found or {}) | (self.top() if self._answer.get("errorCode") or found is None else {})


def _error(outcome: Body) -> tuple[int, str | None]:
    """Return the first error in an outcome, from the top down, with its message."""
    code, message = outcome.get("errorCode", 0), outcome.get("errorMessage")
    if code:
        return code, message
    for value in outcome.values():
        for each in value if isinstance(value, list) else ():
            if isinstance(each, dict):
                code, inner = _error(each)
                if code:
                    return code, inner or message
    return 0, message


def _rest(body: Body) -> Body:
    """Return the fields without nulls, empty values, timeouts, tags, and error fields."""
    silent: tuple[Any, ...] = (None, [], "", {}, UUID(int=0))
    dull = ("timeoutMs", "_tags", "_trailing", *_NOT_DETAIL)
    return {key: value for key, value in body.items() if key not in dull and value not in silent}


def _written(detail: Body) -> str:
    """Return the detail as JSON, cut to MAX_DETAIL characters and an ellipsis."""
    budget = MAX_DETAIL
    parts: list[str] = []
    encoder = json.JSONEncoder(ensure_ascii=False, default=_plain)
    for piece in encoder.iterencode(_coded(detail)):
        parts.append(piece)
        budget -= len(piece)
        if budget < 0:
            return "".join(parts)[:MAX_DETAIL] + "…"
    return "".join(parts)


def _coded(value: Any) -> Any:
    """Return the value with names for codes, and long lists and texts cut to the size that a detail can hold."""
    if isinstance(value, dict):
        return {
            key: CODES[key].get(each, each) if key in CODES and isinstance(each, int) else _coded(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_coded(each) for each in value[: MAX_DETAIL // 2]]
    if isinstance(value, str) and len(value) > MAX_DETAIL:
        return value[:MAX_DETAIL]
    return value


def _plain(value: Any) -> str:
    return uuid_text(value) if isinstance(value, UUID) else f"{len(value)} bytes"


def _masked(value: Any) -> str:
    return MASKED
