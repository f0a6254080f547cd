"""Removes versions from ApiVersions answers that kproxy cannot read, or that the policy never allows the client."""

from collections.abc import Callable, Mapping

from kproxy.protocol.apis import API_VERSIONS
from kproxy.proxy.filters.chain import Filter
from kproxy.proxy.filters.rewrite import cap_versions
from kproxy.wire.events import Exchange

Refused = Callable[[str | None], Mapping[int, frozenset[int]]]  # client id -> versions to leave out, by API key


def _none(client_id: str | None) -> Mapping[int, frozenset[int]]:
    return {}


class Versions(Filter):
    """caps: the highest version to offer, by API key, in addition to those of APIs with addresses in answers."""

    __slots__ = ("_caps", "_refused")

    def __init__(self, caps: Mapping[int, int], refused: Refused = _none) -> None:
        self._caps = caps
        self._refused = refused

    def answer(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        plan = exchange.plan
        if plan.api_key != API_VERSIONS:
            return None
        return cap_versions(plan.api_version, frame, self._caps, self._refused(exchange.client_id))
