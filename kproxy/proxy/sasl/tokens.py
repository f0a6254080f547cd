"""OAUTHBEARER tokens: signed JWTs, checked with the keys of a JWKS (RFC 7517) from a file or over HTTPS.

Only public-key signatures are accepted, by the algorithms listed here, never by the token's choice. A fetch follows no
redirect. Bounds: MAX_TOKEN_BYTES, MAX_JWKS_BYTES, MAX_KEYS, MAX_NAME, FETCH_S. No text contains a token.
"""

import json
import ssl
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from kproxy.proxy.config.files import open_regular

MAX_TOKEN_BYTES = 64 * 1024
MAX_JWKS_BYTES = 1024 * 1024
MAX_KEYS = 64
MIN_RSA_BITS = 2048  # RFC 7518, 3.3; brokers refuse shorter keys too
MAX_NAME = 1024  # characters of a user's name; it stays with the connection
FETCH_S = 10.0
_SILENCE_S = 5.0  # s that the JWKS server may send nothing
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}  # RFC 7518, 3.4
_TYPES = {"ES": "EC", "Ed": "OKP"}  # of keys, by the first letters of an algorithm; others are RSA
_JWE_PARTS = 5  # of an encrypted token (RFC 7516); a signed one has 3

_REQUIRED = {
    "exp": "'exp', which says when it expires",
    "iss": "'iss', which says who issued it",
    "aud": "'aud', which says for whom it is: issue it with an audience, or check another claim (client_claim)",
}
_TIMES = ("exp", "nbf", "iat")


class TokenError(ValueError):
    """The reason why a token is refused, or keys are unavailable; without any content of the token."""


class UnknownKeyError(TokenError):
    """None of the loaded keys made the signature: newer ones may have."""


class _UnusedKeyError(ValueError):
    """A key of a JWKS checks no signatures; the text is the reason."""


class Claims(NamedTuple):
    """The used claims of a token."""

    name: str
    expires_s: float  # seconds since the epoch


class TokenChecker:
    """Checks tokens with the keys last given to `use`."""

    def __init__(
        self,
        *,
        issuer: str | None,
        audience: tuple[str, ...],
        claim: str,
        skew_s: float,
        client_claim: str | None = None,
        clients: tuple[str, ...] = (),
    ) -> None:
        """client_claim: the claim with the client that the token was issued to, which must be one of `clients`."""
        import jwt  # an optional extra, needed only to check tokens

        self._jwt: Any = jwt
        self._issuer = issuer
        self._audience = audience
        self._claim = claim
        self._client_claim = client_claim
        self._clients = clients
        self._skew_s = skew_s
        self._required = ["exp", *(["iss"] if issuer is not None else []), *(["aud"] if audience else [])]
        self._keys: list[tuple[str | None, Any]] = []  # (key id, key)
        self._note = ""  # which keys of the JWKS are not used, and why

    def use(self, jwks: bytes) -> None:
        """Use these keys from now on. Raises TokenError, and keeps the former keys then."""
        try:
            document = json.loads(jwks)
            entries = document["keys"]
            if not isinstance(entries, list):
                raise TypeError
        except (ValueError, LookupError, TypeError, RecursionError):
            raise TokenError('the keys are no JWKS: JSON like {"keys": [...]}') from None
        keys: list[tuple[str | None, Any]] = []
        unused: Counter[str] = Counter()
        for entry in entries:
            try:
                if len(keys) == MAX_KEYS:
                    raise _UnusedKeyError(f"beyond the first {MAX_KEYS}")
                keys.append(self._key(entry))
            except _UnusedKeyError as reason:
                unused[str(reason)] += 1
        note = f" (not used: {', '.join(f'{count} {reason}' for reason, count in unused.items())})" if unused else ""
        if not keys:
            raise TokenError(f"the JWKS holds no public key that could check a signature{note}")
        self._keys, self._note = keys, note

    def _key(self, entry: object) -> tuple[str | None, Any]:
        """Return (key id, key) of an entry of a JWKS; null stands for a missing member. Raises _UnusedKeyError."""
        if not isinstance(entry, dict):
            raise _UnusedKeyError("no JSON object")
        entry = {name: value for name, value in entry.items() if value is not None and (name, value) != ("alg", "")}
        if "d" in entry:  # a private key: its readers can issue tokens
            raise _UnusedKeyError("a private key: publish its public part alone")
        operations = entry.get("key_ops", ["verify"])
        if entry.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
            raise _UnusedKeyError("not for signatures (use, key_ops)")
        if entry.get("kty") == "oct":
            raise _UnusedKeyError("a shared secret (kty oct)")
        _check_algorithm(entry)
        try:
            key = self._jwt.PyJWK.from_dict(entry)
        except Exception as fault:  # other keys may work
            if "on the curve" in str(fault):
                raise _UnusedKeyError(f"an EC key whose x and y are no point of {entry.get('crv')}") from None
            raise _UnusedKeyError("of an unknown type or curve, or incomplete") from None
        if key.algorithm_name not in ALGORITHMS:  # without `alg` the curve decides
            raise _UnusedKeyError(f"of a curve that no checked algorithm has ({entry.get('crv')})")
        if entry["kty"] != "RSA":
            return entry.get("kid"), key
        if key.key.key_size < MIN_RSA_BITS:
            raise _UnusedKeyError(f"an RSA key of less than {MIN_RSA_BITS} bits")
        # An RSA key without `alg` is valid for every RSA algorithm (RFC 7517, 4.4); PyJWT would accept only RS256.
        return entry.get("kid"), key if "alg" in entry else key.key

    def check(self, token: str) -> Claims:
        """Return the claims of a valid token. Raises UnknownKeyError if no loaded key fits, or TokenError."""
        jwt = self._jwt
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            raise TokenError(_why_not_signed(token)) from None
        algorithm = header.get("alg")
        if algorithm not in ALGORITHMS:
            raise TokenError(f"its algorithm is none of {', '.join(ALGORITHMS)}")
        wanted = header.get("kid")
        fitting = [key for kid, key in self._keys if wanted is None or kid is None or kid == wanted]
        if not fitting:
            raise UnknownKeyError(f"no key of the JWKS has the id that it names{self._note}")
        for key in fitting:
            try:
                claims = self._claims(token, key, algorithm)
                break
            except (jwt.InvalidSignatureError, jwt.InvalidAlgorithmError, jwt.InvalidKeyError, TypeError):
                continue
            except jwt.PyJWTError as fault:
                raise TokenError(self._reason(fault)) from None
        else:
            raise UnknownKeyError(f"its signature is not by a key of the JWKS{self._note}")
        if self._client_claim is not None:
            client = claims.get(self._client_claim)
            if client is None:
                raise TokenError(f"it has no claim {self._client_claim!r}, which client_claim asks for")
            if client not in self._clients:
                raise TokenError(f"its claim {self._client_claim!r} is none of the allowed_clients")
        name = claims.get(self._claim)
        if name is None or name == "":
            raise TokenError(f"it has no claim {self._claim!r}, which names the user")
        if not _is_text(name):
            raise TokenError(f"its claim {self._claim!r}, which names the user, is no text")
        if len(name) > MAX_NAME:
            raise TokenError(f"its claim {self._claim!r}, which names the user, has more than {MAX_NAME} characters")
        try:
            return Claims(name, float(claims["exp"]))
        except OverflowError:
            raise TokenError("it expires (exp) after all times that kproxy can represent") from None

    def _claims(self, token: str, key: Any, algorithm: str) -> dict[str, Any]:
        claims: dict[str, Any] = self._jwt.decode(
            token,
            key=key,
            algorithms=[algorithm],
            issuer=self._issuer,
            audience=list(self._audience) or None,
            leeway=self._skew_s,
            options={
                "require": self._required,
                "verify_aud": bool(self._audience),
                "verify_sub": False,  # `check` looks at the claim that names the user
                "verify_jti": False,
            },
        )
        return claims

    def claimed(self, token: str) -> str:
        """Return the name in a refused token, which is unproven; "" if there is none that can be read."""
        try:
            name = self._jwt.decode(token, options={"verify_signature": False}).get(self._claim)
        except (self._jwt.PyJWTError, ValueError, RecursionError):
            return ""
        return name if _is_text(name) and len(name) <= MAX_NAME else ""

    def _reason(self, fault: Exception) -> str:
        """Return the reason in kproxy's words: the library's may quote the token."""
        jwt = self._jwt
        if isinstance(fault, jwt.MissingRequiredClaimError) and fault.claim in _REQUIRED:
            return f"it has no claim {_REQUIRED[fault.claim]}"
        for kind, text in (
            (jwt.ExpiredSignatureError, "it has expired (exp)"),
            (jwt.InvalidIssuerError, "its issuer (iss) is not the configured one"),
            (jwt.InvalidAudienceError, "its audience (aud) is not the configured one"),
            (
                jwt.ImmatureSignatureError,
                f"it is not valid yet ({'iat' if '(iat)' in str(fault) else 'nbf'}): if a clock is wrong, set it, or "
                "allow for it (clock_skew_s)",
            ),
        ):
            if isinstance(fault, kind):
                return text
        for claim in _TIMES:
            if f"({claim})" in str(fault):
                return f"its claim {claim!r} is no number of seconds"
        return "it is no valid JWT"


def _check_algorithm(entry: dict[str, Any]) -> None:
    """Raise _UnusedKeyError if the algorithm of a JWKS entry is not checked, or is not for the type of its key."""
    algorithm = entry.get("alg")
    if algorithm is None:
        return
    if algorithm not in ALGORITHMS:
        raise _UnusedKeyError(f"for another algorithm (alg) than {', '.join(ALGORITHMS)}")
    kind = _TYPES.get(algorithm[:2], "RSA")
    if entry.get("kty") != kind:
        raise _UnusedKeyError(f"of another type than that of its algorithm: {algorithm} is for {kind}")
    curve = CURVES.get(algorithm)
    if curve is not None and entry.get("crv") != curve:
        raise _UnusedKeyError(f"of another curve than that of its algorithm: {algorithm} is for {curve}")


def _why_not_signed(token: str) -> str:
    """Return why a token has no header that could be read."""
    parts = token.count(".") + 1
    if parts == _JWE_PARTS:
        return "it is encrypted (JWE), not a signed JWT: have it issued as a signed one"
    if token and parts == 1:
        return "it is opaque, no signed JWT, so that only its issuer can check it: have it issued as a JWT"
    return "it is no signed JWT"


def _is_text(name: object) -> TypeGuard[str]:
    """Whether it is a text that UTF-8 can encode: JSON can also name half a surrogate pair."""
    if not isinstance(name, str):
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def fetch(url: str, ca_file: Path | None) -> bytes:
    """Return the JWKS at an https URL; blocks the calling thread. Raises TokenError."""
    import http.client  # with urllib.request 1 MB, needed only for keys behind a URL
    import urllib.request

    class NoRedirection(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    end = time.monotonic() + FETCH_S

    class UntilTheEnd(ssl.SSLSocket):
        """Ends all reads after FETCH_S: a header sent byte by byte would be read for ever."""

        def recv_into(self, *args: Any, **kwargs: Any) -> int:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise TokenError(f"the JWKS did not arrive within {FETCH_S:g} s")
            self.settimeout(min(left_s, _SILENCE_S))
            return super().recv_into(*args, **kwargs)

    try:
        context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
        context.sslsocket_class = UntilTheEnd
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), NoRedirection())
        with opener.open(
            urllib.request.Request(url, headers={"Accept": "application/json"}), timeout=_SILENCE_S
        ) as answer:
            data = bytearray()
            while part := answer.read1(64 * 1024):
                data += part
                if len(data) > MAX_JWKS_BYTES:
                    raise TokenError(f"the JWKS has more than {MAX_JWKS_BYTES} bytes")
            return bytes(data)
    except (OSError, ValueError) as fault:
        if isinstance(fault, TokenError):
            raise
        raise TokenError(f"the JWKS cannot be fetched: {getattr(fault, 'reason', None) or fault}") from None
    except http.client.HTTPException as fault:  # its texts contain the server's response
        kind = type(fault).__name__
        raise TokenError(f"the JWKS cannot be fetched: the server there does not use HTTP ({kind})") from None


def read(path: Path) -> bytes:
    """Return the JWKS of a file. Raises TokenError."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_JWKS_BYTES + 1)
    except OSError as fault:
        raise TokenError(f"{path} cannot be read: {fault.strerror or fault}") from None
    if len(data) > MAX_JWKS_BYTES:
        raise TokenError(f"{path} has more than {MAX_JWKS_BYTES} bytes")
    return data
