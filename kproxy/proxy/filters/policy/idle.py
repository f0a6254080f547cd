"""Rules of a policy that never take effect, as far as the settings alone show it.

A `deny` that matches no request passes requests that its author considers denied, so a start, a reload and `kproxy
check` refuse it. The check has no false positives but is incomplete: patterns are compared one by one, and an earlier
rule counts only if it has the opposite action; a redundant rule does no harm. Reads no requests.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from kproxy.protocol.apis import ENVELOPE
from kproxy.protocol.schema import schema
from kproxy.proxy.config.api_groups import READ_ONLY, group_keys
from kproxy.proxy.config.checks import knows_clients
from kproxy.proxy.config.policy import MAX_PATTERN, Rule
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.filters.policy.explain import ANONYMOUS
from kproxy.proxy.filters.policy.globs import Patterns
from kproxy.proxy.filters.policy.resources import KINDS, kinds_of
from kproxy.proxy.filters.policy.rights import is_of_cluster

_UNLIKE = "\0"  # a character that no pattern contains literally
_WILD = re.compile(r"(\\.)|[*?]", re.DOTALL)


def idle_rules(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield (place, reason and fix) for each rule that decides nothing."""
    knows = knows_clients(cluster)
    for number, rule in enumerate(cluster.policy):
        place = f"policy[{number}]"
        if rule.principal is not None and not knows and not Patterns(rule.principal).match(ANONYMOUS):
            yield (
                f"{place}.principal",
                f"nothing says who a client is, so all are {ANONYMOUS} and it matches nobody: add "
                "[cluster.authentication], or client certificates in [cluster.tls]",
            )
        elif kinds := _never_named(rule):
            yield (
                f"{place}.{kinds[0]}",
                f"no request of {', '.join(rule.api)} names a {' or '.join(kinds)}, so it matches nothing: leave "
                f"{' and '.join(kinds)} out, or say which other APIs are meant",
            )
        elif rule.action == "allow" and _is_of_cluster(rule) and (kinds := _kinds_of(rule)):
            yield (
                f"{place}.{kinds[0]}",
                f"brokers ask for a right on the whole cluster for {', '.join(rule.api)}, so no rule with names allows "
                f"it: leave {' and '.join(kinds)} out",
            )
        elif rule.action == "deny" and rule.keys is not None and rule.keys <= group_keys("always"):
            yield f"{place}.api", "these requests always pass, since no client could begin without: no rule denies them"
        elif rule.action == "allow" and cluster.read_only and _readable().isdisjoint(rule.keys or _readable()):
            yield f"{place}.api", "read_only denies these requests before any rule: leave one of the two out"
        else:
            for first, earlier in enumerate(cluster.policy[:number]):
                if earlier.action != rule.action and _covers(earlier, rule):
                    verb = {"allow": "allows", "deny": "denies"}
                    yield (
                        place,
                        f"policy[{first}] comes before it and {verb[earlier.action]} all that it {verb[rule.action]}: "
                        "put it before that one, or leave it out",
                    )
                    break


def _readable() -> frozenset[int]:
    return frozenset().union(*map(group_keys, ("always", *READ_ONLY)))


def _never_named(rule: Rule) -> list[str]:
    """Return the kinds of a rule, if no request of its APIs can name any of them."""
    wanted = _kinds_of(rule)
    for key in rule.keys or ():
        api = schema().apis.get(key)
        if api is None or key == ENVELOPE:
            return []
        versions = [version for version in api.request.versions if _has(rule, version)]
        if not versions or any(not kinds_of(key, version).isdisjoint(wanted) for version in versions):
            return []
    return wanted if rule.keys is not None else []


def _kinds_of(rule: Rule) -> list[str]:
    return [kind for kind in KINDS if getattr(rule, kind) is not None]


def _is_of_cluster(rule: Rule) -> bool:
    """Return whether brokers require only rights on the cluster for every request of the rule's APIs."""
    for key in rule.keys or ():
        api = schema().apis.get(key)
        versions = [] if api is None else [version for version in api.request.versions if _has(rule, version)]
        if not versions or not all(is_of_cluster(key, version) for version in versions):
            return False
    return rule.keys is not None


def _has(rule: Rule, version: int) -> bool:
    return rule.version is None or any(version in versions for versions in rule.version)


def _covers(earlier: Rule, rule: Rule) -> bool:
    """Return whether `earlier` matches each request, and each name in it, that `rule` matches."""
    if earlier.keys is not None and (rule.keys is None or not rule.keys <= earlier.keys):
        return False
    if earlier.version is not None and (
        rule.version is None or not all(_has(earlier, version) for versions in rule.version for version in versions)
    ):
        return False
    if earlier.address is not None and (
        rule.address is None or not all(_is_in(network, earlier.address) for network in rule.address)
    ):
        return False
    named, decided = _kinds_of(rule), _kinds_of(earlier)
    if decided and (not named or not set(named) <= set(decided)):
        return False
    if decided and earlier.action == "allow" and _is_of_cluster(rule):
        return False
    names = ("principal", "client_id", *(named if decided else ()))
    return all(_all_match(getattr(earlier, name), getattr(rule, name)) for name in names)


def _is_in(network: Any, networks: Iterable[Any]) -> bool:
    return any(network.version == wider.version and network.subnet_of(wider) for wider in networks)


def _all_match(earlier: tuple[str, ...] | None, patterns: tuple[str, ...] | None) -> bool:
    """Return whether one of the earlier patterns matches each name that some of the patterns match."""
    if earlier is None or patterns is None:
        return earlier is None
    return all(any(_matches_all_of(Patterns([wider]), pattern) for wider in earlier) for pattern in patterns)


def _matches_all_of(wider: Patterns, pattern: str) -> bool:
    """Return whether `wider` matches a pattern's shortest name, and a long one that only wildcards can match."""
    return all(wider.match(_WILD.sub(partial(_filled, star), pattern)) for star in ("", _UNLIKE * (MAX_PATTERN + 1)))


def _filled(star: str, found: re.Match[str]) -> str:
    if found[1]:
        return found[1][1]  # behind its backslash
    return star if found[0] == "*" else _UNLIKE
