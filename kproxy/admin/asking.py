"""The client of the admin port of a running kproxy (`server.py`), on the standard library alone.

A failure is a KproxyError with its remedy: connection refused, a missing token, TLS. Bounded: an answer of MAX_ANSWER
bytes, TIMEOUT_S without a byte. Refuses to know the meaning of requests, and how answers look.
"""

import http
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kproxy.errors import KproxyError
from kproxy.proxy.config.files import named

DEFAULT = "localhost:9600"
MAX_TOKEN = 4096
MAX_ANSWER = 256 * 1024 * 1024
MAX_LINE = 16 * 1024 * 1024
TIMEOUT_S = 30.0
# Browsers forbid scripts to set a header with Sec- (https://fetch.spec.whatwg.org/#forbidden-request-header): a request
# with it comes from no web page.
NO_PAGE = "Sec-Kproxy"


def token_in(file: BinaryIO) -> bytes:
    """The token in an open file. Raises ValueError, without the content, unless it is one word of visible ASCII."""
    token = file.read(MAX_TOKEN + 1).strip()
    if not 0 < len(token) <= MAX_TOKEN or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ValueError(f"it should be one word of at most {MAX_TOKEN} ASCII characters")
    return token


class AdminPort:
    """An admin port at [http[s]://]HOST:PORT, or at a port of this machine. ca: certificates of a CA; implies TLS."""

    def __init__(
        self, address: str, token_file: Path | None = None, ca: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._timeout_s = timeout_s
        address = address.strip().rstrip("/")
        if address.isdigit() or address.startswith(":"):
            address = f"localhost:{address.lstrip(':')}"
        if "://" not in address:
            address = f"{'https' if ca is not None else 'http'}://{address}"
        try:
            parts = urllib.parse.urlsplit(address)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            sound = sound and "@" not in parts.netloc  # a password, which the admin port does not accept
        except ValueError:  # a port above 65535, a bracket that is not closed
            sound = False
        if not sound:
            raise KproxyError(
                f"{address.rpartition('@')[2]} is no address of an admin port: give [http[s]://]HOST:PORT, or a PORT "
                "of here, and its token by --token-file"
            )
        self.url = address
        self._token_file = token_file
        self._headers = {"X-Kproxy": "ctl", NO_PAGE: "ctl", "Accept": "application/json"}
        if token_file is not None:
            try:
                with token_file.open("rb") as file:  # may be a pipe: <(vault read ...)
                    self._headers["Authorization"] = f"Bearer {token_in(file).decode()}"
            except (OSError, ValueError) as fault:
                raise KproxyError(
                    f"{named(token_file)} holds no token: {getattr(fault, 'strerror', None) or fault}"
                ) from None
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirects()]
        if address.startswith("https"):
            try:
                context = ssl.create_default_context(cafile=None if ca is None else str(ca))
            except OSError as fault:
                raise KproxyError(f"{ca} holds no certificates of a CA: {fault}") from None
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, **parameters: Any) -> Any:
        """The JSON value that GET returns. Raises KproxyError."""
        query = urllib.parse.urlencode({name: value for name, value in parameters.items() if value is not None})
        with self._open("GET", f"{path}?{query}" if query else path) as answer:
            return self._json(answer)

    def post(self, path: str, *, timeout_s: float = TIMEOUT_S, **parameters: Any) -> tuple[int, Any]:
        """POST parameters that are not None; return (HTTP status, JSON value). Raises KproxyError."""
        try:
            with self._open("POST", path, parameters, timeout_s) as answer:
                return answer.status, self._json(answer)
        except _Answered as refusal:
            return refusal.status, refusal.value

    def stream(self, path: str, **parameters: Any) -> Iterator[Any]:
        """Yield the JSON lines of the response to a POST as they arrive, without empty ones. Raises KproxyError."""
        with self._open("POST", path, parameters) as answer:
            try:
                while line := answer.readline(MAX_LINE):
                    if line.strip():
                        yield json.loads(line)
            except (OSError, http.client.HTTPException) as fault:
                raise KproxyError(f"{self.url} stopped answering: {fault or type(fault).__name__}") from None

    def _open(
        self, method: str, path: str, parameters: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        body = None
        if parameters is not None:
            body = json.dumps({name: value for name, value in parameters.items() if value is not None}).encode()
        try:
            asked = urllib.request.Request(f"{self.url}{path}", body, self._headers, method=method)
            return self._opener.open(asked, timeout=self._timeout_s if timeout_s is None else timeout_s)
        except urllib.error.HTTPError as refusal:
            raise self._refused(refusal) from None
        except urllib.error.URLError as fault:
            raise KproxyError(f"{self.url} cannot be asked: {_why(fault.reason)}") from None
        except (OSError, http.client.HTTPException, ValueError) as fault:
            raise KproxyError(f"{self.url} cannot be asked: {_why(fault)}") from None

    def _refused(self, refusal: urllib.error.HTTPError) -> KproxyError:
        if 300 <= refusal.code < 400:
            return KproxyError(f"{self.url} is not where it answers: it sends to {refusal.headers.get('Location')!r}")
        text = refusal.read(64 * 1024).decode(errors="replace").strip()
        if refusal.code == 401:
            if self._token_file is not None:
                return KproxyError(f"{self.url} wants another token than the one in {self._token_file}")
            return KproxyError(f"{self.url} wants its token: --token-file FILE, or KPROXY_ADMIN_TOKEN_FILE")
        try:
            value = json.loads(text)
        except ValueError:
            if text.startswith("no such "):  # as the admin port says it
                return KproxyError(f"{self.url} cannot say that: it is `kproxy watch`, or another version ({text})")
            if refusal.code == http.HTTPStatus.NOT_FOUND or text.startswith("<"):
                reply = f"it answers {refusal.code} {refusal.reason}"
                return KproxyError(
                    f"{self.url} is no admin port of kproxy: {reply}; --admin of kproxy run says which is"
                )
            return KproxyError(f"{self.url}: {text or refusal.reason}")
        return _Answered(refusal.code, value)

    def _json(self, answer: Any) -> Any:
        try:
            data = answer.read(MAX_ANSWER + 1)
            if len(data) > MAX_ANSWER:
                raise KproxyError(f"{self.url} answers with more than {MAX_ANSWER} bytes")
            return json.loads(data)
        except (OSError, http.client.HTTPException) as fault:
            raise KproxyError(f"{self.url} stopped answering: {fault or type(fault).__name__}") from None
        except ValueError:
            raise KproxyError(f"{self.url} is no admin port of kproxy: what it answers is not JSON") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token goes only to the host that the user named."""

    def redirect_request(self, *_: Any) -> None:
        """Return None: the redirect itself is the answer."""


class _Answered(KproxyError):
    """A refusal with a JSON value."""

    def __init__(self, status: int, value: Any) -> None:
        self.status = status
        self.value = value
        super().__init__(json.dumps(value))


def _why(fault: Any) -> str:
    if isinstance(fault, ConnectionRefusedError):
        return "nobody listens there; kproxy run --admin HOST:PORT opens that port"
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({fault.verify_message}): give --ca FILE"
    if isinstance(fault, ssl.SSLError):
        return f"TLS failed ({fault.reason or fault}): is it http://?"
    if isinstance(fault, (http.client.HTTPException, ConnectionResetError)):
        return (
            "it does not answer with HTTP: does it speak TLS (https://), or Kafka? --admin of kproxy run says which "
            "port is the admin port"
        )
    return str(getattr(fault, "strerror", None) or fault or type(fault).__name__)
