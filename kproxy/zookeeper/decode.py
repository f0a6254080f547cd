"""Single frames of ZooKeeper's protocol as values: requests identify their operation, answers do not.

Passwords, tokens and credentials are in no value. Raises Malformed. Refuses to know connections.
"""

from kproxy.errors import Malformed
from kproxy.zookeeper import operations
from kproxy.zookeeper.records import Values, layouts, names_of, read
from kproxy.zookeeper.session import CLIENT, MAX_FRAME, Fault, Operation, Session


def sized(data: bytes, *, has_sizes: bool | None = None) -> bytes:
    """Return frames with their 4-byte sizes; has_sizes None: detected, if sizes lead exactly to the end."""
    if has_sizes is None:
        pos = 0
        while pos < len(data):
            pos += 4 + int.from_bytes(data[pos : pos + 4])
        has_sizes = pos == len(data)
    return data if has_sizes else len(data).to_bytes(4) + data


def requests(data: bytes) -> list[Operation]:
    """Return the requests in a client's bytes, which include sizes; the first may begin a connection."""
    session = Session(resync=False)
    session.receive(CLIENT, data, 0)
    held = session.held(CLIENT)
    session.close()
    for event in session.events:
        if isinstance(event, Fault):
            raise Malformed(f"no ZooKeeper request: {event.text}, at byte {event.offset}")
    if session.command:
        raise Malformed(f"{session.command!r} is a command of four letters, which has no frame")
    if held:
        raise Malformed(f"{held} bytes at the end are no whole frame")
    return [event for event in session.events if isinstance(event, Operation)]


def answer(data: bytes, to: str) -> Values:
    """Return an answer, given with its size, to an operation by ZooKeeper's name of it, or a notification.

    Its values are `xid`, `zxid` and `err`, then those of the body.
    """
    if to not in layouts()["operations"] and to not in ("connect", "notification"):
        raise Malformed(f"no operation of ZooKeeper is called {to!r}: create, getData, multi, ...")
    size = int.from_bytes(data[:4])
    if not 0 <= size <= min(MAX_FRAME, len(data) - 4):
        raise Malformed(f"a frame of {size} bytes, and {max(0, len(data) - 4)} are there")
    frame = memoryview(data)[4 : 4 + size]
    if to == "connect":
        if size == 36:  # before 3.4: without the last field
            frame = memoryview(bytes(frame) + b"\0")
        values, _ = read("ConnectResponse", frame, 0)
        return {name: value for name, value in values.items() if name != "passwd"}
    header, pos = read("ReplyHeader", frame, 0)
    if to == "notification":
        body, _ = read("WatcherEvent", frame, pos)
        kinds = {"type": names_of("event_types"), "state": names_of("event_states")}
        return header | {name: kinds.get(name, {}).get(value, value) for name, value in body.items()}
    body = {} if header["err"] else operations.answer(to, frame, pos)[0]
    return header | body
