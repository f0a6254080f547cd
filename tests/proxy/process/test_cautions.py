"""What can run and is likely not meant, and what of the like is not worth a word."""

import tempfile
from pathlib import Path

import pytest

from kproxy.proxy.config.load import load
from kproxy.proxy.process.cautions import cautions
from kproxy.proxy.sasl.users import change

CLUSTER = {"listen": "127.0.0.1:9092", "bootstrap": ["kafka-1:9092"], "advertise": "kafka.example:{port}"}


def said(settings, **shared):
    config = load(given={"cluster": [{**CLUSTER, "name": "shop", **settings}], **shared})
    return [f"{place}: {text}" for place, text, _ in cautions(config)]


@pytest.fixture
def users(tmp_path):
    file = tmp_path / "users"
    for name in ("alice", "bob"):
        change(file, name, f"password of {name}")
    return {"mechanisms": ["PLAIN"], "users_file": str(file)}


def test_a_secret_that_every_user_may_read_is_named():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        token = folder / "token"
        token.write_text("a long token")
        admin = {"admin": "127.0.0.1:9600", "admin_token_file": str(token)}
        token.chmod(0o640)
        assert said({}, **admin) == []
        token.chmod(0o644)
        assert said({}, **admin) == [f"admin_token_file: every user of this host may read {token}"]
        link = folder / "link"  # as Kubernetes mounts a Secret
        link.symlink_to(token)
        assert said({}, **{**admin, "admin_token_file": str(link)}) == []
        folder.chmod(0o700)
        assert said({}, **admin) == []


ALLOW = {"action": "allow", "topic": "orders-*"}


def test_a_policy_that_refuses_nothing_is_named():
    assert said({"policy": [ALLOW]}) == []
    (line,) = said({"policy": [ALLOW, {"action": "allow"}]})
    assert line == "shop: policy[1]: allows everything to everybody, and no rule denies"
    assert said({"policy": [{"action": "deny", "topic": "secret"}, {"action": "allow"}]}) == []
    assert said({"policy": [ALLOW, {"action": "allow", "api": "describe"}]}) == []
    (line,) = said({"policy": [ALLOW], "policy_default": "allow"})
    assert line.startswith("shop: policy_default: ") and line.endswith("refuses nothing")


def test_principals_that_are_no_user_and_users_without_a_rule_are_named(users):
    def of(*principals):
        rules = [{**ALLOW, "principal": principal} for principal in principals]
        return said({"authentication": users, "policy": rules})

    file = users["users_file"]
    assert of("User:alice", "User:b*") == []
    assert of("User:alcie", "User:*") == [f"shop: policy[0].principal: no user of {file} is User:alcie"]
    assert of("User:alice") == ["shop: policy: can log in and are allowed nothing: User:bob"]
    assert said({"authentication": users, "policy": [ALLOW]}) == [], "rules for everybody"


def test_where_users_are_not_all_clients_principals_are_left_alone(users):
    rules = [{**ALLOW, "principal": "User:of-a-token"}]
    tokens = {"jwks_url": "https://issuer.example/keys", "issuer": "https://issuer.example", "audience": ["kafka"]}
    authentication = {**users, **tokens, "mechanisms": ["PLAIN", "OAUTHBEARER"]}
    assert said({"authentication": authentication, "policy": rules}) == []


def test_a_file_without_users_is_named_once(users, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("")
    rules = [{**ALLOW, "principal": "User:alice"}, {**ALLOW, "principal": "User:bob"}]
    (line,) = said({"authentication": {**users, "users_file": str(empty)}, "policy": rules})
    assert line == f"shop: authentication.users_file: {empty} has no user, so nobody can log in"


def test_questions_for_lag_that_are_asked_never_or_always_or_too_seldom_are_named():
    """Nobody sees that lag is missing for want of `detail`; defaults are not worth a word."""
    assert said({}) == said({"detail": "topics"}) == said({"detail": "topics", "lag": {"ask_interval_s": 1}}) == []
    (without,) = said({"lag": {"ask_interval_s": 5}})
    assert without.startswith("shop: lag: [cluster.lag] has no effect")
    (often,) = said({"detail": "batches", "lag": {"ask_interval_s": 0.001}})
    assert often == "shop: lag.ask_interval_s: a round of questions to each broker every 0.001 s"
    assert said({"detail": "topics", "lag": {"ask_interval_s": 0}}) == []
    assert said({"detail": "topics", "lag": {"ask_interval_s": 60}}) == []
    (seldom,) = said({"detail": "topics", "lag": {"ask_interval_s": 61}})
    assert seldom.startswith("shop: lag.ask_interval_s: a minute after each round, lag is unknown")
