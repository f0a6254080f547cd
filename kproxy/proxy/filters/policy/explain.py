"""The verdict of a listener about a given request, and the rule behind it: `kproxy check FILE --request Produce ...`.

Applies the same rules as to real requests (`policy.py`), to names that the caller gives. Reads no frames.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, NamedTuple

from kproxy.errors import ConfigError
from kproxy.protocol.apis import ENVELOPE
from kproxy.protocol.schema import schema
from kproxy.proxy.config.api_groups import keys_of_names
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.filters.policy.globs import Patterns
from kproxy.proxy.filters.policy.policy import LISTS, Policy, Verdict
from kproxy.proxy.filters.policy.resources import (
    ALL_OF,
    GROUP,
    KINDS,
    NULL_IS_ALL,
    TOPIC,
    TRANSACTIONAL_ID,
    kinds_of,
    names_resources,
)
from kproxy.proxy.filters.policy.rights import is_of_cluster

ANONYMOUS = "User:ANONYMOUS"


@dataclass(frozen=True, slots=True)
class Explained:
    """The verdict about one resource that the request names."""

    what: str  # "topic orders", or "the request" if it names nothing
    verdict: Verdict
    near: tuple[str, ...] = ()  # without a matching rule: rules that would allow it except for one key

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as JSON."""
        verdict = self.verdict
        what = {"what": self.what, "allowed": verdict.allowed, "rule": verdict.rule, "reason": verdict.reason}
        return {**what, "near": list(self.near)} if self.near else what

    def __str__(self) -> str:
        return f"{self.what}: {'allowed' if self.verdict.allowed else 'denied'}, {self.verdict.why}"


def listener(config: Config, name: str | None) -> Cluster:
    """Return the [[cluster]] of that name, or the only one. Raises ConfigError."""
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
    """Return one entry for each given name, in order; the request passes if all are allowed.

    version: of the API; None: the newest version that kproxy reads. Raises ConfigError for an API that does not exist,
    or whose requests do not name resources of a given kind.
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
    asked = _Asked(key, version, principal, address, client_id)
    found = [
        Explained(f"{kind} {name}", verdict, asked.near(cluster.policy, verdict, kind, name))
        for kind, names in named.items()
        for name in names
        for verdict in [rules.named(kind, name)]
    ]
    if known.name in LISTS and (not found or (known.name in NULL_IS_ALL and not named[TOPIC])):
        text = "all topics of it" if found else "the request for a list"
        text += ", which leaves out what is denied" if policy.filters_lists else ""
        kind = ALL_OF.get(known.name, TOPIC)
        verdict = rules.nothing((kind,))
        return [*found, Explained(text, verdict, asked.near(cluster.policy, verdict, kind, None))]
    if found:
        return found
    if known.name in NULL_IS_ALL:
        return [Explained("the request for all partitions", rules.all_of(TOPIC))]
    if names_resources(key):
        verdict = rules.cluster()
        return [Explained("the settings of brokers", verdict, asked.near(cluster.policy, verdict))]
    verdict = rules.nothing()
    return [Explained("the request, which names nothing", verdict, asked.near(cluster.policy, verdict))]


class _Asked(NamedTuple):
    """A request, and its sender."""

    api_key: int
    version: int
    principal: str
    address: str
    client_id: str | None

    def near(
        self, rules: Iterable[Rule], verdict: Verdict, kind: str | None = None, name: str | None = ""
    ) -> tuple[str, ...]:
        """Return the rules that would allow the request except for one key; none if a rule decided.

        name: None, if any name of the kind suffices, as for a list.
        Rules for other principals are returned only if there is none for this principal.
        """
        if verdict.allowed or verdict.reason != "default":
            return ()
        lines: dict[bool, list[str]] = {True: [], False: []}  # whether the rule is for this principal -> its lines
        for number, rule in enumerate(rules, 1):
            unmet = list(self._unmet(rule, kind, name)) if rule.action == "allow" else []
            if len(unmet) == 1:
                is_for_them = rule.principal is None or Patterns(rule.principal).match(self.principal)
                lines[is_for_them].append(f"rule {number} would allow it, but {unmet[0]}")
        return tuple(lines[True] or lines[False])

    def _unmet(self, rule: Rule, kind: str | None, name: str | None) -> Iterator[str]:
        """Yield the keys of the rule that do not match, as text."""
        if rule.keys is not None and self.api_key not in rule.keys:
            yield f"its api leaves {schema().apis[self.api_key].name} out"
        if rule.version is not None and not any(self.version in span for span in rule.version):
            yield f"its version leaves {self.version} out"
        if rule.principal is not None and not Patterns(rule.principal).match(self.principal):
            yield f"its principal is {', '.join(rule.principal)}"
        if rule.address is not None and not any(ip_address(self.address) in network for network in rule.address):
            yield f"its address leaves {self.address} out"
        if rule.client_id is not None and not Patterns(rule.client_id).match(self.client_id or ""):
            yield f"its client_id is {', '.join(rule.client_id)}"
        named = {each: patterns for each in KINDS if (patterns := getattr(rule, each)) is not None}
        if not named:
            return
        if kind is None or is_of_cluster(self.api_key, self.version):
            yield f"it is about names ({', '.join(named)}), and this needs a rule without them"
        elif kind not in named:
            yield f"it has no {kind}"
        elif name is not None and not Patterns(named[kind]).match(name):
            yield f"its {kind} is {', '.join(named[kind])}"


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
