"""Sessions whose requests a policy decides, with its counters."""

import random
from collections import Counter
from typing import Any
from uuid import UUID

from kproxy.protocol import codec
from kproxy.protocol.schema import Field
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.filters.policy.auditing import Peer
from kproxy.proxy.filters.policy.authorizer import PolicyAuthorizer
from kproxy.proxy.filters.policy.policy import Policy
from kproxy.proxy.filters.policy.topic_names import TopicNames
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import Interest
from tests.protocol.messages import Layout
from tests.wire.playbook import Dialogue

ALICE = "User:alice"


def cluster(*rules: dict[str, Any], **settings: Any) -> Cluster:
    return Cluster(listen="127.0.0.1:9092", bootstrap="kafka-1:9092", policy=rules, **settings)


class Lines:
    """An audit log that keeps its lines in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


class Decided(Dialogue):
    """A dialogue through a policy. `refusals`: number of refused requests by API and reason."""

    def __init__(
        self,
        *rules: dict[str, Any],
        principal: str = ALICE,
        address: str = "10.1.2.3",
        names: TopicNames | None = None,
        audits: bool = False,
        rewrite: bool = False,
        **settings: Any,
    ) -> None:
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.audit = Lines()
        self.policy = Policy(cluster(*rules, **settings), audits=audits)
        interest = Interest(rewrite=rewrite, authorizes=self.policy.authorizes, names=self.policy.needs_names)
        self.names = names or TopicNames()
        self.authorizer = PolicyAuthorizer(
            self.policy,
            Peer("default", f"{address}:5000", address, principal),
            interest,
            self.names,
            lambda api, reason: self.refusals.update([(api, reason)]),
            self.audit if audits else None,  # type: ignore[arg-type]
        )
        super().__init__(interest, authorizer=self.authorizer)

    def _take(self) -> None:
        self.authorizer.events(self.session.events)
        super()._take()

    def answers(self) -> list[bytes]:
        """The frames that the client received, without their sizes."""
        return cut(self.sent[CLIENT])

    def requests(self) -> list[bytes]:
        """The frames that the broker received, without their sizes."""
        return cut(self.sent[BROKER])

    def answer(self, key: int, version: int) -> dict[str, Any]:
        """The body of the only response so far."""
        (frame,) = self.answers()
        return codec.decode_response(frame, key, version)[1]


def cut(data: bytes) -> list[bytes]:
    frames = []
    while data:
        size = int.from_bytes(data[:4], "big")
        frames.append(data[4 : 4 + size])
        data = data[4 + size :]
    return frames


# Few names, so that the same ones occur in several requests and rules.
TEXTS = ("a", "b", "orders", "orders-1", "secret-1", "app", "app-1", "x:y:0")
IDS = tuple(UUID(int=number) for number in range(5))
_NUMBERS = {"int8": (0, 1, 2, 4), "int16": (0, 1, 7), "int32": (0, 1, 99), "int64": (0, 1, 1 << 40)}


def random_body(layout: Layout, rng: random.Random) -> dict[str, Any]:
    """A message of that layout with random contents; much quicker than `messages.bodies`."""
    return _random_struct(layout.message.fields, layout.version, rng)


def _random_struct(fields: tuple[Field, ...], version: int, rng: random.Random) -> dict[str, Any]:
    return {
        field.name: _random_value(field, version, rng)
        for field in fields
        if version in field.versions and (version not in field.tagged_versions or rng.random() < 0.2)
    }


def _random_value(field: Field, version: int, rng: random.Random) -> Any:
    if version in field.nullable_versions and rng.random() < 0.25:
        return None

    def one() -> Any:
        kind = field.element_type
        if field.is_struct:
            return _random_struct(field.fields, version, rng)
        if field.name == "replicaId":
            return rng.choice((-1, -1, -1, -2, 0, 99, -3))
        if kind == "string":
            return rng.choice(TEXTS)
        if kind == "uuid":
            return rng.choice(IDS)
        if kind in ("bytes", "records"):
            return rng.randbytes(rng.randrange(9))
        if kind == "bool":
            return rng.random() < 0.5
        return 0.5 if kind == "float64" else rng.choice(_NUMBERS.get(kind, (0, 1)))

    return [one() for _ in range(rng.choice((0, 1, 1, 2)))] if field.is_array else one()
