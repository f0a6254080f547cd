"""Operations: transactions with all their parts, in both directions; no secret is read."""

import pytest

from kproxy.errors import Malformed
from kproxy.zookeeper.operations import answer, is_ephemeral, request
from kproxy.zookeeper.records import layouts, write

OPERATIONS = layouts()["operations"]
ANYONE = [{"perms": 31, "id": {"scheme": "world", "id": "anyone"}}]
DIGEST = {"scheme": "digest", "id": "alice:secret"}


def header(op, *, done=False, err=-1):
    return write("MultiHeader", {"type": OPERATIONS[op] if op else -1, "done": done, "err": err})


def test_a_transaction_has_all_its_parts():
    create = {"path": "/a", "data": b"x", "acl": ANYONE, "flags": 1}
    check = {"path": "/b", "version": 3}
    asked = header("create") + write("CreateRequest", create) + header("check") + write("CheckVersionRequest", check)
    asked += header("", done=True)
    parts = {"operations": [{"op": "create", **create}, {"op": "check", **check}]}
    assert request("multi", memoryview(asked), 0) == (parts, len(asked))
    done = header("create", err=0) + write("CreateResponse", {"path": "/a"}) + header("check", err=0)
    done += header("", done=True)
    parts = {"operations": [{"op": "create", "err": 0, "path": "/a"}, {"op": "check", "err": 0}]}
    assert answer("multi", memoryview(done), 0) == (parts, len(done))
    refused = header("error", err=0) + write("ErrorResponse", {"err": 0}) + header("error", err=-103)
    refused += write("ErrorResponse", {"err": -103}) + header("", done=True)
    parts = {"operations": [{"op": "error", "err": 0}, {"op": "error", "err": -103}]}
    assert answer("multi", memoryview(refused), 0) == (parts, len(refused))
    assert is_ephemeral(create)
    assert is_ephemeral(check) is None


def test_operations_that_cannot_be_in_a_transaction_are_malformed():
    with pytest.raises(Malformed, match="operation 101"):
        request("multi", memoryview(header("setWatches")), 0)


@pytest.mark.parametrize(
    "op,record,values",
    [
        ("auth", "AuthPacket", {"type": 0, "scheme": "digest", "auth": b"user:secret"}),
        ("sasl", "GetSASLRequest", {"token": b"secret"}),
        ("setACL", "SetACLRequest", {"path": "/", "acl": [{"perms": 1, "id": DIGEST}], "version": 0}),
    ],
)
def test_secrets_are_not_read(op, record, values):
    read, _ = request(op, memoryview(write(record, values)), 0)
    assert "secret" not in repr(read)
