"""The bounds of a login at kproxy are those that the docs state."""

from kproxy.proxy.sasl import checks, clients, identities, keys, login, mechanisms, tokens, users
from tests.documented import missing, size


def test_the_bounds_of_a_login_are_those_of_the_docs() -> None:
    assert not missing(
        "sasl.md",
        f"A token may have {size(tokens.MAX_TOKEN_BYTES)}, a SCRAM message {checks.MAX_SCRAM_BYTES:,} bytes,"
        f" and the claim with the user's name {tokens.MAX_NAME:,} characters",
    )
    assert not missing(
        "limits.md", f" {size(clients.MAX_FRAME)} of a frame | 16 MiB of a cluster | kproxy refuses the client"
    )
    assert not missing(
        "inside/bounds.md",
        f"| a client's login | {clients.MAX_REQUESTS} requests of {size(clients.MAX_FRAME)};",
        f"| kproxy's login at a broker | {login.MAX_ROUNDS} tokens,",
        f" {mechanisms.MAX_ITERATIONS:,} iterations of SCRAM, on a thread;"
        f" a command's token {size(identities.MAX_SECRET_BYTES)} |",
        f"| files of {size(users.MAX_FILE_BYTES)} and {size(tokens.MAX_JWKS_BYTES)}; {tokens.MAX_KEYS} keys;"
        f" one fetch in {keys.MIN_INTERVAL_S:g} s, {tokens.FETCH_S:g} s long |",
    )
