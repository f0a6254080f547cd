"""The bounds of a login at kproxy are those that the docs state."""

from kproxy.proxy.sasl import checks, clients, tokens
from tests.documented import missing, size


def test_the_bounds_of_a_login_are_those_of_the_docs() -> None:
    assert not missing(
        "sasl.md",
        f"A token has {size(tokens.MAX_TOKEN_BYTES)} at most, a message of SCRAM {checks.MAX_SCRAM_BYTES:,} bytes,"
        f" and the claim that names the user {tokens.MAX_NAME:,} characters",
    )
    assert not missing("limits.md", f" {size(clients.MAX_FRAME)} of a frame | 16 MiB of a cluster | the client")
