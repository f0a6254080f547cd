"""Check that kproxy reads requests like a broker: Kafka's own classes read the same bytes.

A difference is a failure unless kproxy refuses the request. The expected names come from JSON written by Kafka, walked
by the paths of `NAMED` without kproxy's reader. Compared are the names that policy rules match; the first fields, which
decide the pairing of responses and the state of a login; and requests that kproxy replaces, which Kafka reads again.
"""

import base64
import json
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from kproxy.errors import Malformed
from kproxy.protocol import codec
from kproxy.protocol.apis import DESCRIBE_TOPIC_PARTITIONS, FETCH, METADATA
from kproxy.protocol.schema import schema
from kproxy.proxy.filters.policy.fetch_sessions import UNKNOWN_SESSION, without_session
from kproxy.proxy.filters.policy.lists import cursor_of, metadata_request, with_cursor
from kproxy.proxy.filters.policy.resources import (
    ALL_OF,
    ALSO,
    EMPTY_IS_ALL,
    KINDS,
    NAMED,
    NULL_IS_ALL,
    TOPIC,
    Names,
    can_be_from_broker,
    key_names,
    kinds_of,
    peek,
    reader,
    resource_kind,
)
from kproxy.wire.interest import PREFIX_FIELDS
from tests.broker.jvm import java
from tests.fuzz.mutations import KEYS, mutated

BATCH = 2000
Reading = dict[str, list[Any]]
Replaced = tuple[str, bytes, Any]  # (kind, frame, body that Kafka must read in it)


class Decoder:
    """A JVM with Decoder.java."""

    def __init__(self) -> None:
        source = str(Path(__file__).with_name("Decoder.java"))
        self._process = subprocess.Popen(
            java(source, options=("-Xmx512m",)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def read(self, frames: list[bytes]) -> list[Any]:
        """Return [client id, body] for each frame, or None if Kafka refuses it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        stdin = self._process.stdin

        def write() -> None:
            for frame in frames:
                stdin.write(len(frame).to_bytes(4) + frame)
            stdin.flush()

        writer = threading.Thread(target=write)
        writer.start()
        lines = [self._process.stdout.readline() for _ in frames]
        writer.join()
        assert all(lines), "the JVM has ended"
        return [None if line.startswith(b"!") else json.loads(line) for line in lines]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def official(api: str, key: int, version: int, body: Any) -> Reading:
    """Return the names in the request according to Kafka's reading."""
    found: Reading = {
        kind: [] for kind in (*KINDS, "topic_id", "all_of", "expression", "cluster", "from_broker", "also")
    }
    for path in ALSO.get(api, ("", ()))[1]:
        found["also"] += [value for value, _ in _at(body, path.split(".")) if value is not None]
    key_type = body.get("keyType", 0)
    if key_type == 2:  # coordinators of share groups
        found["from_broker"].append(True)
    for path, kind in NAMED.get(api, {}).items():
        if kind in ("key_type", "resource_type"):
            continue
        for value, owner in _at(body, path.removesuffix("[]").split(".")):
            for each in (value or []) if path.endswith("[]") else [value]:
                if each is None:
                    continue
                if kind == "topic_id":
                    topic_id = UUID(bytes=base64.urlsafe_b64decode(each + "=="))
                    if topic_id.int:
                        found["topic_id"].append(topic_id)
                elif kind == "key":
                    of, name = key_names(key_type, each)
                    found[of].append(name if of in KINDS else True)
                elif kind == "replica":
                    found["from_broker"] += [True] if each not in (-1, -2) else []
                elif kind == "of_cluster":
                    found["cluster"] += [True] if each else []
                elif kind == "resource":
                    of = resource_kind(owner["resourceType"])
                    found[of].append(each if of in KINDS else True)
                else:
                    found[kind].append(each)
    if api in ALL_OF:
        found["all_of"] = [ALL_OF[api]]
    for path in NULL_IS_ALL.get(api, ()):
        if any(value is None for value, _ in _at(body, path.split("."))):
            found["all_of"] = [TOPIC]
    if api in EMPTY_IS_ALL and version in EMPTY_IS_ALL[api] and not body["topics"]:
        found["all_of"] = [TOPIC]
    return _settled(found)


def _at(body: Any, path: list[str]) -> Iterator[tuple[Any, Any]]:
    """Yield (value, struct that contains it) at a path, through arrays; nothing if the version lacks it."""
    if isinstance(body, list):
        for each in body:
            yield from _at(each, path)
    elif isinstance(body, dict) and path[0] in body:
        if len(path) == 1:
            yield body[path[0]], body
        else:
            yield from _at(body[path[0]], path[1:])


def ours(names: Names) -> Reading:
    found: Reading = {kind: list(getattr(names, kind)) for kind in (*KINDS, "topic_id")}
    found["all_of"] = [names.all_of] if names.all_of else []
    found["expression"] = [names.expression] if names.expression else []
    found["cluster"] = [True] if names.cluster else []
    found["from_broker"] = [True] if names.from_broker else []
    found["also"] = list(names.also)
    return _settled(found)


def _settled(found: Reading) -> Reading:
    """Remove differences without meaning: order, repetitions, empty expressions."""
    found["expression"] = [True] if any(found["expression"]) else []
    return {kind: sorted(set(map(str, values))) for kind, values in found.items()}


def compare(count: int, seed: int, progress: Callable[[int, Counter[str]], None] | None = None) -> Counter[str]:
    """Return counts of outcomes, APIs and mutations; raise AssertionError at the first difference."""
    dice = random.Random(seed)
    decoder = Decoder()
    seen: Counter[str] = Counter()
    try:
        while seen["requests"] < count:
            batch = [
                mutated(dice, KEYS[(seen["requests"] + at) % len(KEYS)])
                for at in range(min(BATCH, count - seen["requests"]))
            ]
            replaced: list[Replaced] = []
            for (frame, kinds), read in zip(batch, decoder.read([frame for frame, _ in batch]), strict=True):
                replaced += _compare(frame, kinds, read, seen, seed)
            for (what, frame, expected), read in zip(
                replaced, decoder.read([frame for _, frame, _ in replaced]), strict=True
            ):
                seen[f"replaced, {what}"] += 1
                assert read is not None and read[1] == expected, (
                    f"{what}, seed {seed}: {read}, {expected}: {frame.hex()}"
                )
            if progress is not None:
                progress(seen["requests"], seen)
    finally:
        decoder.close()
    return seen


def _compare(frame: bytes, kinds: tuple[str, ...], official_read: Any, seen: Counter[str], seed: int) -> list[Replaced]:
    seen["requests"] += 1
    key, version = int.from_bytes(frame[:2]), int.from_bytes(frame[2:4], signed=True)
    api = schema().apis[key]
    if version not in api.request.versions:  # a policy closes the connection, see `Policy.unknown`
        seen["version unknown to kproxy"] += 1
        for kind in kinds:
            seen[f"refused, {kind}"] += 1
        return []
    client_id, body = official_read or (None, None)
    title = f"{api.name} v{version}, {'+'.join(kinds) or 'valid'}, seed {seed}"
    whole = memoryview(len(frame).to_bytes(4) + frame)
    if body is not None:
        _compare_prefix(title, key, version, whole, client_id, body, seen)
        _compare_peek(title, key, version, whole, body, seen)
    try:
        read = reader(key, version)(whole, 12, len(whole))
    except Malformed:
        seen["refused by both" if body is None else "refused by kproxy alone"] += 1
        for kind in kinds:
            seen[f"refused, {kind}"] += 1
        assert kinds or body is None, f"{title} is valid and refused: {frame.hex()}"
        return []
    if body is None:
        seen["refused by Kafka alone"] += 1
        return []
    seen["read by both"] += 1
    seen[f"api {api.name}"] += 1
    for kind in kinds:
        seen[f"read, {kind}"] += 1
    expected, mine = official(api.name, key, version, body), ours(read)
    missing = {kind: values for kind, values in expected.items() if values != mine[kind]}
    assert not missing, (
        f"{title}: Kafka reads {missing}, kproxy { {kind: mine[kind] for kind in missing} }: {frame.hex()}"
    )
    assert kinds_of(key, version) or not any(expected[kind] for kind in KINDS)
    try:
        return list(_replaced(key, version, whole, body, read))
    except Malformed:
        seen["refused when it was to be replaced"] += 1
        return []


def _compare_prefix(
    title: str, key: int, version: int, whole: memoryview, client_id: str, body: Any, seen: Counter[str]
) -> None:
    """Compare the first fields (acks, mechanism, …); kproxy closes the connection if it cannot read them."""
    try:
        prefix = codec.request_prefix(key, version, PREFIX_FIELDS)(whole, 12, len(whole))
    except Malformed:
        prefix = None
    if prefix is None:
        seen["first fields refused"] += 1
        return
    seen["first fields read by both"] += 1
    values = dict(zip(("clientId", *PREFIX_FIELDS), prefix[0], strict=True))
    for name, theirs in (body | {"clientId": client_id}).items():
        if name in values and "\ufffd" not in str(values[name]):  # invalid UTF-8 is shown differently
            same = (values[name] or "") == (theirs or "")
            assert same, f"{title}: {name} is {theirs!r} for Kafka, {values[name]!r} for kproxy: {whole[4:].hex()}"


def _compare_peek(title: str, key: int, version: int, whole: memoryview, body: Any, seen: Counter[str]) -> None:
    """Compare whether a request counts as sent by a broker; checked for APIs that otherwise pass unread."""
    if not can_be_from_broker(key, version):
        return
    expected = official(schema().apis[key].name, key, version, body)["from_broker"]
    try:
        found = peek(key, version)(whole, 12, len(whole))
    except Malformed:
        return
    seen[f"peeked, {found}"] += 1
    assert found == bool(expected), f"{title}: {found} at a glance, for Kafka {expected}: {whole[4:].hex()}"


def _replaced(key: int, version: int, whole: memoryview, body: Any, names: Names) -> Iterator[Replaced]:
    """Yield the requests that kproxy would send instead, with the body that Kafka must read."""
    if key == FETCH:
        patched = codec.at_once(without_session(version, whole))
        if isinstance(patched, bytes) and patched != UNKNOWN_SESSION:
            yield "Fetch", patched[4:], body | {"sessionId": 0, "sessionEpoch": -1}
    elif key == METADATA and (names.topic or names.topic_id):

        def keep(found: list[str | UUID]) -> bool:
            return (
                not found
                or sum(map(ord, str(next((each for each in found if isinstance(each, str)), found[0])))) % 2 == 0
            )

        def name_of(topic: Any) -> list[str | UUID]:
            topic_id = UUID(bytes=base64.urlsafe_b64decode(topic.get("topicId", "A" * 22) + "=="))
            return [each for each in (topic["name"], topic_id) if each is not None and getattr(each, "int", 1)]

        patched = codec.at_once(metadata_request(version, whole, keep, clear_auto_creation=True))
        expected = body | {"topics": [topic for topic in body["topics"] if keep(name_of(topic))]}
        if "allowAutoTopicCreation" in body:
            expected["allowAutoTopicCreation"] = False
        yield "Metadata", bytes(whole if patched is None else patched)[4:], expected
    elif (
        key == DESCRIBE_TOPIC_PARTITIONS and (cursor := codec.at_once(cursor_of(version, "request", whole))) is not None
    ):
        patched = codec.at_once(with_cursor(whole, cursor[1], cursor[2], "another-topic"))
        yield "cursor", patched[4:], body | {"cursor": body["cursor"] | {"topicName": "another-topic"}}
