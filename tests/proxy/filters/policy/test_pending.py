"""State that the policy keeps until a response arrives: counted, limited per connection and in total, and released."""

from kproxy.protocol.apis import DELETE_GROUPS, METADATA
from kproxy.proxy.filters.policy.pending import MAX_KEPT_BYTES, PendingBytes
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import HeldBudget
from kproxy.wire.state import MIN_NOTED_BYTES
from tests.proxy.filters.policy.policies import Decided
from tests.wire.playbook import request, response

NO_SECRETS = {"action": "deny", "topic": "secret-*"}


def asked(correlation_id, *names):
    return request(METADATA, 12, correlation_id, {"topics": [{"name": name} for name in names]})


def test_pending_bytes_are_refused_above_the_limit():
    held = HeldBudget(noted_limit_bytes=3 * MAX_KEPT_BYTES)
    pending = PendingBytes(held)
    assert pending.keep(1, MAX_KEPT_BYTES) and pending.keep(2, MIN_NOTED_BYTES)
    assert not pending.keep(3, MIN_NOTED_BYTES)
    assert pending.keep(3, MIN_NOTED_BYTES - 1)  # below the least that is counted
    assert held.noted_bytes == MAX_KEPT_BYTES + MIN_NOTED_BYTES
    pending.forget(2)
    assert pending.keep(2, 2 * MAX_KEPT_BYTES) and not pending.keep(4, MIN_NOTED_BYTES)
    pending.forget_all()
    assert held.noted_bytes == 0


def test_denied_names_of_unanswered_requests_have_a_limit_in_bytes(monkeypatch):
    """The denied names of a Metadata request are kept until its response: 60 requests of 1 MB must not keep 60 MB."""
    talk = Decided(NO_SECRETS)
    names = [f"secret-{n}".ljust(250, "x") for n in range(2000)]
    for number in range(60):
        talk.client(asked(number, "orders", *names))
        if talk.faults:
            break
    held = talk.authorizer._interest.held
    assert number == 2 and [fault.kind for fault in talk.faults] == ["refused"] and "await them" in talk.faults[0].text
    assert talk.refusals["Metadata", "too_large"] == 1
    assert held._noted_bytes == 0 and not talk.authorizer._edits  # the connection is closed

    talk = Decided(NO_SECRETS)
    monkeypatch.setattr(talk.authorizer._interest.held, "noted_limit_bytes", 1_000_000)
    talk.client(asked(1, "orders", *names))
    assert talk.authorizer._interest.held._noted_bytes > 600_000
    talk.broker(response(METADATA, 12, 1, {"topics": [{"name": "orders"}]}))
    assert talk.authorizer._interest.held._noted_bytes == 0 and not talk.faults
    long = [f"secret-{n}".ljust(30_000, "y") for n in range(20)]
    talk.client(asked(2, "orders", *names, *long))
    assert [fault.kind for fault in talk.faults] == ["refused"]


def test_audit_lines_that_wait_for_an_outcome_are_limited():
    talk = Decided(audits=True)
    names = [f"g-{n}".ljust(250, "x") for n in range(100)]
    for number in range(60):
        talk.client(request(DELETE_GROUPS, 2, number, {"groupsNames": names}))
    held = talk.authorizer._interest.held
    at_once = len(talk.audit.lines)
    assert at_once > 10 and {line["outcome"] for line in talk.audit.lines} == {"not_awaited"}
    assert MAX_KEPT_BYTES < held._noted_bytes < MAX_KEPT_BYTES + 50_000
    talk.broker(response(DELETE_GROUPS, 2, 0, {}))
    assert len(talk.audit.lines) == at_once + 1 and talk.audit.lines[-1]["outcome"] == "answered"
    talk.close(CLIENT).close(BROKER)
    assert len(talk.audit.lines) == 60 and held._noted_bytes == 0
