"""Lists the filters of a cluster's connections with the requests and answers that each one takes part in.

It asks the same predicates as a running kproxy (`proxy/connection/filtering.py`), without building anything. Refuses to
know how the list is shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kproxy.protocol.apis import API_VERSIONS, CREATE_TOPICS, DESCRIBE_CONFIGS, METADATA, SHARE_FETCH
from kproxy.protocol.schema import address_path, schema
from kproxy.proxy.cluster.transparent import ROUTE
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.filters import relogin, telemetry
from kproxy.proxy.filters.policy.policy import LISTS, Policy

Takes = Callable[[int, int], bool]  # (api key, version) -> whether the filter takes part


class Apis(NamedTuple):
    """Names of APIs, each with its versions unless all of them are meant."""

    names: tuple[str, ...]
    others: tuple[str, ...]  # the APIs and versions that are not meant


@dataclass(frozen=True)
class Listed:
    """A filter in its place in the order."""

    name: str
    does: str
    requests: Apis
    answers: Apis

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "does": self.does,
            "requests": list(self.requests.names),
            "answers": list(self.answers.names),
        }


def filters_of(config: Config, cluster: Cluster) -> tuple[list[Listed], Apis]:
    """Return (the filters of a cluster's connections in their order, the APIs that none of them decides or changes)."""
    deciding = list(_deciding(config, cluster))
    listed = [
        Listed(name, does, apis(requests), apis(answers))
        for name, does, requests, answers in (*deciding, *_reading(config, cluster))
    ]
    return listed, apis(lambda key, version: not any(takes(key, version) for _, _, *both in deciding for takes in both))


def _deciding(config: Config, cluster: Cluster) -> Iterator[tuple[str, str, Takes, Takes]]:
    """Yield (name, effect, requests that it decides, answers that it may change)."""
    rewrites = cluster.route != ROUTE
    if cluster.authentication is not None:
        yield "logins", "checks renewed logins, and ends expired sessions", relogin.wants, _none
    elif cluster.login is not None and rewrites:  # redirected clients log in at the broker
        yield "logins", "answers clients that try to log in: kproxy has a login of its own", relogin.wants, _none
    policy = Policy(cluster, audits=config.audit is not None)
    if not policy.is_empty:
        edits = partial(_edits, policy)
        does = "forwards, refuses or edits requests" if policy.is_active else "audits requests"
        yield "policy", does + (", and edits answers" if apis(edits).names else ""), policy.authorizes, edits
    if rewrites:
        yield "versions", "caps the versions that brokers offer", _none, _is_api_versions
    if cluster.telemetry is not None:
        does = "takes the metrics that clients push, and offers that"
        yield "telemetry", does, telemetry.wants, _is_api_versions if rewrites else _none
    if rewrites:
        yield "addresses", "replaces brokers' addresses by kproxy's", _none, _has_addresses
        yield "leak check", "searches answers for brokers' addresses, also those of unknown APIs", _none, _has_addresses


def _reading(config: Config, cluster: Cluster) -> Iterator[tuple[str, str, Takes, Takes]]:
    """Yield the filters that only read."""
    yield "metrics", "counts exchanges", _all, _all
    if cluster.detail != "headers":
        from kproxy.insight.knowledge import APIS

        def followed(key: int, version: int) -> bool:
            return key in APIS

        yield "groups", "follows groups, offsets, leaders and transactions", followed, followed
    for name, setting, does in (
        ("recorder", config.record, "writes exchanges to tables"),
        ("flight", config.flight, "keeps the last frames, to write them as a capture"),
    ):
        if setting is not None:
            yield name, does, _all, _all


def _edits(policy: Policy, key: int, version: int) -> bool:
    """Return whether some client's answers of an API and version may be edited, as `PolicyAuthorizer` decides it."""
    if not (policy.is_active and policy.authorizes(key, version)):
        return False
    if policy.hides_in(key):
        return True
    names_some = any(rule.named for rule in policy.rules)
    if key == METADATA and not policy.allows_all(key, version):  # an error for each denied topic
        return True
    if key == CREATE_TOPICS:  # without the settings of topics that the client may not describe
        return not policy.allows_all(DESCRIBE_CONFIGS, schema().apis[DESCRIBE_CONFIGS].request.versions[-1])
    if key == SHARE_FETCH:  # without topics that other clients have added to its session
        return names_some and not policy.allows_all(key, version)
    return names_some and policy.filters_lists and schema().apis[key].name in LISTS


def _none(key: int, version: int) -> bool:
    return False


def _all(key: int, version: int) -> bool:
    return True


def _is_api_versions(key: int, version: int) -> bool:
    return key == API_VERSIONS


def _has_addresses(key: int, version: int) -> bool:
    return address_path(key, version) is not None


def apis(takes: Takes) -> Apis:
    """Return the APIs and versions that satisfy a predicate, and the others."""
    found: tuple[list[str], list[str]] = ([], [])
    for key, api in schema().apis.items():
        versions = [version for version in api.request.versions if takes(key, version)]
        others = [version for version in api.request.versions if version not in versions]
        for names, some, rest in ((found[0], versions, others), (found[1], others, versions)):
            if some:
                names.append(f"{api.name} {_ranges(some)}" if rest else api.name)
    return Apis(*map(tuple, found))


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as ranges, such as "0-3,7"."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1] = parts[-1][0], number
        else:
            parts.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
