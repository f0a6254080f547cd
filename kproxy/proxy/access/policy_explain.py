"""What a given request would meet at a listener, and which rule decides: for `kproxy check FILE --request Produce ...`.

The same rules as for requests that come (`policy.py`), asked about names that are given instead of read. Refuses to
know bytes and the command line.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kproxy.errors import ConfigError
from kproxy.protocol.schema import schema
from kproxy.proxy.access.policy import LISTS, Policy, Verdict
from kproxy.proxy.access.policy_resources import (
    ALL_OF,
    ENVELOPE,
    GROUP,
    NULL_IS_ALL,
    TOPIC,
    TRANSACTIONAL_ID,
    kinds_of,
    names_resources,
)
from kproxy.proxy.config.api_groups import keys_of_names
from kproxy.proxy.config.settings import Cluster, Config

ANONYMOUS = "User:ANONYMOUS"


@dataclass(frozen=True, slots=True)
class Explained:
    """What becomes of one thing that the request names."""

    what: str  # "topic orders", or "the request" where it names nothing
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        verdict = self.verdict
        return {"what": self.what, "allowed": verdict.allowed, "rule": verdict.rule, "reason": verdict.reason}

    def __str__(self) -> str:
        return f"{self.what}: {'allowed' if self.verdict.allowed else 'denied'}, {self.verdict.why}"


def listener(config: Config, name: str | None) -> Cluster:
    """The [[cluster]] of that name, or the only one. Raises ConfigError."""
    found = [cluster for cluster in config.clusters if name in (None, cluster.name)]
    if len(found) != 1:
        names = ", ".join(cluster.name for cluster in config.clusters)
        raise ConfigError([("--cluster", f"is one of {names}: say which" if name is None else f"there are {names}")])
    return found[0]


def explain(
    cluster: Cluster,
    *,
    api: str,
    version: int | None = None,
    topics: Iterable[str] = (),
    groups: Iterable[str] = (),
    transactional_ids: Iterable[str] = (),
    principal: str = ANONYMOUS,
    client_id: str | None = None,
    address: str = "127.0.0.1",
) -> list[Explained]:
    """One entry for each thing that the request names, in that order; it passes if all are allowed.

    version: of the API; the newest that kproxy reads if it is None. Raises ConfigError for an API that does not exist,
    or that names nothing of a kind that is given.
    """
    key = _key(api)
    known = schema().apis.get(key)
    if version is None:
        version = known.request.versions[-1] if known is not None else 0
    policy = Policy(cluster)
    clearance = policy.identity(principal, address)(client_id)
    named = {TOPIC: [*topics], GROUP: [*groups], TRANSACTIONAL_ID: [*transactional_ids]}
    if known is None or version not in known.request.versions or key == ENVELOPE:
        return [Explained("the request, which kproxy cannot read", clearance.unknown(key, version))]
    kinds = kinds_of(key, version)
    wrong = [kind for kind, names in named.items() if names and (kind not in kinds or known.name in ALL_OF)]
    if wrong:
        raise ConfigError([(f"--{kind.replace('_', '-')}", f"{api} v{version} names none") for kind in wrong])
    rules = clearance.api(key, version)
    found = [Explained(f"{kind} {name}", rules.named(kind, name)) for kind, names in named.items() for name in names]
    if known.name in LISTS and (not found or (known.name in NULL_IS_ALL and not named[TOPIC])):
        text = "all topics of it" if found else "the request for a list"
        text += ", which leaves out what is denied" if policy.filters_lists else ""
        kind = ALL_OF.get(known.name, TOPIC)
        return [*found, Explained(text, rules.nothing((kind,)))]
    if found:
        return found
    if known.name in NULL_IS_ALL:
        return [Explained("the request for all partitions", rules.all_of(TOPIC))]
    if names_resources(key):
        return [Explained("the settings of brokers", rules.cluster())]
    return [Explained("the request, which names nothing", rules.nothing())]


def _key(api: str) -> int:
    names = keys_of_names()
    if api in names:
        return names[api]
    if api.removeprefix("-").isdigit() and -(1 << 15) <= int(api) < 1 << 15:
        return int(api)
    folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(api.lower(), folded, 1)
    hint = f"did you mean {folded[near[0]]}?" if near else "write it as Kafka does, like Produce"
    raise ConfigError([("--request", f"{api!r} is no API; {hint}")])
