"""Caps the versions that brokers offer, so that clients use none that kproxy cannot read."""

from collections.abc import Mapping

from kproxy.protocol.apis import API_VERSIONS
from kproxy.proxy.filters.chain import Filter
from kproxy.proxy.filters.rewrite import cap_versions
from kproxy.wire.events import Exchange


class Versions(Filter):
    """caps: the highest version to offer, by API key, in addition to those of APIs with addresses in answers."""

    __slots__ = ("_caps",)

    def __init__(self, caps: Mapping[int, int]) -> None:
        self._caps = caps

    def answer(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        plan = exchange.plan
        return cap_versions(plan.api_version, frame, self._caps) if plan.api_key == API_VERSIONS else None
