"""Which fields of a body are read, for each API, version, side and level of detail; decided from the schema.

Duty: map the paths of the schema to the attributes of `found.Partition` and to the statements that record a value in a
`found.Found`. Kafka's field names differ from API to API; the tables at the top of this module unify them. Bounded by
the schema: one cached result per API and version that it has. Knows no bytes and generates only single statements,
which `plans` places.
"""

from collections.abc import Iterator
from functools import cache

from kproxy.protocol.apis import PRODUCE
from kproxy.protocol.codec import api_message, is_noted, paths_of
from kproxy.protocol.plans import join
from kproxy.protocol.schema import Field, address_path
from kproxy.wire.bodies.found import SUMS, TOPICS, Partition

# Offsets are in Fetch, ListOffsets, OffsetCommit, OffsetFetch and TxnOffsetCommit, and in Produce responses. A
# request of a fetch session (KIP-227) lists the added, the changed and the removed partitions.
_WITH_OFFSETS = frozenset((1, 2, 8, 9, 28))
_SESSION_EPOCH = "sessionEpoch"
_FORGOTTEN = "forgottenTopicsData"

# The id of the broker that sends a Fetch or a ListOffsets; Fetch v15 and later have it in a tagged field (KIP-903).
REPLICA_ID = "replicaId"
RACK_ID = "rackId"
_REPLICA_IDS = (REPLICA_ID, f"replicaState.{REPLICA_ID}")

# A topic-partition is an element of an array of structs with one of these fields; the topic is in a struct around it.
_INDEXES = {"partition", "partitionIndex", "index"}
_NAMES = ("name", "topicName")  # fields with a topic's name, next to its topicId
_AROUND = {"topic": "topic", "name": "topic", "topicId": "topic_id", "groupId": "group_id"}
_OF_PARTITION = dict.fromkeys(_INDEXES, "partition") | {
    "baseOffset": "offset",
    "committedLeaderEpoch": "leader_epoch",
    "committedMetadata": "metadata",
    "committedOffset": "offset",
    "currentLeaderEpoch": "leader_epoch",
    "errorCode": "error_code",
    "fetchOffset": "offset",
    "highWatermark": "high_watermark",
    "lastStableOffset": "last_stable_offset",
    "leaderEpoch": "leader_epoch",
    "logStartOffset": "log_start_offset",
    "metadata": "metadata",
    "offset": "offset",
}
# The variables that identify the topic-partition of a Sums.
_SUMMED_BY = frozenset(("topic", "topic_id", "of_partition"))

# Statements that record fields of requests, and deletions in responses, by API key.
_LATEST = -1  # the timestamp in a ListOffsets that requests the end of a log
_ASKED = {
    1: {RACK_ID: "found.has_rack = bool({})"},
    2: {
        "isolationLevel": "found.isolation_level = {}",
        "topics.partitions.timestamp": f"if {{}} == {_LATEST}: found.note_latest(topic, of_partition)",
    },
    26: {"committed": "found.is_commit = {}"},
}
_DELETED = {
    20: {"responses.name": "topic = {}", "responses.errorCode": "if not {}: found.note_deleted(topic or topic_id, -1)"},
    42: {"results.groupId": "topic = {}", "results.errorCode": "if not {}: found.note_deleted(topic, -1)"},
    47: {
        "topics.name": "topic = {}",
        "topics.partitions.partitionIndex": "of_partition = {}",
        "topics.partitions.errorCode": "if not {}: found.note_deleted(topic, of_partition)",
    },
}

# The attributes of Partition that are computed from its record batches.
_SUMMED = ("bytes", "batches", "records", "codecs", "magic", "first_offset", "last_offset", "max_timestamp")


class Wanted:
    """The fields to read in the bodies of one API, version and side, by path; see `codec.paths_of`.

    Elements of an array have its path with "[]" appended.
    """

    def __init__(self, api_key: int, version: int, side: str, detail: int) -> None:
        if detail == SUMS and (api_key in _WITH_OFFSETS or (api_key == PRODUCE and side == "response")):
            detail = TOPICS
        self.detail = detail
        self.message = api_message(api_key, version, side)
        fields = self.message.fields
        self.noted = [path for path in paths_of(fields, version) if side == "response" and is_noted(path)]
        named = dict(_named_topics(fields, version)) if detail and side == "response" else {}
        # Values recorded for the body as a whole: path -> the statement that records the value, with {} for it.
        self.statements = _brokers(api_key, version) if side == "response" and detail != SUMS else {}
        if detail and side == "response":
            self.statements |= _deletions(api_key, fields, version)
        # Responses that name topics or brokers are read for these names alone: the partitions of a Metadata response
        # carry no data, and there are many of them.
        arrays = set(_partition_arrays(fields, version)) if detail and not named and not self.statements else set()
        self.attributes = dict(_attributes(fields, version, arrays))  # path -> the variable that takes the value
        if detail == SUMS:
            self.attributes = {path: var for path, var in self.attributes.items() if var in _SUMMED_BY}
        self.topics = dict.fromkeys(named.values(), "topic") | {join(array, "topicId"): "topic_id" for array in named}
        if detail and side == "request":
            present = set(paths_of(fields, version))
            self.statements |= _session(fields, version)
            self.statements |= {path: "found.replica_id = {}" for path in _REPLICA_IDS if path in present}
            self.statements |= {path: line for path, line in _ASKED.get(api_key, {}).items() if path in present}
        self.partitions = {f"{array}[]" for array in arrays}  # elements that become a Partition
        self.named = {f"{array}[]" for array in named}  # elements with both the name and the id of a topic
        # The attributes of Partition that this layout can fill; the others keep their value in BLANK.
        carries = any(path.endswith(".records") for path in paths_of(fields, version))
        self.known = {var.removeprefix("of_") for var in self.attributes.values()} & {*Partition._fields[3:]}
        self.known |= set(_SUMMED if carries else ())

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths that are read, except `records` fields."""
        return (*self.noted, *self.attributes, *self.topics, *self.statements)


@cache
def names_topics(api_key: int, version: int) -> bool:
    """Return whether responses of this version contain both names and ids of topics."""
    return any(_named_topics(api_message(api_key, version, "response").fields, version))


@cache
def names_brokers(api_key: int, version: int) -> bool:
    """Return whether responses of this version list brokers with their ids and addresses.

    False for NodeEndpoints (KIP-951), which repeats only brokers of an earlier Metadata response.
    """
    return bool(_brokers(api_key, version))


@cache
def head_array(api_key: int, version: int) -> str | None:
    """Return the top-level array of a response that lists brokers, if arrays of structs follow it; None otherwise.

    Metadata has such responses: topics follow brokers. The head is the bytes up to the end of this array. It contains
    all addresses of the response, and may be a small part of it.
    """
    path = address_path(api_key, version)
    fields = api_message(api_key, version, "response").fields_of(version)
    plain = [field for field in fields if version not in field.tagged_versions]
    names = [field.name for field in plain]
    if path not in names:
        return None
    return path if any(field.is_array and field.is_struct for field in plain[names.index(path) + 1 :]) else None


def _brokers(api_key: int, version: int) -> dict[str, str]:
    """Return the statements that record the brokers of a response, by path."""
    array = address_path(api_key, version)
    if array is None or array == "nodeEndpoints":
        return {}
    kept = {"nodeId": "node = {}", "brokerId": "node = {}", "host": "host = {}"}
    kept["port"] = "found.note_broker(node, host, {})"
    present = set(paths_of(api_message(api_key, version, "response").fields, version))
    found = {path: line for name, line in kept.items() if (path := join(array, name)) in present}
    return found | ({"clusterId": "found.cluster_id = {}"} if "clusterId" in present else {})


def _deletions(api_key: int, fields: tuple[Field, ...], version: int) -> dict[str, str]:
    """Return the statements that record the deletions that a response reports, by path."""
    present = set(paths_of(fields, version))
    return {path: line for path, line in _DELETED.get(api_key, {}).items() if path in present}


def _arrays(fields: tuple[Field, ...], above: str, version: int) -> Iterator[tuple[str, set[str]]]:
    """Yield arrays, each with the names of its elements' fields in this version: no names if it lacks the array.

    A struct has all versions of its fields.
    """
    for field in fields:
        path = join(above, field.name)
        if field.is_array:
            yield path, {member.name for member in field.fields if version in member.versions}
        yield from _arrays(field.fields, path, version)


def _named_topics(fields: tuple[Field, ...], version: int) -> Iterator[tuple[str, str]]:
    """Yield arrays whose elements have both an id and a name of a topic, each with the path of the name."""
    for path, members in _arrays(fields, "", version):
        for name in _NAMES:
            if {name, "topicId"} <= members:
                yield path, join(path, name)


def _session(fields: tuple[Field, ...], version: int) -> dict[str, str]:
    """Return the statements that record the partitions that a Fetch removes from its session, by path."""
    if not any(field.name == _SESSION_EPOCH and version in field.versions for field in fields):
        return {}
    kept = {
        _SESSION_EPOCH: "if {} > 0: found.forgotten = []",
        join(_FORGOTTEN, "topic"): "topic = {}",
        join(_FORGOTTEN, "topicId"): "topic_id = {}",
        join(_FORGOTTEN, "partitions[]"): "found.note_forgotten(topic or topic_id, {})",
    }
    present = {*paths_of(fields, version), join(_FORGOTTEN, "partitions[]")}
    return {path: line for path, line in kept.items() if path in present}


def _partition_arrays(fields: tuple[Field, ...], version: int) -> Iterator[str]:
    """Yield arrays whose elements are topic-partitions."""
    return (path for path, members in _arrays(fields, "", version) if members & _INDEXES)


def _attributes(fields: tuple[Field, ...], version: int, arrays: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the paths that fill attributes of a Partition, each with the variable that takes the value."""
    around = {array.rsplit(".", count)[0] for array in arrays for count in range(1, array.count(".") + 1)}
    if arrays:
        around.add("")
    for path in paths_of(fields, version):
        above, _, name = path.rpartition(".")
        if above in arrays and name in _OF_PARTITION:
            yield path, f"of_{_OF_PARTITION[name]}"
        elif above in around and name in _AROUND:
            yield path, _AROUND[name]
