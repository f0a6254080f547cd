"""The examples of docs/policy.md load, and its tables agree with the code."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.proxy.config.api_groups import GROUPS, api_keys
from kproxy.proxy.config.limits import network
from kproxy.proxy.config.load import load
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.filters.policy.explain import explain
from kproxy.proxy.filters.policy.policy import LISTS, Policy
from kproxy.proxy.sasl.users import change

PAGE = (Path(__file__).parents[3] / "docs" / "policy.md").read_text()
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["read-only", "shared", "guarded"])
def test_an_example_loads(example, tmp_path):
    file = tmp_path / "kproxy.toml"
    file.write_text(example)
    (cluster,) = load(file).clusters
    assert not Policy(cluster).is_empty


def test_the_example_of_two_applications_allows_what_its_comments_describe(tmp_path):
    file = tmp_path / "kproxy.toml"
    file.write_text(EXAMPLES[1])
    (cluster,) = load(file).clusters

    def may(api, principal, address="10.1.1.1", **names):
        return all(
            one.verdict.allowed for one in explain(cluster, api=api, principal=principal, address=address, **names)
        )

    assert may("Produce", "User:billing", topics=["invoices"])
    assert may("InitProducerId", "User:billing") and may("Fetch", "User:search")
    assert not may("Produce", "User:billing", topics=["products"])
    assert may("Fetch", "User:search", topics=["products"]) and not may("Produce", "User:search", topics=["products"])
    assert may("OffsetCommit", "User:search", topics=["products"], groups=["search"])
    assert not may("OffsetCommit", "User:search", topics=["products"], groups=["billing-1"])
    assert may("Metadata", "User:search") and may("DescribeCluster", "User:search")
    assert may("CreateTopics", "User:ops", "10.9.1.1", topics=["new"]) and not may(
        "CreateTopics", "User:ops", topics=["n"]
    )


def test_the_page_lists_every_group_every_list_and_every_setting():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([A-Z]\w+(?:, \w+)*) \|$", PAGE, re.MULTILINE))
    assert {group: tuple(names.split(", ")) for group, names in rows.items()} == {
        group: names for group, names in GROUPS.items() if group != "always"
    }
    assert all(name in PAGE for name in (*GROUPS["always"], *LISTS))
    assert all(f"`{name}`" in PAGE for name in Rule.model_fields)


def test_check_explains_a_request_as_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("kproxy.toml").write_text(EXAMPLES[1].replace("/var/log/kproxy/", "").replace("/etc/kproxy/", ""))
    change(Path("users"), "billing", "pass of billing")
    (command, output) = re.search(r"^\$ kproxy (check .*)\n((?:(?:topic|  rule) .*\n)+)", PAGE, re.MULTILINE).groups()
    done = CliRunner().invoke(cli, command.split())
    assert (done.output, done.exit_code) == (output, 1)
    done = CliRunner().invoke(cli, [*command.replace("--topic secrets", "").split(), "--json"])
    assert json.loads(done.output) == [{"what": "topic invoices", "allowed": True, "rule": 1, "reason": "rule"}]
    assert done.exit_code == 0


def test_names_numbers_and_groups_select_the_apis_of_a_rule():
    assert api_keys("*") is None
    assert api_keys("Produce") == {0} and api_keys("9999") == {9999} == api_keys("unknown_9999")
    assert api_keys("read") == frozenset().union(*map(api_keys, GROUPS["read"]))
    with pytest.raises(ValueError, match="did you mean DeleteTopics"):
        api_keys("deletetopic")


def test_a_mapped_ipv4_address_is_normalised() -> None:
    """Addresses of clients are compared in their IPv4 form: a rule with the mapped form would match nobody."""
    written = ("::ffff:10.1.2.3", "::ffff:10.0.0.0/104", "::ffff:0:0/96", "10.0.0.0/8", "::/0", "fe80::/10")
    assert [str(network(each)) for each in written] == [
        *("10.1.2.3/32", "10.0.0.0/8", "0.0.0.0/0", "10.0.0.0/8", "::/0", "fe80::/10")
    ]


@pytest.mark.parametrize("pattern", ["alice", "user:alice", "USER:*", "Users:alice", "Group:alice", "u*", "\\*", "?"])
def test_a_principal_pattern_that_matches_nobody_is_refused(pattern: str) -> None:
    """A rule to deny it would deny nobody."""
    with pytest.raises(ValueError, match="matches nobody: principals begin with their type, like 'User:"):
        Rule(action="deny", principal=pattern)


@pytest.mark.parametrize("pattern", ["User:alice", "User:*", "U*", "*", "*alice", "?ser:a", "\\User\\:a", "Us*r:a?"])
def test_a_principal_pattern_that_can_match_is_accepted(pattern: str) -> None:
    assert Rule(action="deny", principal=pattern).principal == (pattern,)


@pytest.mark.parametrize("pattern", ["secret-*, private-*", "a|b", "^secret", "[a-z]*", "", "a b", "\\*", "secret/*"])
def test_a_pattern_that_matches_no_topic_is_refused(pattern: str) -> None:
    """A rule to deny it would deny nothing."""
    with pytest.raises(ValueError, match="matches no topic: names have letters"):
        Rule(action="deny", topic=["orders", pattern])
    assert Rule(action="deny", topic=["secret-*", r"a\.b?_C"], group=pattern).topic == ("secret-*", r"a\.b?_C")


def test_check_refuses_options_without_a_request_and_impossible_values(tmp_path):
    """An exit status of 0 would mean "allowed"."""
    file = tmp_path / "kproxy.toml"
    file.write_text(EXAMPLES[2])

    def refused(*options):
        done = CliRunner().invoke(cli, ["check", str(file), *options])
        assert done.exit_code == 2
        return done.output.splitlines()[-1]

    fetch = ("--request", "Fetch", "--topic", "orders")
    assert refused("--topic", "secret-1") == "Error: --topic is about a request: add --request API"
    assert refused("--cluster", "guarded") == "Error: --cluster is about a request: add --request API"
    assert refused(*fetch, "--principal", "user:a").endswith("has the type before the name, like User:a")
    assert refused(*fetch, "--address", "10.1.2") == "Error: --address: '10.1.2' is no IP address, like 10.1.2.3"
    assert CliRunner().invoke(cli, ["check", str(file), *fetch]).exit_code == 0
