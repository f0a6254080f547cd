"""A policy: rules compiled once, asked per request what becomes of each thing that it names.

A request is judged by what it names: each topic, group and transactional id on its own, as a broker's authorizer does.
It passes if all of them may. For each, the first rule that matches decides:

- A rule matches by API, version, client id, principal and address. One with `topic`, `group` or `transactional_id`
  besides matches only names of these kinds that fit; with several kinds, those of each.
- What is none of the kinds (a broker's settings, access rules, quotas) matches only rules without such a pattern.
- A request that names nothing (a ListOffsets of no topics) matches these too, and rules that allow some name of
  a kind that the API can name: nothing is touched that they do not allow.
- A list that asks for all of a kind (Metadata, ListGroups) is as one that names nothing; its answer can be filtered
  (`policy_lists.py`). Another request for all (ElectLeaders) touches what any rule denies.
- What no rule matches becomes what the default says. An API key that the schema lacks is denied unless a rule allows it
  by its number, and so is Envelope, which carries another request, unless a rule names it; a version that the schema
  lacks is denied where its body would have to be read.

Pure: refuses to know bytes, answers and connections. Bounds: MAX_REMEMBERED names, then they are forgotten, and none
that is longer than MAX_NAME; as many sets of rules as identities differ in (MAX_CLEARANCES, then those too).
"""

import re
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from typing import NamedTuple

from kproxy.protocol.schema import api_name, schema
from kproxy.proxy.access.policy_lists import MENTIONED
from kproxy.proxy.access.policy_members import DESCRIBE_GROUPS
from kproxy.proxy.access.policy_resources import (
    DESCRIBE_TRANSACTIONS,
    ENVELOPE,
    GROUP,
    KINDS,
    METADATA,
    TOPIC,
    TRANSACTIONAL_ID,
    kinds_of,
)
from kproxy.proxy.config.addresses import numeric
from kproxy.proxy.config.api_groups import ALWAYS, READ_ONLY, group_keys
from kproxy.proxy.config.policy import Rule, default_of
from kproxy.proxy.config.settings import Cluster

MAX_REMEMBERED = 64 * 1024
MAX_CLEARANCES = 1024
MAX_CLIENT_IDS = 64  # of one connection
MAX_NAME = 256  # characters; clients may send 32 KiB, and topics have 249 at most

LISTS = frozenset(
    (
        *("Metadata", "ListGroups", "ListTransactions", "DescribeTopicPartitions", "DescribeLogDirs"),
        *("ListPartitionReassignments", "OffsetFetch", "DescribeShareGroupOffsets"),
    )
)

# Why a request is refused: the label `reason` of kproxy_policy_refusals_total.
REASONS = (
    *("rule", "default", "read_only", "unknown_api", "unknown_version", "unknown_topic_id", "malformed", "too_large"),
)

# The request that may name something if other answers may mention it.
_DESCRIBING = {TOPIC: METADATA, GROUP: DESCRIBE_GROUPS, TRANSACTIONAL_ID: DESCRIBE_TRANSACTIONS}
_FIRST_METADATA_WITH_AUTO_CREATION = 4  # its flag can be cleared


class Verdict(NamedTuple):
    """What becomes of one thing that a request names, and why."""

    allowed: bool
    rule: int | None  # its number, from 1, in the order of the file; None: no rule decided
    reason: str  # one of REASONS if it is not allowed

    @property
    def why(self) -> str:
        """In words, for a client, a log or an audit."""
        if self.rule is not None:
            return f"rule {self.rule} {'allows' if self.allowed else 'denies'} it"
        return {
            "default": f"no rule matches, and the default is to {'allow' if self.allowed else 'deny'}",
            "read_only": "the listener is read-only",
            "unknown_api": "kproxy does not know the API, or what it carries, and no rule allows it by name or number",
            "unknown_version": "kproxy does not read this version, and a rule would need to",
            "unknown_topic_id": "kproxy has not learnt yet which topic the id means",
            "malformed": "it does not decode",
            "too_large": "it is too large to be held",
            "always": "every client may",
        }[self.reason]


ALWAYS_ALLOWED = Verdict(True, None, "always")
READ_ONLY_DENIED = Verdict(False, None, "read_only")
UNKNOWN_API = Verdict(False, None, "unknown_api")
UNKNOWN_VERSION = Verdict(False, None, "unknown_version")
UNKNOWN_TOPIC_ID = Verdict(False, None, "unknown_topic_id")
MALFORMED = Verdict(False, None, "malformed")
TOO_LARGE = Verdict(False, None, "too_large")


class Patterns:
    """Names, some with wildcards: `*` is any text, `?` any character, a backslash makes the next one literal."""

    def __init__(self, patterns: Iterable[str]) -> None:
        exact, globs = set(), []
        for pattern in patterns:
            segments: list[list[str]] = [[]]
            for part in re.findall(r"\\.|.", pattern, re.DOTALL):
                if part == "*":
                    segments.append([])
                else:
                    segments[-1].append(part)
            if len(segments) == 1 and "?" not in segments[0]:
                exact.add("".join(part[-1] for part in segments[0]))
            else:
                globs.append(_Glob(segments))
        self._exact = frozenset(exact)
        self._globs = tuple(globs)
        self.is_all = any(glob.is_all for glob in globs)

    def match(self, name: str) -> bool:
        return name in self._exact or any(glob.match(name) for glob in self._globs)


class _Glob:
    """One pattern with wildcards. It takes time linear in the name for each star: names come from clients."""

    def __init__(self, segments: list[list[str]]) -> None:
        texts = ["".join("." if part == "?" else re.escape(part[-1]) for part in segment) for segment in segments]
        lengths = [len(segment) for segment in segments]
        first, last = re.compile(texts[0], re.DOTALL), re.compile(texts[-1], re.DOTALL)
        self._is_fixed = len(segments) == 1
        self._first, self._last = first.match, last.fullmatch
        self._lengths = lengths[0], lengths[-1]
        self._inner = [re.compile(text, re.DOTALL).search for text in texts[1:-1] if text]
        self.is_all = not self._is_fixed and not any(lengths)

    def match(self, name: str) -> bool:
        before, behind = self._lengths
        if self._is_fixed:
            return len(name) == before and self._first(name) is not None
        stop = len(name) - behind
        if stop < before or self._first(name) is None or self._last(name, stop) is None:
            return False
        pos = before
        for search in self._inner:  # the leftmost place of each leaves most for those behind it
            found = search(name, pos, stop)
            if found is None:
                return False
            pos = found.end()
        return True


class _Compiled:
    """One rule."""

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

    @property
    def is_for_all(self) -> bool:
        """Whether it is for every client, and whatever is named."""
        return not (self.named or self.principals or self.client_ids or self.networks is not None)

    def is_about(self, api_key: int, version: int, kinds: frozenset[str]) -> bool:
        if self.keys is not None and api_key not in self.keys:
            return False
        return _has_version(self, version) and (not self.named or not kinds.isdisjoint(self.named))

    def is_for(self, principal: str, address: str) -> bool:
        if self.principals is not None and not self.principals.match(principal):
            return False
        if self.networks is None:
            return True
        ip = numeric(address)
        return ip is not None and any(ip in network for network in self.networks if network.version == ip.version)


class ApiRules:
    """The rules of one clearance for one API and version."""

    def __init__(
        self,
        rules: Iterable[_Compiled],
        default: Verdict,
        api_key: int,
        version: int,
        of_names: dict[tuple["ApiRules", str, str], Verdict],
    ) -> None:
        """of_names: what names met, of all rules of a policy."""
        self._kinds = kinds = _kinds(api_key, version)
        self._rules = []
        for rule in rules:
            if rule.is_about(api_key, version, kinds):
                self._rules.append(rule)
                if not rule.named:
                    break
        self._default = default
        self._of_names = of_names
        # The one verdict whatever is named; None: it depends on that.
        self.constant: Verdict | None = None
        if not self._rules or not self._rules[0].named:
            self.constant = self.cluster()

    def named(self, kind: str, name: str) -> Verdict:
        """About one name."""
        verdict = self._of_names.get((self, kind, name))
        if verdict is None:
            verdict = next((rule.verdict for rule in self._rules if _matches(rule, kind, name)), self._default)
            if len(name) <= MAX_NAME:
                if len(self._of_names) >= MAX_REMEMBERED:
                    self._of_names.clear()
                self._of_names[self, kind, name] = verdict
        return verdict

    def depends_on(self, kind: str) -> bool:
        """Whether some names of that kind may pass and others not."""
        return len(self._outcomes(kind)) > 1

    def restricts(self, kind: str) -> bool:
        """Whether some names of that kind, or all, may not pass."""
        return False in self._outcomes(kind)

    def _outcomes(self, kind: str) -> set[bool]:
        outcomes = {rule.allows for rule in self._rules if not rule.named or kind in rule.named}
        if not self._rules or self._rules[-1].named:
            outcomes.add(self._default.allowed)
        return outcomes

    def cluster(self) -> Verdict:
        """About what is none of the kinds."""
        return next((rule.verdict for rule in self._rules if not rule.named), self._default)

    def nothing(self, kinds: Iterable[str] | None = None) -> Verdict:
        """About a request that names nothing, or asks for a list of these kinds."""
        kinds = self._kinds if kinds is None else kinds
        for rule in self._rules:
            if not rule.named or (rule.allows and not rule.named.keys().isdisjoint(kinds)):
                return rule.verdict
        return self._default

    def all_of(self, kind: str) -> Verdict:
        """About a request that touches every name of a kind."""
        for rule in self._rules:
            if not rule.named or (kind in rule.named and (not rule.allows or rule.named[kind].is_all)):
                return rule.verdict
        return self._default


def _matches(rule: _Compiled, kind: str, name: str) -> bool:
    if not rule.named:
        return True
    patterns = rule.named.get(kind)
    return patterns is not None and patterns.match(name)


class Clearance:
    """What clients may do whom the same rules apply to."""

    def __init__(self, policy: "Policy", rules: tuple[_Compiled, ...]) -> None:
        self._policy = policy
        self._rules = rules
        self._apis: dict[tuple[int, int], ApiRules] = {}

    def api(self, api_key: int, version: int) -> ApiRules:
        """The rules for an API and version that the schema has."""
        found = self._apis.get((api_key, version))
        if found is None:
            rules, default = self._rules, self._policy.default
            if self._policy.is_always(api_key):
                rules, default = (), ALWAYS_ALLOWED
            elif self._policy.read_only and api_key not in _readable():
                rules, default = (), READ_ONLY_DENIED
            found = ApiRules(rules, default, api_key, version, self._policy.of_names)
            if len(self._apis) >= MAX_CLEARANCES:
                self._apis.clear()
            self._apis[api_key, version] = found
        return found

    def sees(self, kind: str, name: str) -> bool:
        """Whether answers may mention it: whether the request that _DESCRIBING has for its kind may."""
        return self._describing(kind).named(kind, name).allowed

    @cached_property
    def sees_all(self) -> bool:
        """Whether answers may mention every topic, group and transactional id."""
        return not any(self._describing(kind).restricts(kind) for kind in KINDS)

    def _describing(self, kind: str) -> ApiRules:
        key = _DESCRIBING[kind]
        return self.api(key, schema().apis[key].request.versions[-1])

    def unknown(self, api_key: int, version: int) -> Verdict:
        """About a request that cannot be read: the schema lacks its key or version, or it carries another one."""
        if not self._policy.is_active:
            return self._policy.default
        if self._policy.is_always(api_key):
            return ALWAYS_ALLOWED
        if api_key in schema().apis and api_key != ENVELOPE:
            constant = self.api(api_key, version).constant
            edited = self._policy.read_only and api_key == METADATA
            edited = edited or (self._policy.hides_in(api_key) and not self.sees_all)
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
        """audits: administrative requests are wanted whole even if no rule is about them."""
        self.read_only = cluster.read_only
        self.filters_lists = cluster.filter_lists
        self.audits = audits
        self.rules = tuple(_Compiled(number, rule) for number, rule in enumerate(cluster.policy, 1))
        self.default = Verdict(default_of(cluster.policy, cluster.policy_default) == "allow", None, "default")
        self.is_active = bool(self.rules) or self.read_only or not self.default.allowed
        self.has_client_ids = any(rule.client_ids is not None for rule in self.rules)
        self._admin = group_keys("admin") if audits else frozenset()
        self._clearances: dict[tuple[int, ...], Clearance] = {}
        self.of_names: dict[tuple[ApiRules, str, str], Verdict] = {}  # remembered, and of no use to others

    @property
    def is_empty(self) -> bool:
        """Whether nothing would ever be decided."""
        return not (self.is_active or self.audits)

    @property
    def reasons(self) -> list[str]:
        """The reasons for which it can refuse."""
        never = {
            "rule": all(rule.allows for rule in self.rules),
            "default": self.default.allowed,
            "read_only": not self.read_only,
            "unknown_topic_id": not self.needs_names,
        }
        return [reason for reason in REASONS if not never.get(reason)]

    def caps(self) -> dict[int, int]:
        """API key -> the highest version to offer: of a newer one, requests that must be read could not be."""
        if not self.is_active:
            return {}
        return {
            key: api.request.versions[-1]
            for key, api in schema().apis.items()
            if self.authorizes(key, api.request.versions[-1])
        }

    @cached_property
    def needs_names(self) -> bool:
        """Whether requests that name topics by id depend on which topics these are."""
        return any(TOPIC in rule.named for rule in self.rules)

    def is_always(self, api_key: int) -> bool:
        return api_name(api_key) in ALWAYS

    def is_audited(self, api_key: int) -> bool:
        """Whether every request of that API leaves a line in the audit."""
        return api_key in self._admin

    def authorizes(self, api_key: int, version: int) -> bool:
        """Whether requests of that API and version are decided at all: False if every client may send every one."""
        if api_key in self._admin:
            return True
        if not self.is_active or self.is_always(api_key):
            return False
        if api_key not in schema().apis or api_key == ENVELOPE:
            return True
        if self.read_only and (api_key not in _readable() or api_key == METADATA):
            return True
        if self.hides_in(api_key):
            return True
        kinds = _kinds(api_key, version)
        for rule in self.rules:
            if rule.is_about(api_key, version, kinds):
                if not rule.allows:
                    return True
                if rule.is_for_all:
                    return False
        return not self.default.allowed

    def hides_in(self, api_key: int) -> bool:
        """Whether answers of that API can mention what some client may not see."""
        return self.filters_lists and api_name(api_key) in MENTIONED and self._tells_names_apart

    @cached_property
    def _tells_names_apart(self) -> bool:
        return any(rule.named for rule in self.rules)

    def clears_auto_creation(self, api_key: int, version: int) -> bool:
        """Whether brokers must not create a topic that such a request asks for."""
        return self.read_only and api_key == METADATA and version >= _FIRST_METADATA_WITH_AUTO_CREATION

    def identity(self, principal: str, address: str) -> Callable[[str | None], Clearance]:
        """What a client of that principal and address may do, by the client id of each of its requests."""
        mine = tuple(rule for rule in self.rules if rule.is_for(principal, address))
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
    """The keys that a read-only listener passes."""
    return frozenset().union(*map(group_keys, READ_ONLY))


@cache
def _kinds(api_key: int, version: int) -> frozenset[str]:
    """What requests can name; of a version that the schema lacks, what some version of that API can."""
    api = schema().apis.get(api_key)
    if api is None:
        return frozenset()
    if version in api.request.versions:
        return kinds_of(api_key, version)
    return frozenset().union(*(kinds_of(api_key, known) for known in api.request.versions))
