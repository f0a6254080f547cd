"""Reading message bodies: at the level of detail that the caller asks for, in one piece or as their bytes stream.

Five modules, each importing only those before it: `found` has the result and the levels of detail, `logs` decides which
batches of coordinators' logs are copied, `fields` selects the fields to read for each API and version, `plans`
generates the Python code that reads them, and `walker` runs that code over a body that arrives in pieces. Knows no
frames and no pairing, and nothing below a record batch's header except the layout of coordinators' records.
"""

from kproxy.wire.bodies.fields import RACK_ID, REPLICA_ID, Wanted, head_array, names_brokers, names_topics
from kproxy.wire.bodies.found import (
    BATCHES,
    BLANK,
    CHECKED,
    DETAILS,
    ERRORS,
    MAX_ERRORS,
    NONE,
    RECORDS,
    SUMS,
    TOPICS,
    Batch,
    Copy,
    Found,
    Partition,
    Room,
    Sums,
)
from kproxy.wire.bodies.logs import LOGS, Logs
from kproxy.wire.bodies.plans import MAX_TEXT, body_reader
from kproxy.wire.bodies.walker import UNKNOWN_TAG, BodyWalker, Edit, empty_rest

__all__ = [
    "BATCHES",
    "BLANK",
    "CHECKED",
    "DETAILS",
    "ERRORS",
    "LOGS",
    "MAX_ERRORS",
    "MAX_TEXT",
    "NONE",
    "RACK_ID",
    "RECORDS",
    "REPLICA_ID",
    "SUMS",
    "TOPICS",
    "UNKNOWN_TAG",
    "Batch",
    "BodyWalker",
    "Copy",
    "Edit",
    "Found",
    "Logs",
    "Partition",
    "Room",
    "Sums",
    "Wanted",
    "body_reader",
    "empty_rest",
    "head_array",
    "names_brokers",
    "names_topics",
]
