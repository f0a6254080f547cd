"""Compares brokers' ApiVersions with the versions that kproxy reads and rewrites, and with Kafka's releases.

Pure: ranges of versions in, ranges and names out. Refuses to know sockets and how the result is shown.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from kproxy.protocol.apis import API_VERSIONS
from kproxy.protocol.schema import ADDRESS_CARRIERS, address_path, api_name, schema, served_versions
from kproxy.proxy.filters.rewrite import version_caps

Offers = Mapping[int, tuple[int, int]]  # API key -> (lowest, highest) version
Treatment = Literal["rewritten", "passed", "capped", "hidden", "unread"]


class Compared(NamedTuple):
    """One API of a cluster. Treatment:

    rewritten: its responses contain brokers' addresses, which become kproxy's; passed: unchanged; capped: clients are
    offered lower versions than brokers have, since kproxy must read them; hidden: clients are not offered it; unread:
    kproxy does not know it, passes it and counts it by its number.
    """

    key: int
    name: str
    brokers: tuple[int, int]
    kproxy: tuple[int, int] | None  # versions that it reads; None: none
    offered: tuple[int, int] | None  # versions that clients are offered; None: hidden
    treatment: Treatment


def title(key: int) -> str:
    """Return Kafka's name of an API, or unknown_<key>."""
    return api_name(key)


def compare(offers: Offers) -> list[Compared]:
    """Return kproxy's treatment of each API that brokers offer, by key."""
    caps = version_caps(offers)
    found = []
    for key, (lowest, highest) in sorted(offers.items()):
        api = schema().apis.get(key)
        reads = None if api is None else (api.request.versions[0], api.request.versions[-1])
        cap = caps.get(key, highest)
        offered = None if lowest > cap else (lowest, min(cap, highest))
        carries = key in ADDRESS_CARRIERS and any(
            address_path(key, version) is not None
            for version in range(lowest, (offered or (0, -1))[1] + 1)
            if api is not None and version in api.request.versions
        )
        treatment: Treatment = "rewritten" if carries else "passed"
        if offered is None:
            treatment = "hidden"
        elif offered[1] < highest:
            treatment = "capped"
        elif reads is None or highest > reads[1]:
            treatment = "unread"
        found.append(Compared(key, title(key), (lowest, highest), reads, offered, treatment))
    if any(one.treatment in ("capped", "hidden") for one in found):  # then kproxy also changes the ApiVersions response
        found = [one._replace(treatment="rewritten") if one.key == API_VERSIONS else one for one in found]
    return found


def capped(offers: Offers) -> dict[int, int]:
    """Return API key -> the highest version that clients are offered, if brokers have higher ones."""
    return {
        one.key: one.offered[1] if one.offered else -1
        for one in compare(offers)
        if one.treatment in ("capped", "hidden")
    }


def missing(offers: Offers) -> list[int]:
    """Return the keys of APIs with versions that kproxy passes unread."""
    return [one.key for one in compare(offers) if one.treatment == "unread"]


def release_of(offers: Offers) -> str | None:
    """Return the newest release of Kafka whose client APIs these brokers serve completely, as "4.1.2", or None."""
    for release, served in reversed(served_versions().items()):
        if API_VERSIONS in served and all(
            offers.get(key, (0, -1))[1] >= versions[-1] for key, versions in served.items() if key in _FOR_CLIENTS
        ):
            return release
    return None


# APIs that every broker serves to clients; others depend on features and settings (KIP-848, KIP-932).
_FOR_CLIENTS = frozenset((0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 18, 19, 22, 24, 32))
