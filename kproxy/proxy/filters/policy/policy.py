"""A policy: rules compiled once, which give a verdict about each resource that a request names.

Each topic, group and transactional id in a request is judged on its own, as by a broker's authorizer. The request
passes if all of them are allowed. The first rule that matches a name decides:

- A rule matches by API, version, client id, principal and address. A rule that also has `topic`, `group` or
  `transactional_id` matches only names of these kinds that fit its patterns; a rule may have several kinds.
- Resources of no kind (a broker's settings, access rules, quotas) match only rules without such patterns.
- A request that names nothing (a ListOffsets of no topics) matches these rules, too, and rules that allow some name of
  a kind that the API can name: it touches nothing that they do not allow.
- A list of all resources of a kind (Metadata, ListGroups) is judged like a request that names nothing; its answer can
  be filtered (`lists.py`). Another request for all resources (ElectLeaders) touches names that any rule denies.
- If brokers require a right on the cluster for a request (`rights.py`), no rule with names allows it; such a rule can
  deny it.
- No default allows requests that only brokers send (ClusterAction). The same holds for other requests with fields that
  only brokers set, like the replica id of a Fetch: only rules without names that allow the group `broker`, and rules
  that deny this group or the request, decide them.
- The default decides if no rule matches. An API key that the schema lacks is denied unless a rule allows its number.
  Envelope, which carries another request, is denied unless a rule names it. A version that the schema lacks is denied
  if its body would have to be read.

Pure: reads no bytes. Bounds: MAX_REMEMBERED cached names of MAX_REMEMBERED_BYTES, the oldest are dropped first, none
longer than MAX_NAME; one set of rules for identities with the same rules (MAX_CLEARANCES), with MAX_API_RULES for their
APIs.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache, cached_property, lru_cache, partial
from sys import getsizeof
from typing import NamedTuple

from kproxy.addresses import numeric
from kproxy.protocol.apis import DESCRIBE_GROUPS, DESCRIBE_TRANSACTIONS, ENVELOPE, METADATA
from kproxy.protocol.schema import api_name, schema
from kproxy.proxy.config.api_groups import ALWAYS, READ_ONLY, group_keys, keys_of_names
from kproxy.proxy.config.policy import PRINCIPAL_TYPE, Rule, default_of
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.filters.policy.globs import Matcher, Patterns
from kproxy.proxy.filters.policy.lists import MENTIONED
from kproxy.proxy.filters.policy.resources import (
    ALSO,
    GROUP,
    KINDS,
    TOPIC,
    TRANSACTIONAL_ID,
    WITHOUT_NAMES,
    can_be_from_broker,
    kinds_of,
)
from kproxy.proxy.filters.policy.rights import is_cluster_action, is_of_cluster

MAX_REMEMBERED = 64 * 1024
MAX_REMEMBERED_BYTES = 32 * 1024 * 1024  # memory of all cached names
MAX_API_RULES = 256 * 1024  # cached rules by identity, API and version; some 110 bytes each
_NAME_BYTES = 250  # memory of a cached name without its text
MAX_CLEARANCES = 1024
MAX_CLIENT_IDS = 8  # cached ids of one connection, of MAX_NAME characters each
MAX_NAME = 256  # characters; clients may send 32 KiB, and topics have 249 at most

LISTS = frozenset(
    (
        *("Metadata", "ListGroups", "ListTransactions", "DescribeTopicPartitions", "DescribeLogDirs"),
        *("ListPartitionReassignments", "OffsetFetch", "DescribeShareGroupOffsets"),
    )
)

# Why a request is refused: the label `reason` of kproxy_policy_refusals_total.
REASONS = (
    *("rule", "default", "read_only", "cluster_action", "unknown_api", "unknown_version", "unknown_topic_id"),
    *("malformed", "too_large"),
)

# By kind: answers may mention a name if the client may send this request for it.
_DESCRIBING = {TOPIC: METADATA, GROUP: DESCRIBE_GROUPS, TRANSACTIONAL_ID: DESCRIBE_TRANSACTIONS}


class Verdict(NamedTuple):
    """The decision about one resource that a request names, and its reason."""

    allowed: bool
    rule: int | None  # its number, from 1, in the order of the file; None: no rule decided
    reason: str  # one of REASONS if it is not allowed

    @property
    def why(self) -> str:
        """Return the reason as text, for a client, a log or the audit."""
        if self.rule is not None:
            return f"rule {self.rule} {'allows' if self.allowed else 'denies'} it"
        return {
            "default": f"no rule matches, and the default is to {'allow' if self.allowed else 'deny'}",
            "read_only": "the listener is read-only",
            "cluster_action": "it is for brokers alone, and no rule without names allows `broker`",
            "unknown_api": "kproxy does not know the API, or what it carries, and no rule allows it by name or number",
            "unknown_version": "kproxy does not read this version, and a rule would need to",
            "unknown_topic_id": "kproxy has not learnt yet which topic the id means",
            "malformed": "it does not decode",
            "too_large": "it is too large for kproxy to decide",
            "always": "every client may",
        }[self.reason]


ALWAYS_ALLOWED = Verdict(True, None, "always")
READ_ONLY_DENIED = Verdict(False, None, "read_only")
CLUSTER_ACTION_DENIED = Verdict(False, None, "cluster_action")
UNKNOWN_API = Verdict(False, None, "unknown_api")
UNKNOWN_VERSION = Verdict(False, None, "unknown_version")
UNKNOWN_TOPIC_ID = Verdict(False, None, "unknown_topic_id")
MALFORMED = Verdict(False, None, "malformed")
TOO_LARGE = Verdict(False, None, "too_large")


class _Compiled:
    """A compiled rule."""

    def __init__(self, number: int, rule: Rule) -> None:
        self.number = number
        self.keys = rule.keys
        self.versions = rule.version
        self.verdict = Verdict(rule.action == "allow", number, "rule")
        self.allows = rule.action == "allow"
        self.named = {kind: Patterns(patterns) for kind in KINDS if (patterns := getattr(rule, kind)) is not None}
        self.principals = Patterns(rule.principal) if rule.principal is not None else None
        self.client_ids = Patterns(rule.client_id) if rule.client_id is not None else None
        self.networks = rule.address
        # Whether it covers all requests between brokers.
        self.covers_brokers = rule.keys is None or rule.keys >= group_keys("broker")

    @property
    def is_for_all(self) -> bool:
        """Return whether the rule matches every client and every name."""
        return not (self.named or self.principals or self.client_ids or self.networks is not None)

    def is_about(self, api_key: int, version: int, kinds: frozenset[str]) -> bool:
        """Return whether the rule can decide requests of that version."""
        if self.keys is not None and api_key not in self.keys:
            return False
        return self._is_about(api_key, version, kinds)

    def is_about_brokers(self, api_key: int, version: int, kinds: frozenset[str]) -> bool:
        """Return whether the rule can decide requests of that version that only brokers send."""
        if self.allows or self.covers_brokers:
            return self.covers_brokers and not (self.allows and self.named) and self._is_about(api_key, version, kinds)
        return self.is_about(api_key, version, kinds)

    def _is_about(self, api_key: int, version: int, kinds: frozenset[str]) -> bool:
        if not _has_version(self, version):
            return False
        if not self.named:
            return True
        return not kinds.isdisjoint(self.named) and not (self.allows and is_of_cluster(api_key, version))

    def is_for(self, principal: str, address: str) -> bool:
        """Return whether the rule matches a client."""
        return (self.principals is None or self.principals.match(principal)) and self._is_at(address)

    def may_be_for(self, address: str) -> bool:
        """Return whether the rule matches a client of any principal, or may allow one that is not known yet."""
        is_for_all = self.principals is None or self.principals.is_all or f"{PRINCIPAL_TYPE}*" in self.principals.texts
        return (is_for_all or self.allows) and self._is_at(address)

    def _is_at(self, address: str) -> bool:
        if self.networks is None:
            return True
        ip = numeric(address)
        return ip is not None and any(ip in network for network in self.networks if network.version == ip.version)


class ApiRules:
    """The rules of one clearance for one API and version.

    is_of_cluster: the API needs only rights on the cluster, for any names in the request.
    """

    def __init__(
        self,
        rules: Iterable[_Compiled],
        default: Verdict,
        kinds: frozenset[str],
        matching: Callable[[str, str], int],
        *,
        is_of_cluster: bool,
    ) -> None:
        """rules: the rules about the API. kinds: the kinds that its requests can name.

        matching(kind, name): the numbers of rules with a pattern that matches a name, as bits.
        """
        self.is_of_cluster = is_of_cluster
        self._kinds = kinds
        self._rules = []
        for rule in rules:
            self._rules.append(rule)
            if not rule.named:
                break
        self._default = default
        self._matching = matching
        self._verdicts = {1 << rule.number: rule.verdict for rule in self._rules if rule.named}
        self._mask = sum(self._verdicts)  # the rules with patterns; a rule without patterns is the last one
        self._otherwise = self.cluster()
        # The verdict if it does not depend on names; otherwise None.
        self.constant: Verdict | None = None
        if not self._rules or not self._rules[0].named:
            self.constant = self._otherwise

    def named(self, kind: str, name: str) -> Verdict:
        """Return the verdict about one name."""
        matching = self._matching(kind, name) & self._mask
        return self._verdicts[matching & -matching] if matching else self._otherwise

    def depends_on(self, kind: str) -> bool:
        """Return whether some names of that kind may pass and others not."""
        return len(self._outcomes(kind)) > 1

    def restricts(self, kind: str) -> bool:
        """Return whether some names of that kind, or all, may not pass."""
        return False in self._outcomes(kind)

    def _outcomes(self, kind: str) -> set[bool]:
        outcomes = {rule.allows for rule in self._rules if not rule.named or kind in rule.named}
        if not self._rules or self._rules[-1].named:
            outcomes.add(self._default.allowed)
        return outcomes

    @property
    def may_allow(self) -> bool:
        """Return whether some request may pass."""
        if any(rule.allows for rule in self._rules):
            return True
        return self._default.allowed and all(rule.named for rule in self._rules)

    def cluster(self) -> Verdict:
        """Return the verdict about resources of no kind."""
        return next((rule.verdict for rule in self._rules if not rule.named), self._default)

    def nothing(self, kinds: Iterable[str] | None = None) -> Verdict:
        """Return the verdict about a request that names nothing, or requests a list of these kinds."""
        kinds = self._kinds if kinds is None else kinds
        for rule in self._rules:
            if not rule.named or (rule.allows and not rule.named.keys().isdisjoint(kinds)):
                return rule.verdict
        return self._default

    def all_of(self, kind: str) -> Verdict:
        """Return the verdict about a request that touches every name of a kind."""
        for rule in self._rules:
            if not rule.named or (kind in rule.named and (not rule.allows or rule.named[kind].is_all)):
                return rule.verdict
        return self._default


class Clearance:
    """The rules of clients with the same set of applicable rules, by API and version."""

    def __init__(self, policy: "Policy", rules: tuple[_Compiled, ...]) -> None:
        self._policy = policy
        self._rules = rules
        self._apis: dict[tuple[int, int, bool], ApiRules] = {}

    def api(self, api_key: int, version: int) -> ApiRules:
        """Return the rules for an API and version of the schema."""
        return self._api(api_key, version, _is_sent_by_brokers(api_key, version))

    def of_brokers(self, api_key: int, version: int) -> ApiRules:
        """Return the rules for requests of an API with fields that only brokers set."""
        return self._api(api_key, version, True)

    def _api(self, api_key: int, version: int, of_brokers: bool) -> ApiRules:
        found = self._apis.get((api_key, version, of_brokers))
        if found is None:
            found = self._policy.compiled(self._rules, api_key, version, of_brokers=of_brokers)
            self._policy.remember_rules(len(self._rules))
            self._apis[api_key, version, of_brokers] = found
        return found

    def forget(self) -> None:
        """Drop the cached rules of all APIs and versions."""
        self._apis.clear()

    def also(self, api_key: int) -> ApiRules | None:
        """Return the rules of the API in ALSO; None if there is none, or if all requests of that API pass."""
        other = _also(api_key)
        if other is None:
            return None
        rules = self.api(other, _newest(other))
        return None if rules.constant is not None and rules.constant.allowed else rules

    def peeks(self, api_key: int, version: int) -> bool:
        """Return whether requests with fields that only brokers set are denied, while others may pass."""
        if not can_be_from_broker(api_key, version):
            return False
        constant = self.of_brokers(api_key, version).constant
        return constant is None or not constant.allowed

    def sees(self, kind: str, name: str) -> bool:
        """Return whether answers may mention a name: whether the request in _DESCRIBING may name it."""
        return self._describing(kind).named(kind, name).allowed

    @cached_property
    def sees_all(self) -> bool:
        """Return whether answers may mention every topic, group and transactional id."""
        return all(self._describing(kind).all_of(kind).allowed for kind in KINDS)

    @cached_property
    def sees_every_topic(self) -> bool:
        """Return whether answers may mention every topic."""
        return self._describing(TOPIC).all_of(TOPIC).allowed

    def _describing(self, kind: str) -> ApiRules:
        key = _DESCRIBING[kind]
        return self.api(key, _newest(key))

    @cached_property
    def refused_versions(self) -> dict[int, frozenset[int]]:
        """Return API key -> the versions in which no request passes, for APIs that a rule with `version` names."""
        keys = frozenset().union(*(rule.keys for rule in self._rules if rule.versions and rule.keys))
        found = {}
        for key in keys.intersection(schema().apis):
            rules = [rule for rule in self._rules if rule.keys is None or key in rule.keys]
            compiled = partial(self._policy.compiled, rules, key)
            found[key] = frozenset(
                version
                for version in schema().apis[key].request.versions
                if not compiled(version, of_brokers=_is_sent_by_brokers(key, version)).may_allow
            )
        return found

    def unknown(self, api_key: int, version: int) -> Verdict:
        """Return the verdict about a request with an unknown key or version, or with another request inside."""
        if not self._policy.is_active:
            return self._policy.default
        if self._policy.is_always(api_key):
            return ALWAYS_ALLOWED
        if api_key in schema().apis and api_key != ENVELOPE:
            constant = self.api(api_key, version).constant
            edited = self._policy.hides_in(api_key) and not self.sees_all
            edited = edited or self.also(api_key) is not None
            edited = edited or self.peeks(api_key, version)
            return UNKNOWN_VERSION if constant is None or (constant.allowed and edited) else constant
        if self._policy.read_only:
            return READ_ONLY_DENIED
        for rule in self._rules:
            if rule.allows:
                if rule.keys is not None and api_key in rule.keys and rule.is_about(api_key, version, frozenset()):
                    return rule.verdict
            elif (rule.keys is None or api_key in rule.keys) and _has_version(rule, version):
                return rule.verdict
        return UNKNOWN_API


class Policy:
    """The rules of one cluster's listener."""

    def __init__(self, cluster: Cluster, *, audits: bool = False) -> None:
        """audits: hold administrative requests for the audit even if no rule is about them."""
        self.read_only = cluster.read_only
        self.filters_lists = cluster.filter_lists
        self.audits = audits
        self.rules = tuple(_Compiled(number, rule) for number, rule in enumerate(cluster.policy, 1))
        self.default = Verdict(default_of(cluster.policy, cluster.policy_default) == "allow", None, "default")
        self.is_active = bool(self.rules) or self.read_only or not self.default.allowed
        self.has_client_ids = any(rule.client_ids is not None for rule in self.rules)
        self._admin = group_keys("admin") if audits else frozenset()
        self._clearances: dict[tuple[int, ...], Clearance] = {}
        self._matchers = {
            kind: Matcher(
                (rule.number, text) for rule in self.rules if kind in rule.named for text in rule.named[kind].texts
            )
            for kind in KINDS
        }
        self._matching: OrderedDict[tuple[str, str], int] = OrderedDict()  # cache of `matching`
        self._matching_bytes = 0
        self._api_rules = 0  # rules cached by clearances

    def matching(self, kind: str, name: str) -> int:
        """Return the numbers of rules with a pattern of that kind that matches the name, as bits."""
        found = self._matching.get((kind, name))
        if found is None:
            found = self._matchers[kind].ranks(name)
            if len(name) <= MAX_NAME:
                self._matching_bytes += getsizeof(name) + getsizeof(found) + _NAME_BYTES
                while len(self._matching) >= MAX_REMEMBERED or (
                    self._matching_bytes > MAX_REMEMBERED_BYTES and self._matching
                ):  # one by one: dropping all at once takes some 10 ms
                    (_, oldest), bits = self._matching.popitem(last=False)
                    self._matching_bytes -= getsizeof(oldest) + getsizeof(bits) + _NAME_BYTES
                self._matching[kind, name] = found
        return found

    def remember_rules(self, count: int) -> None:
        """Count the rules that a clearance caches for an API and version; beyond MAX_API_RULES drop all caches."""
        count += 8  # overhead of an entry
        if self._api_rules + count > MAX_API_RULES:
            for clearance in self._clearances.values():
                clearance.forget()
            self._api_rules = 0
        self._api_rules += count

    @property
    def is_empty(self) -> bool:
        """Return whether the policy never decides or audits a request."""
        return not (self.is_active or self.audits)

    @property
    def reasons(self) -> list[str]:
        """Return the possible reasons of its refusals."""
        never = {
            "rule": all(rule.allows for rule in self.rules),
            "default": self.default.allowed,
            "read_only": not self.read_only,
            "cluster_action": self.read_only,
            "unknown_topic_id": not self.needs_names,
        }
        return [reason for reason in REASONS if not never.get(reason)]

    def caps(self) -> dict[int, int]:
        """Return API key -> the highest version to offer, for APIs whose requests the policy must read."""
        if not self.is_active:
            return {}
        return {
            key: api.request.versions[-1]
            for key, api in schema().apis.items()
            if self.authorizes(key, api.request.versions[-1])
        }

    @cached_property
    def needs_names(self) -> bool:
        """Return whether verdicts about topic ids depend on the names of the topics."""
        return any(TOPIC in rule.named for rule in self.rules)

    def is_always(self, api_key: int) -> bool:
        return api_name(api_key) in ALWAYS

    def is_audited(self, api_key: int) -> bool:
        """Return whether every request of that API leaves a line in the audit."""
        return api_key in self._admin

    def authorizes(self, api_key: int, version: int) -> bool:
        """Return whether requests of that API and version need a decision: False if every client may send all."""
        if api_key in self._admin:
            return True
        if not self.is_active or self.is_always(api_key):
            return False
        if api_key not in schema().apis or api_key == ENVELOPE:
            return True
        if self.hides_in(api_key) or not self.allows_all(api_key, version):
            return True
        if can_be_from_broker(api_key, version) and not self.allows_all(api_key, version, of_brokers=True):
            return True
        other = _also(api_key)
        return other is not None and not self.allows_all(other, _newest(other))

    def allows_all(self, api_key: int, version: int, *, of_brokers: bool = False) -> bool:
        """Return whether the policy certainly allows every client every request of a version."""
        rules, default = self._about(self.rules, api_key, version, of_brokers=of_brokers)
        for rule in rules:
            if not rule.allows:
                return False
            if rule.is_for_all:
                return True
        return default.allowed

    def _about(
        self, rules: Iterable[_Compiled], api_key: int, version: int, *, of_brokers: bool
    ) -> tuple[list[_Compiled], Verdict]:
        """Return (the rules about requests of a version, the verdict if none of them matches)."""
        of_brokers = of_brokers or _is_sent_by_brokers(api_key, version)
        if self.is_always(api_key):
            return [], ALWAYS_ALLOWED
        if self.read_only and (of_brokers or api_key not in _readable()):
            return [], READ_ONLY_DENIED
        kinds = _kinds(api_key, version)
        if of_brokers:
            about = [rule for rule in rules if rule.is_about_brokers(api_key, version, kinds)]
        else:
            about = [rule for rule in rules if rule.is_about(api_key, version, kinds)]
        acts = self.is_active and (of_brokers or is_cluster_action(api_key, version))
        return about, CLUSTER_ACTION_DENIED if acts else self.default

    def compiled(self, rules: Iterable[_Compiled], api_key: int, version: int, *, of_brokers: bool) -> ApiRules:
        """Return the rules for an API and version, out of `rules`. of_brokers: only brokers send these requests."""
        about, default = self._about(rules, api_key, version, of_brokers=of_brokers)
        of_cluster = of_brokers or is_of_cluster(api_key, version)
        unnamed = WITHOUT_NAMES.get(api_name(api_key))
        kinds = _kinds(api_key, version) if unnamed is None else frozenset((unnamed,))
        return ApiRules(about, default, kinds, self.matching, is_of_cluster=of_cluster)

    def hides_in(self, api_key: int) -> bool:
        """Return whether answers of that API can mention names that some client may not see."""
        return self.filters_lists and api_name(api_key) in MENTIONED and self._tells_names_apart

    @cached_property
    def _tells_names_apart(self) -> bool:
        return any(rule.named for rule in self.rules)

    def identity(self, principal: str, address: str) -> Callable[[str | None], Clearance]:
        """Return a function from the client id of a request to the clearance, for a principal and an address."""
        return self._by_client_id(tuple(rule for rule in self.rules if rule.is_for(principal, address)))

    def before_login(self, address: str) -> Callable[[str | None], Clearance]:
        """Return the same for a client with an unknown principal; it allows all that some principal may do."""
        return self._by_client_id(tuple(rule for rule in self.rules if rule.may_be_for(address)))

    def _by_client_id(self, mine: tuple[_Compiled, ...]) -> Callable[[str | None], Clearance]:
        if not any(rule.client_ids is not None for rule in mine):
            clearance = self._clearance(mine)
            return lambda client_id: clearance
        known: dict[str | None, Clearance] = {}

        def by_client_id(client_id: str | None) -> Clearance:
            clearance = known.get(client_id)
            if clearance is None:
                rules = (rule for rule in mine if rule.client_ids is None or rule.client_ids.match(client_id or ""))
                clearance = self._clearance(tuple(rules))
                if len(client_id or "") <= MAX_NAME:
                    if len(known) >= MAX_CLIENT_IDS:
                        known.clear()
                    known[client_id] = clearance
            return clearance

        return by_client_id

    def _clearance(self, rules: tuple[_Compiled, ...]) -> Clearance:
        key = tuple(rule.number for rule in rules)
        clearance = self._clearances.get(key)
        if clearance is None:
            if len(self._clearances) >= MAX_CLEARANCES:
                self._clearances.clear()
            clearance = self._clearances[key] = Clearance(self, rules)
        return clearance


def _has_version(rule: _Compiled, version: int) -> bool:
    return rule.versions is None or any(version in versions for versions in rule.versions)


@cache
def _readable() -> frozenset[int]:
    """Return the API keys that a read-only listener passes."""
    return frozenset().union(*map(group_keys, READ_ONLY))


@cache
def _also(api_key: int) -> int | None:
    other, _ = ALSO.get(schema().apis[api_key].name, (None, ()))
    return None if other is None else keys_of_names()[other]


def _newest(api_key: int) -> int:
    return schema().apis[api_key].request.versions[-1]


def _is_sent_by_brokers(api_key: int, version: int) -> bool:
    """Return whether only brokers send that version, though its API is not in the group `broker`."""
    return is_cluster_action(api_key, version) and api_key not in group_keys("broker")


@lru_cache(4096)  # clients invent versions
def _kinds(api_key: int, version: int) -> frozenset[str]:
    """Return the kinds that requests can name; a version outside the schema has the kinds of all versions."""
    api = schema().apis.get(api_key)
    if api is None:
        return frozenset()
    if version in api.request.versions:
        return kinds_of(api_key, version)
    return frozenset().union(*(kinds_of(api_key, known) for known in api.request.versions))
