"""The client's side of each SASL mechanism: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 and OAUTHBEARER.

A mechanism returns its first token, and then one for each challenge of the broker. PLAIN is RFC 4616, SCRAM RFC 5802
and 7677, OAUTHBEARER RFC 7628. Bounds: MIN_ITERATIONS and MAX_ITERATIONS of SCRAM, since the broker chooses the number
that kproxy computes; the answer to that challenge takes milliseconds, so it is computed on a thread (`is_slow`).
Refuses to know Kafka's frames.
"""

from typing import Any, Protocol

from kproxy.errors import UpstreamError
from kproxy.proxy.sasl.secrets import Secret

PLAIN = "PLAIN"
SCRAM_SHA_256 = "SCRAM-SHA-256"
SCRAM_SHA_512 = "SCRAM-SHA-512"
OAUTHBEARER = "OAUTHBEARER"
SCRAM = (SCRAM_SHA_256, SCRAM_SHA_512)
MECHANISMS = (PLAIN, *SCRAM, OAUTHBEARER)

MIN_ITERATIONS = 4096  # Kafka's own minimum (RFC 7677): fewer make it easy to find the password from a proof
MAX_ITERATIONS = 1_000_000  # half a second; Kafka's own limit for stored credentials is 16,384


class Mechanism(Protocol):
    """One login. No text may contain `secrets`."""

    @property
    def name(self) -> str: ...

    @property
    def secrets(self) -> tuple[Secret, ...]: ...

    @property
    def is_slow(self) -> bool:
        """Whether the next `answer` computes for milliseconds."""

    def first(self) -> bytes: ...

    def answer(self, challenge: bytes) -> bytes | None:
        """Return the token for a challenge, None at the end. Raises UpstreamError if the challenge is not genuine."""


class Plain:
    name = PLAIN
    is_slow = False

    def __init__(self, username: str, password: Secret) -> None:
        self.secrets = (password,)
        self._username = username
        self._password = password

    def first(self) -> bytes:
        return f"\0{self._username}\0{self._password.reveal()}".encode()

    def answer(self, challenge: bytes) -> bytes | None:
        return None


class Scram:
    """SCRAM: both sides prove that they know the password; the broker learns nothing new."""

    def __init__(self, name: str, username: str, password: Secret) -> None:
        from scramp import ScramClient  # needed only for logins by SCRAM
        from scramp.core import ScramException

        self.name = name
        self.secrets = (password,)
        self._fault: Any = ScramException
        self._client: Any = ScramClient([name], username, password.reveal())
        self._round = 0

    @property
    def is_slow(self) -> bool:
        return self._round == 1

    def first(self) -> bytes:
        self._round = 1
        return str(self._client.get_client_first()).encode()

    def answer(self, challenge: bytes) -> bytes | None:
        self._round += 1
        try:
            text = challenge.decode()
            if self._round == 2:
                self._client.set_server_first(text)
                iterations = int(self._client.iterations)
                if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
                    raise UpstreamError(
                        f"the broker asks for {iterations} iterations of {self.name}: kproxy computes {MIN_ITERATIONS} "
                        f"to {MAX_ITERATIONS}",
                        "login_protocol",
                    )
                return str(self._client.get_client_final()).encode()
            if self._round == 3:
                self._client.set_server_final(text)
                return None
        except (self._fault, ValueError) as fault:
            raise UpstreamError(f"the broker does not prove itself in {self.name}: {fault}", "login_protocol") from None
        raise UpstreamError(f"the broker goes on after {self.name} has ended", "login_protocol")


class OAuthBearer:
    name = OAUTHBEARER
    is_slow = False

    def __init__(self, token: Secret) -> None:
        self.secrets = (token,)
        self._token = token

    def first(self) -> bytes:
        return f"n,,\x01auth=Bearer {self._token.reveal()}\x01\x01".encode()

    def answer(self, challenge: bytes) -> bytes | None:
        return b"\x01" if challenge else None  # RFC 7628, 3.2.3: the client acknowledges an error, then the login fails
