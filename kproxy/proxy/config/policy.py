"""The settings of a policy: one table `[[cluster.policy]]` per rule. `filters/policy/policy.py` applies them.

Refuses to know requests and the resources that they name.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from kproxy.proxy.config.api_groups import api_keys
from kproxy.proxy.config.limits import network
from kproxy.proxy.config.model import Frozen

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_PATTERN = 1024  # characters; a topic's name has 249 at most
PRINCIPAL_TYPE = "User:"  # prefix of every principal of kproxy


def _several(value: Any) -> list[Any]:
    """Return a list of one value, or the values of a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _apis(value: Any) -> tuple[str, ...]:
    names = tuple(str(part) for part in _several(value) if not isinstance(part, bool))
    for name in names:
        api_keys(name)
    if not names:
        raise ValueError("is empty: leave it out if the rule is for every API")
    return names


def _versions(value: Any) -> tuple[range, ...]:
    ranges = []
    for part in _several(value):
        match = re.fullmatch(r"\s*([0-9]{1,5})\s*(-\s*([0-9]{1,5})?\s*)?", str(part))
        if match is None or isinstance(part, bool):
            raise ValueError(f"{part!r} is neither a version nor a range of them, like 0-8 or 9-")
        first = int(match[1])
        last = first if match[2] is None else int(match[3] or (1 << 15) - 1)
        if last < first:
            raise ValueError(f"{part!r} is no range of versions: the first must not exceed the last")
        ranges.append(range(first, last + 1))
    if not ranges:
        raise ValueError("is empty: leave it out if the rule is for every version")
    return tuple(ranges)


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = tuple(_several(value))
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"{pattern!r} is no text: quote it")
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"{pattern[:20]!r}... has more than {MAX_PATTERN} characters")
        if re.search(r"(?<!\\)(?:\\\\)*\\$", pattern):
            raise ValueError(f"{pattern!r} ends in a backslash, which makes the next character literal")
    if not patterns:
        raise ValueError("is empty: leave it out if the rule is for all")
    return patterns


def _networks(value: Any) -> tuple[Network, ...]:
    networks = [network(part) for part in _several(value)]
    if not networks:
        raise ValueError("is empty: leave it out if the rule is for every address")
    return tuple(networks)


Patterns = Annotated[tuple[str, ...], BeforeValidator(_patterns)]


def principal_pattern(pattern: str) -> str:
    """Return a pattern of principals. Raises ValueError if no principal with PRINCIPAL_TYPE can match it."""
    tokens = re.findall(r"\\.|[^\\]", pattern, re.DOTALL)
    if "*" in tokens:
        tokens = tokens[: tokens.index("*")]
    elif len(tokens) < len(PRINCIPAL_TYPE):
        tokens.append("")
    if any(token not in ("?", letter, f"\\{letter}") for token, letter in zip(tokens, PRINCIPAL_TYPE, strict=False)):
        like = PRINCIPAL_TYPE + re.sub(r"^\w*:", "", pattern)
        raise ValueError(f"{pattern!r} matches nobody: principals begin with their type, like {like!r}")
    return pattern


def _topics(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return patterns of topics. Raises ValueError for a character that no topic name has: it would match no topic."""
    for pattern in patterns:
        if not re.fullmatch(r"(?:\\?[a-zA-Z0-9._-]|[*?])+", pattern):
            text = "names have letters, digits, '.', '_' and '-', patterns '*' and '?' beside, and several are a list"
            raise ValueError(f"{pattern!r} matches no topic: {text}")
    return patterns


Topics = Annotated[Patterns, AfterValidator(_topics)]
Principals = Annotated[Patterns, AfterValidator(lambda patterns: tuple(map(principal_pattern, patterns)))]


class Rule(Frozen):
    """`[[cluster.policy]]`: clients, APIs and resources. A missing setting matches everything."""

    action: Literal["allow", "deny"]  # action for a request that the rule matches
    # Kafka's names of APIs, or groups of APIs: read, write, describe, admin, broker
    api: Annotated[tuple[str, ...], BeforeValidator(_apis)] = ("*",)
    # versions of the API, like 0-8 or 9-
    version: Annotated[tuple[range, ...], BeforeValidator(_versions)] | None = None
    topic: Topics | None = None  # patterns of topic names
    group: Patterns | None = None  # patterns of group ids
    transactional_id: Patterns | None = None  # patterns of transactional ids
    client_id: Patterns | None = None  # patterns of client ids
    principal: Principals | None = None  # patterns of principals, like User:billing
    address: Annotated[tuple[Network, ...], BeforeValidator(_networks)] | None = None  # networks of the clients

    @property
    def keys(self) -> frozenset[int] | None:
        """Return the API keys that the rule applies to; None: all."""
        sets = [api_keys(name) for name in self.api]
        return None if None in sets else frozenset().union(*(keys for keys in sets if keys is not None))


def default_of(rules: Iterable[Rule], chosen: str | None) -> str:
    """Return the action for a request that no rule matches: `policy_default` if it is set.

    Without it, "deny" if some rule allows something, since a list of allowed requests implies that others are denied;
    else "allow", since a list of denied requests implies that others are allowed.
    """
    return chosen or ("deny" if any(rule.action == "allow" for rule in rules) else "allow")
