"""The bounds of a policy are those that the docs state."""

from kproxy.proxy.filters.policy import (
    audit,
    authorizer,
    globs,
    pending,
    policy,
    resources,
    share_sessions,
    topic_names,
)
from tests.documented import missing, size


def test_the_bounds_of_a_policy_are_those_of_the_docs():
    assert not missing(
        "limits.md",
        f"of more than {resources.FEW_ELEMENTS} elements or {size(authorizer.SHORT_REQUEST)},"
        f" and an answer of more than {size(authorizer.SHORT_ANSWER)} that it edits",
        f" {resources.MAX_ELEMENTS:,} elements of a request",
        f"| {policy.MAX_CLIENT_IDS} client ids of {policy.MAX_NAME} characters, {authorizer.MAX_TREATMENTS} APIs,"
        f" {share_sessions.MOST} share sessions |",
        f"of a cluster {size(policy.MAX_REMEMBERED_BYTES)} of names, 3 times {size(globs.MAX_BYTES)} of patterns,"
        f" {policy.MAX_API_RULES:,} rules by identity and API",
        f"of the policy's {size(pending.MAX_KEPT_BYTES)}",
        f" {size(audit.MAX_WAITING_BYTES)} of the audit",
    )
    assert not missing(
        "policy.md",
        f"at most {audit.MAX_NAMES} of a kind, {audit.MAX_NAME} characters each. A thread writes the lines;"
        f" {audit.MAX_WAITING:,} may",
    )
    assert not missing(
        "inside/bounds.md",
        f"| names of topics by id, for the policy | {topic_names.MAX_NAMES} per cluster |",
        f" for a connection under a policy | {share_sessions.MOST}, {authorizer.MAX_CURSORS} |",
        f"| {policy.MAX_REMEMBERED} of a cluster, in {size(policy.MAX_REMEMBERED_BYTES)};"
        f" {policy.MAX_CLEARANCES} sets of rules that apply |",
    )
