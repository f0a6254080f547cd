"""The settings of clients' logins at kproxy: each mechanism with its required settings."""

from pathlib import Path

import pytest

from kproxy.proxy.config.load import load
from tests.proxy.config.test_login import HEAD, faults

TOKENS = 'mechanisms = ["OAUTHBEARER"]\njwks_file = "keys"\nissuer = "i"\naudience = "kafka"\n'


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("mechanisms = []\n", "mechanisms"),
        ('mechanisms = ["GSSAPI"]\n', "SCRAM-SHA-256"),
        ('mechanisms = ["PLAIN"]\n', "users_file: is missing"),
        (TOKENS + 'users_file = "users"\n', "no mechanism uses it"),
        (TOKENS + 'jwks_url = "https://issuer/keys"\n', "one of jwks_file and jwks_url"),
        (TOKENS.replace("jwks_file", "jwks_ca_file"), "one of jwks_file and jwks_url"),
        (TOKENS.replace('jwks_file = "keys"', 'jwks_url = "http://issuer/keys"'), "forge"),
        (TOKENS.replace('jwks_file = "keys"', 'jwks_url = "https://user:hunter2@issuer/keys"'), "without it"),
        (TOKENS.replace('jwks_file = "keys"', 'jwks_url = "http://user:hunter2@issuer/keys"'), "without it"),
        (TOKENS.replace('jwks_file = "keys"', 'jwks_url = "https://issuer:keys"'), "no URL"),
        (TOKENS.replace('jwks_file = "keys"', 'jwks_url = "https://issuer/my keys"'), "no URL of keys"),
        (TOKENS.replace('jwks_file = "keys"', 'jwks_url = "https:///keys"'), "no URL of keys"),
        (TOKENS.replace('issuer = "i"\n', ""), "issuer and audience"),
        (TOKENS.replace('audience = "kafka"\n', ""), "issuer and audience"),
        (TOKENS + 'client_claim = "azp"\n', "allowed_clients: is missing"),
        (TOKENS + 'allowed_clients = ["shop"]\n', "client_claim: is missing"),
        ('mechanisms = ["PLAIN"]\nusers_file = "users"\njwks_file = "keys"\n', "no mechanism uses it"),
        ('mechanisms = ["PLAIN"]\nusers_file = "users"\nsession_lifetime_s = 0\n', "session_lifetime_s"),
    ],
)
def test_missing_and_superfluous_settings_are_reported(tmp_path: Path, settings: str, said: str) -> None:
    message = faults(tmp_path, f"[cluster.authentication]\n{settings}")
    assert said in message and "authentication" in message and "hunter2" not in message


def test_tokens_without_an_audience_need_allowed_clients(tmp_path: Path) -> None:
    without = TOKENS.replace('audience = "kafka"\n', "") + 'client_claim = "azp"\nallowed_clients = "shop"\n'
    file = tmp_path / "kproxy.toml"
    file.write_text(f"{HEAD}[cluster.authentication]\n{without}")
    (cluster,) = load(file).clusters
    assert cluster.authentication is not None and cluster.authentication.allowed_clients == ("shop",)
