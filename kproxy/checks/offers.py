"""What brokers offer in ApiVersions, beside what kproxy reads and rewrites, and beside what releases of Kafka serve.

Pure: ranges of versions in, ranges and names out. Refuses to know sockets and how anything is shown.
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

    rewritten: its answers carry brokers' addresses, which become kproxy's; passed: byte for byte; capped: clients are
    offered less than brokers have, since kproxy must read it; hidden: they are not offered it at all; unread: kproxy
    does not know it, passes it and counts it by its number.
    """

    key: int
    name: str
    brokers: tuple[int, int]
    kproxy: tuple[int, int] | None  # what it reads; None: nothing
    offered: tuple[int, int] | None  # what clients are offered; None: hidden
    treatment: Treatment


def title(key: int) -> str:
    """Kafka's name of an API, or unknown_<key>."""
    return api_name(key)


def compare(offers: Offers) -> list[Compared]:
    """What kproxy does with each API that brokers offer, by key."""
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
    if any(one.treatment in ("capped", "hidden") for one in found):  # then its own answers change
        found = [one._replace(treatment="rewritten") if one.key == API_VERSIONS else one for one in found]
    return found


def capped(offers: Offers) -> dict[int, int]:
    """API key -> the highest version that clients are offered, where brokers have higher ones."""
    return {
        one.key: one.offered[1] if one.offered else -1
        for one in compare(offers)
        if one.treatment in ("capped", "hidden")
    }


def missing(offers: Offers) -> list[int]:
    """Keys of APIs, in versions that brokers offer, that kproxy passes unread."""
    return [one.key for one in compare(offers) if one.treatment == "unread"]


def release_of(offers: Offers) -> str | None:
    """The newest release of Kafka of whose APIs for clients these brokers serve all, as "4.1.2"; None: of none."""
    for release, served in reversed(served_versions().items()):
        if API_VERSIONS in served and all(
            offers.get(key, (0, -1))[1] >= versions[-1] for key, versions in served.items() if key in _FOR_CLIENTS
        ):
            return release
    return None


# What every broker serves to clients, whatever its settings: others come and go with features (KIP-848, KIP-932).
_FOR_CLIENTS = frozenset((0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 18, 19, 22, 24, 32))
