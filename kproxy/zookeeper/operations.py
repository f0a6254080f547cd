"""ZooKeeper's operations: the records of each request and answer; transactions; removal of secrets.

The pairs are those of `org.apache.zookeeper.server.FinalRequestProcessor`; numbers and records are from the jars.
Passwords, tokens and credentials are removed from the values. Raises Malformed. Refuses to know frames.
"""

from typing import Any

from kproxy.errors import Malformed
from kproxy.zookeeper.records import Values, layouts, names_of, read, read_first

NOTIFICATION, PING, AUTH, SET_WATCHES = -1, -2, -4, -8  # reserved xids (ClientCnxn)

# operation -> (request, answer); "": no body.
_RECORDS = {
    "addWatch": ("AddWatchRequest", "ErrorResponse"),
    "auth": ("AuthPacket", ""),
    "check": ("CheckVersionRequest", ""),
    "checkWatches": ("CheckWatchesRequest", ""),
    "closeSession": ("", ""),
    "create": ("CreateRequest", "CreateResponse"),
    "create2": ("CreateRequest", "Create2Response"),
    "createContainer": ("CreateRequest", "Create2Response"),
    "createTTL": ("CreateTTLRequest", "Create2Response"),
    "delete": ("DeleteRequest", ""),
    "deleteContainer": ("DeleteRequest", ""),
    "exists": ("ExistsRequest", "ExistsResponse"),
    "getACL": ("GetACLRequest", "GetACLResponse"),
    "getAllChildrenNumber": ("GetAllChildrenNumberRequest", "GetAllChildrenNumberResponse"),
    "getChildren": ("GetChildrenRequest", "GetChildrenResponse"),
    "getChildren2": ("GetChildren2Request", "GetChildren2Response"),
    "getData": ("GetDataRequest", "GetDataResponse"),
    "getEphemerals": ("GetEphemeralsRequest", "GetEphemeralsResponse"),
    "ping": ("", ""),
    "reconfig": ("ReconfigRequest", "GetDataResponse"),
    "removeWatches": ("RemoveWatchesRequest", ""),
    "sasl": ("GetSASLRequest", "SetSASLResponse"),
    "setACL": ("SetACLRequest", "SetACLResponse"),
    "setData": ("SetDataRequest", "SetDataResponse"),
    "setWatches": ("SetWatches", ""),
    "setWatches2": ("SetWatches2", ""),
    "sync": ("SyncRequest", "SyncResponse"),
    "whoAmI": ("", "WhoAmIResponse"),
}
_MULTI = ("multi", "multiRead")
_PARTS = frozenset(
    ("check", "create", "create2", "createContainer", "createTTL", "delete", "getChildren", "getData", "setData")
)
# Operations of clients: the others are between servers.
REQUESTS = frozenset(layouts()["operations"][name] for name in (*_RECORDS, *_MULTI))
_SECRETS = frozenset(("passwd", "auth", "token"))


def request(name: str, buffer: memoryview, pos: int, *, whole: bool = True) -> tuple[Values, int]:
    """Return a request's body by field names, and its end; {"operations": [...]} for a transaction.

    whole: False if the body is large or incomplete: then only its first fields, as far as they can be read.
    """
    return _body(_RECORDS.get(name, ("", ""))[0], name, 0, buffer, pos, whole)


def answer(name: str, buffer: memoryview, pos: int, *, whole: bool = True) -> tuple[Values, int]:
    """Return the body of an answer without an error, like `request`; each answer of a transaction has its `err`."""
    return _body(_RECORDS.get(name, ("", ""))[1], name, 1, buffer, pos, whole)


def _body(record: str, name: str, side: int, buffer: memoryview, pos: int, whole: bool) -> tuple[Values, int]:
    if not whole:
        return _public(read_first(record, buffer, pos) if record else {}), pos
    return _several(buffer, pos, side) if name in _MULTI else _read(record, buffer, pos)


def _read(record: str, buffer: memoryview, pos: int) -> tuple[Values, int]:
    if not record:
        return {}, pos
    values, pos = read(record, buffer, pos)
    return _public(values), pos


def _public(values: Values) -> Values:
    """Return the values without secrets."""
    for entry in values.get("acl") or ():
        user, colon, _ = (entry["id"]["id"] or "").partition(":")
        if colon and entry["id"]["scheme"] == "digest":  # followed by a hash of the password
            entry["id"]["id"] = user
    return {name: value for name, value in values.items() if name not in _SECRETS}


def _several(buffer: memoryview, pos: int, side: int) -> tuple[Values, int]:
    """Return the parts of a transaction: each has a header before it, and a last header marks the end."""
    parts: list[Values] = []
    names: dict[int, str] = names_of("operations")
    while True:
        header, pos = read("MultiHeader", buffer, pos)
        if header["done"]:
            return {"operations": parts}, pos
        name = names.get(header["type"], "")
        if name == "error":
            record = "ErrorResponse"
        elif name in _PARTS:
            record = _RECORDS[name][side]
        else:
            raise Malformed(f"a transaction with an operation {header['type']}")
        values, pos = _read(record, buffer, pos)
        parts.append(
            {"op": name, "err": values.get("err", header["err"]), **values} if side else {"op": name, **values}
        )


def is_ephemeral(values: Values) -> bool | None:
    """Whether a create makes a node that is removed with its session; None if it is no create."""
    flags: Any = values.get("flags")
    return None if flags is None else flags in _EPHEMERAL


_EPHEMERAL = {number for name, number in layouts()["create_modes"].items() if name.startswith("EPHEMERAL")}
