"""Tokens: accepted signatures, required claims, and the sources of keys."""

import base64
import hashlib
import hmac
import http.server
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kproxy.proxy.sasl import tokens
from kproxy.proxy.sasl.tokens import TokenChecker, TokenError, UnknownKeyError
from tests.certificates import Authority

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())


def jwk(key: Any, **more: str) -> dict[str, Any]:
    algorithm = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return json.loads(algorithm.to_jwk(key.public_key())) | more


def jwks(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def token(key: Any = RSA, algorithm: str = "RS256", kid: str | None = "one", **claims: Any) -> str:
    body = {"sub": "alice", "iss": "https://issuer", "aud": "kafka", "exp": time.time() + 100_000} | claims
    body = {name: value for name, value in body.items() if value is not None}
    return jwt.encode(body, key, algorithm, headers={"kid": kid} if kid else {})


def signed(**claims: object) -> str:
    """A token with claims of types that the library would not issue."""
    body = {"sub": "alice", "iss": "https://issuer", "aud": "kafka", "exp": time.time() + 100_000} | claims
    return jwt.api_jws.encode(json.dumps(body).encode(), RSA, "RS256", headers={"kid": "one"})


def checker(*keys: dict[str, Any], claim: str = "sub") -> TokenChecker:
    checker = TokenChecker(issuer="https://issuer", audience=("kafka", "other"), claim=claim, skew_s=5)
    checker.use(jwks(*(keys or (jwk(RSA, kid="one"), jwk(EC, kid="two")))))
    return checker


def test_tokens_without_an_audience_are_those_of_clients_that_are_allowed() -> None:
    """As Keycloak, Okta and Entra issue access tokens; whatever the claim holds, another client's is refused."""
    settings = {"issuer": "https://issuer", "audience": (), "claim": "sub", "skew_s": 5}
    one = TokenChecker(**settings, client_claim="azp", clients=("shop", "billing"))
    one.use(jwks(jwk(RSA, kid="one")))
    assert one.check(token(aud=None, azp="billing")).name == one.check(token(aud="else", azp="shop")).name == "alice"
    with pytest.raises(TokenError, match="it has no claim 'azp', which client_claim asks for"):
        one.check(token(aud=None))
    for other in ("other", "", "sho", ["shop"], {"shop": 1}, 7, True):
        with pytest.raises(TokenError, match="its claim 'azp' is none of the allowed_clients") as refused:
            one.check(token(aud=None, azp=other))
        assert "other" not in str(refused.value)
    both = TokenChecker(**settings | {"audience": ("kafka",)}, client_claim="azp", clients=("shop",))
    both.use(jwks(jwk(RSA, kid="one")))
    assert both.check(token(azp="shop")).name == "alice"
    for bad in (token(aud="else", azp="shop"), token(azp="other"), token(aud=None, azp="shop")):
        with pytest.raises(TokenError):
            both.check(bad)


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed_by_the_public_key() -> str:
    """HS256 with the bytes of the public key as its shared secret, which everybody has."""
    pem = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    claims = {"sub": "alice", "iss": "https://issuer", "aud": "kafka", "exp": time.time() + 100_000}
    signed = ".".join(base64url(json.dumps(part).encode()) for part in ({"alg": "HS256", "kid": "one"}, claims))
    return f"{signed}.{base64url(hmac.new(pem, signed.encode(), hashlib.sha256).digest())}"


def test_tokens_of_known_keys_name_the_user() -> None:
    assert checker().check(token()).name == "alice"
    assert checker().check(token(EC, "ES256", "two")).name == "alice"
    assert checker().check(token(kid=None)).name == "alice"
    assert checker(claim="client").check(token(client="shop")).name == "shop"
    assert checker().check(token(exp=time.time() - 2)).expires_s < time.time()  # within the skew of clocks


@pytest.mark.parametrize("algorithm", [name for name in tokens.ALGORITHMS if name.startswith(("RS", "PS"))])
def test_an_rsa_key_without_an_algorithm_checks_each_of_rsa_and_one_with_it_that_alone(algorithm: str) -> None:
    assert checker(jwk(RSA, kid="one")).check(token(algorithm=algorithm)).name == "alice"
    assert checker(jwk(RSA, kid="one", alg=algorithm)).check(token(algorithm=algorithm)).name == "alice"
    with pytest.raises(UnknownKeyError, match="signature"):
        checker(jwk(OTHER, kid="one")).check(token(algorithm=algorithm))
    other = "PS384" if algorithm == "RS256" else "RS256"
    with pytest.raises(UnknownKeyError, match="signature"):
        checker(jwk(RSA, kid="one", alg=other)).check(token(algorithm=algorithm))
    with pytest.raises(UnknownKeyError, match="signature"):
        checker(jwk(EC, kid="one")).check(token(algorithm=algorithm))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (token(exp=time.time() - 10), "expired"),
        (token(exp=None), "no claim 'exp', which says when"),
        (token(iss="https://else"), "issuer"),
        (token(iss=None), "no claim 'iss', which says who"),
        (token(aud="mine"), "audience"),
        (token(aud=None), "no claim 'aud', .*client_claim"),
        (token(nbf=time.time() + 86_400), r"not valid yet \(nbf\): .*clock_skew_s"),
        (token(iat=time.time() + 86_400), r"not valid yet \(iat\): .*clock_skew_s"),
        (token(sub=None), "claim 'sub'"),
        (token(sub=""), "claim 'sub'"),
        (signed(sub=42), "claim 'sub', which names the user, is no text"),
        (signed(sub="\ud800"), "claim 'sub', which names the user, is no text"),
        (signed(exp="soon"), "claim 'exp' is no number of seconds"),
        (signed(nbf=None), "claim 'nbf' is no number of seconds"),
        (signed(iat=[]), "claim 'iat' is no number of seconds"),
        (token(sub="a" * (tokens.MAX_NAME + 1)), "claim 'sub', .* more than 1024 characters"),
        (token(exp=10**400), "after all times that kproxy can represent"),
        (jwt.encode({"sub": "alice"}, None, "none"), "algorithm"),
        (jwt.encode({"sub": "alice"}, "shared" * 10, "HS256", headers={"kid": "one"}), "algorithm"),
        (signed_by_the_public_key(), "algorithm"),
        # Brackets that are never closed: no parser may go as deep.
        (base64url(b'{"alg":' + b"[" * 40_000) + ".e30.AA", "no signed JWT"),
        (jwt.api_jws.encode(b"[" * 40_000, RSA, "RS256", headers={"kid": "one"}), "no valid JWT"),
        ("a.b.c", "no signed JWT"),
        ("a.b.c.d.e", r"it is encrypted \(JWE\)"),
        ("3f8a9c", "it is opaque, no signed JWT"),
        ("", "no signed JWT"),
        ("." * 1000, "no signed JWT"),
    ],
)
def test_tokens_that_are_refused(bad: str, said: str) -> None:
    with pytest.raises(TokenError, match=said) as refused:
        checker().check(bad)
    assert not isinstance(refused.value, UnknownKeyError)
    assert not bad or bad not in repr(refused.value)


def test_claims_that_do_not_name_the_user_may_be_of_any_type() -> None:
    assert checker(claim="client").check(signed(client="shop", sub=42, jti=7)).name == "shop"
    for unproven in (signed(sub="\ud800"), signed(sub=42)):
        assert checker().claimed(unproven) == ""


SHORT = rsa.generate_private_key(public_exponent=65537, key_size=1024)
EC_521 = json.loads(
    jwt.algorithms.ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP521R1()).public_key())  # type: ignore[no-untyped-call]
)
PRIVATE = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (jwk(RSA, use="enc"), "not for signatures"),
        (jwk(RSA) | {"key_ops": ["encrypt", "wrapKey"]}, "not for signatures"),
        (PRIVATE, "a private key: publish its public part alone"),
        (jwk(SHORT), "an RSA key of less than 2048 bits"),
        ({"kty": "oct", "k": "c2"}, "a shared secret"),
        ({"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA"}, r"for another algorithm \(alg\) than RS256, .* EdDSA"),
        ({"kty": "AKP", "pub": "AA"}, "of an unknown type or curve"),
        (jwk(EC, alg="ES256K"), r"for another algorithm \(alg\)"),
        (jwk(RSA, alg="RSA-OAEP"), r"for another algorithm \(alg\)"),
        (jwk(RSA) | {"alg": ["RS256"]}, r"for another algorithm \(alg\)"),
        (jwk(RSA, alg="ES256"), "of another type than that of its algorithm: ES256 is for EC"),
        (jwk(EC, alg="PS256"), "of another type than that of its algorithm: PS256 is for RSA"),
        (jwk(EC, alg="EdDSA"), "of another type than that of its algorithm: EdDSA is for OKP"),
        (jwk(ec.generate_private_key(ec.SECP256K1())), r"of a curve that no checked algorithm has \(secp256k1\)"),
        ({"kty": "RSA", "n": "AQAB"}, "incomplete"),
        (EC_521 | {"alg": "ES256"}, "of another curve than that of its algorithm: ES256 is for P-256"),
        (EC_521 | {"x": EC_521["y"], "y": EC_521["x"]}, "an EC key whose x and y are no point of P-521"),
        (3, "no JSON object"),
    ],
)
def test_keys_that_check_no_signature_are_left_out_with_the_reason(entry: Any, reason: str) -> None:
    """Next to a matching key they change nothing; if no key matches, the error has the reason for leaving them out."""
    with pytest.raises(TokenError, match=rf"no public key .*\(not used: 1 .*{reason}"):
        checker(entry)
    assert checker(entry, jwk(RSA, kid="one")).check(token()).name == "alice"
    with pytest.raises(UnknownKeyError, match=rf"signature is not .*\(not used: 1 .*{reason}"):
        checker(entry, jwk(OTHER)).check(token())


def test_null_and_an_empty_algorithm_are_members_that_are_missing_and_keys_that_do_not_count_take_no_place() -> None:
    nothing = dict.fromkeys(("use", "key_ops", "alg"))
    assert checker(jwk(RSA, kid="one", alg="")).check(token(algorithm="RS512")).name == "alice"
    assert checker(jwk(RSA, kid="one") | nothing).check(token(algorithm="RS512")).name == "alice"
    others = [jwk(OTHER, kid=str(each), use="enc") for each in range(tokens.MAX_KEYS)]
    assert checker(*others, jwk(RSA, kid="one")).check(token()).name == "alice"
    usable = [jwk(OTHER, kid=str(each)) for each in range(tokens.MAX_KEYS)]
    assert checker(*usable[1:], jwk(RSA, kid="one")).check(token()).name == "alice"
    with pytest.raises(UnknownKeyError, match=r"has the id that it names \(not used: 1 beyond the first 64\)"):
        checker(*usable, jwk(RSA, kid="one")).check(token())


def test_tokens_with_signatures_of_other_keys_are_refused() -> None:
    for bad in (token(OTHER), token(OTHER, kid=None), token(kid="three"), token()[:-8] + "AAAAAAAA"):
        with pytest.raises(UnknownKeyError):
            checker().check(bad)


@pytest.mark.parametrize(
    "bad",
    [b"", b"{}", b"[]", b'{"keys": 3}', b"[" * 100_000, jwks(), b'{"keys": [{}, 3]}', jwks({"kty": "oct", "k": "c2"})],
)
def test_invalid_keys_leave_the_former_ones_in_use(bad: bytes) -> None:
    one = checker()
    with pytest.raises(TokenError):
        one.use(bad)
    assert one.check(token()).name == "alice"


class Issuer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/keys")
            self.end_headers()
            return
        if self.path == "/odd":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
            return
        if self.path == "/endless":
            with suppress(OSError):
                while True:
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(jwks(jwk(RSA, kid="one")) if self.path == "/keys" else b" " * (tokens.MAX_JWKS_BYTES + 10))

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    authority = Authority(tmp_path)
    certificate = authority.server("localhost")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Issuer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"https://localhost:{server.server_address[1]}", authority.bundle
    server.shutdown()
    thread.join()
    server.server_close()


def test_keys_come_over_verified_tls(issuer: tuple[str, Path], tmp_path: Path) -> None:
    url, ca = issuer
    one = checker()
    one.use(tokens.fetch(f"{url}/keys", ca))
    assert one.check(token()).name == "alice"
    for path, authorities in (("keys", None), *((path, ca) for path in ("large", "moved", "odd")), ("keys", tmp_path)):
        with pytest.raises(TokenError, match="JWKS"):
            tokens.fetch(f"{url}/{path}", authorities)


def test_an_answer_without_an_end_is_given_up(issuer: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of it comes in time, and none is of the keys."""
    monkeypatch.setattr(tokens, "FETCH_S", 0.2)
    url, ca = issuer
    with pytest.raises(TokenError, match=r"did not arrive within 0\.2 s"):
        tokens.fetch(f"{url}/endless", ca)


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    with pytest.raises(TokenError, match="cannot be read"):
        tokens.read(file)
    file.write_bytes(jwks(jwk(RSA)))
    assert tokens.read(file) == jwks(jwk(RSA))
    file.write_bytes(b" " * (tokens.MAX_JWKS_BYTES + 1))
    with pytest.raises(TokenError, match="more than"):
        tokens.read(file)
