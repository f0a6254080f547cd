"""docs/policy.md as plain loops over rules: a second evaluator of the names that a response may mention.

Reads the groups of APIs from the table of that page. It imports nothing of kproxy, so its decisions do not depend on
the code under test.
"""

import fnmatch
import ipaddress
import re
from functools import cache
from typing import Any

from tests.project import ROOT

KINDS = ("topic", "group", "transactional_id")
# By kind: its rules decide whether responses of other APIs may mention a name.
DESCRIBES = {"topic": "Metadata", "group": "DescribeGroups", "transactional_id": "DescribeTransactions"}

OF_CLUSTER = {"DescribeLogDirs", "ListPartitionReassignments"}  # only rules without names allow these lists

Rule = dict[str, Any]


@cache
def groups_of_apis() -> dict[str, set[str]]:
    page = (ROOT / "docs/policy.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([A-Z]\w+(?:, \w+)+) \|$", page, re.MULTILINE)
    return {name: set(apis.split(", ")) for name, apis in rows}


class Naive:
    """One policy and one client of it."""

    def __init__(self, rules: list[Rule], default: str | None, principal: str, client_id: str, address: str) -> None:
        self.rules = [rule for rule in rules if self._is_for(rule, principal, client_id, address)]
        self.has_names = any(kind in rule for rule in rules for kind in KINDS)
        self.allows_others = default == "allow" or (default is None and all(rule["action"] == "deny" for rule in rules))

    @staticmethod
    def _is_for(rule: Rule, principal: str, client_id: str, address: str) -> bool:
        if not matches(rule.get("principal"), principal) or not matches(rule.get("client_id"), client_id):
            return False
        return "address" not in rule or ipaddress.ip_address(address) in ipaddress.ip_network(rule["address"])

    def may_name(self, api: str, kind: str, name: str) -> bool:
        """Whether a request of that API may name this resource."""
        for rule in self.rules:
            if not is_about(rule, api):
                continue
            if not any(of in rule for of in KINDS):
                return rule["action"] == "allow"
            if kind in rule and matches(rule[kind], name):
                return rule["action"] == "allow"
        return self.allows_others

    def may_see(self, kind: str, name: str) -> bool:
        """Whether responses may mention a name that the request did not contain."""
        return not self.has_names or self.may_name(DESCRIBES[kind], kind, name)

    def may_see_every(self, kind: str) -> bool:
        """Whether the rules allow every name of a kind."""
        if not self.has_names:
            return True
        for rule in self.rules:
            if not is_about(rule, DESCRIBES[kind]):
                continue
            if not any(of in rule for of in KINDS) or (kind in rule and rule["action"] == "deny"):
                return rule["action"] == "allow"
            if kind in rule and matches(rule[kind], "\0"):  # without names, only the glob `*` matches
                return True
        return self.allows_others

    def may_list(self, api: str, kind: str) -> bool:
        """Whether a request may ask for all names of a kind: it passes if the rules could allow at least one name."""
        for rule in self.rules:
            if not is_about(rule, api):
                continue
            if not any(of in rule for of in KINDS) or (rule["action"] == "allow" and kind in rule):
                return rule["action"] == "allow"
        return self.allows_others


def is_about(rule: Rule, api: str) -> bool:
    if api in OF_CLUSTER and rule["action"] == "allow" and any(kind in rule for kind in KINDS):
        return False
    wanted = rule.get("api", "*")
    for one in [wanted] if isinstance(wanted, str) else wanted:
        if one in ("*", api) or api in groups_of_apis().get(one, ()):
            return True
    return False


def matches(globs: str | list[str] | None, name: str) -> bool:
    """`*` is any text, `?` any character, a backslash makes the next one literal; None matches all."""
    if globs is None:
        return True
    for glob in [globs] if isinstance(globs, str) else globs:
        as_fnmatch = re.sub(r"\\(.)", r"[\1]", glob)
        if fnmatch.fnmatchcase(name, as_fnmatch):
            return True
    return False
