"""Authorization of requests to the admin port: by a token or from this machine, and never through a foreign web page.

- With a token file, every path except /health and /ready (and /metrics, if configured) requires `Authorization:
  Bearer`. kproxy reads the file again when it changes; while it cannot be read, the last token stays valid.
- Without a token, only clients on this machine may send requests that change something.
- A browser on this machine is such a client. A POST therefore requires a header that a foreign page cannot send.
- DNS rebinding: a page can be loaded from a foreign name that then resolves to this machine, and has the same origin.
  A request without a token must therefore have as its host a number, a name of this machine, or a name in
  `admin_hosts`. This holds for all paths over loopback. From other machines, metrics and probes are exempt, and so are
  names that no public DNS server can resolve: names without a dot, and those below `.svc`, `.local` and `.internal`.
  An attacker who controls such a name is in the network already and needs no browser.
- `kproxy ctl` and `top` may use any name: they send a header that browsers forbid pages to send.

Refuses to know the meaning of requests. Bounded: a token of 4096 bytes.
"""

import hmac
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from aiohttp import web

from kproxy.addresses import numeric
from kproxy.admin.asking import NO_PAGE, token_in
from kproxy.errors import ConfigError
from kproxy.proxy.config.files import named, open_regular
from kproxy.proxy.log_limiter import LogLimiter

HEADER = "X-Kproxy"  # any value; a page of another origin cannot send it
_OPEN = frozenset(("/health", "/ready"))
_SCRAPED = _OPEN | {"/metrics"}
_READS = frozenset(("GET", "HEAD"))
_PRIVATE = ("svc", "local", "internal", "localhost")  # of Kubernetes; RFC 6762; set aside by ICANN; RFC 6761

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("kproxy.admin")


class Token:
    """The token in a file. Raises ConfigError if the file has none at the start."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._token = b""
        self._limiter = LogLimiter(log)
        try:
            self._read()
        except (OSError, ValueError) as fault:
            reason = getattr(fault, "strerror", None) or fault
            raise ConfigError([("admin_token_file", f"{named(file)} holds no token: {reason}")]) from None

    def _read(self) -> None:
        status = self._file.stat()
        seen = (status.st_mtime_ns, status.st_ino, status.st_size)
        if seen == self._seen:
            return
        self._seen = seen
        with open_regular(self._file) as file:
            self._token = token_in(file)

    def accepts(self, authorization: str) -> bool:
        """Whether an Authorization header has the token that the file holds now."""
        try:
            self._read()
        except (OSError, ValueError) as fault:
            text = "admin_token_file %s: %s; the token that it held before stays in force"
            self._limiter.log(logging.WARNING, "token", text, self._file, getattr(fault, "strerror", None) or fault)
        scheme, _, given = authorization.partition(" ")
        same = hmac.compare_digest(given.strip().encode(errors="replace"), self._token)
        return same and scheme.lower() == "bearer"


class Guard:
    """Checks requests. token: None if the port requires none; open_metrics: /metrics requires none.

    open_page: the page requires none. It has no data: it prompts for the token, and sends it to /api/.
    hosts: further names of this machine.
    """

    def __init__(
        self,
        token: Token | None = None,
        *,
        open_metrics: bool = False,
        open_page: bool = False,
        hosts: Collection[str] = (),
    ) -> None:
        self._token = token
        self._hosts = frozenset(filter(None, map(_plain, hosts)))
        self._open = _OPEN | {"/metrics"} if open_metrics else _OPEN
        self._open_page = open_page

    def _is_open(self, path: str) -> bool:
        return path in self._open or (self._open_page and (path == "/" or path.startswith("/page/")))

    def _is_known(self, asked: str, path: str, is_local: bool) -> bool:
        """Whether a request without a token may have that Host header."""
        if _is_ours(asked) or _name_in(asked) in self._hosts:
            return True
        return not is_local and (path in _SCRAPED or _is_private(_name_in(asked)))

    @property
    def middleware(self) -> Any:
        """A middleware that refuses unauthorized requests."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._check(request)
            return await handler(request)

        return guarded

    def _check(self, request: web.Request) -> None:
        """Raise web.HTTPException, with the remedy, if the request is not authorized."""
        has_token = self._token is not None and self._token.accepts(request.headers.get("Authorization", ""))
        if has_token:
            return
        is_local = _is_loopback(_peer(request))
        asked = request.headers.get("Host")  # request.host would resolve a name if there is no header
        if asked is not None and NO_PAGE not in request.headers and not self._is_known(asked, request.path, is_local):
            name, here = asked[:100], "localhost, or its address" if is_local else "the address"
            raise web.HTTPForbidden(
                text=f"{name!r} is no name of this machine: ask {here}; if it is one, list it in admin_hosts (against "
                "DNS rebinding)\n"
            )
        if self._token is not None and not self._is_open(request.path):
            raise web.HTTPUnauthorized(
                text="send the token of admin_token_file: Authorization: Bearer TOKEN\n",
                headers={"WWW-Authenticate": 'Bearer realm="kproxy"'},
            )
        if request.method in _READS:
            return
        if not is_local:
            raise web.HTTPForbidden(
                text="without admin_token_file this can only be asked on kproxy's own machine (127.0.0.1)\n"
            )
        if HEADER not in request.headers:
            raise web.HTTPForbidden(text=f"send the header {HEADER}, like {HEADER}: yes: web pages cannot\n")


def _peer(request: web.Request) -> str:
    transport = request.transport
    peer = transport.get_extra_info("peername") if transport is not None else None
    return str(peer[0]) if peer else ""


def _is_loopback(host: str) -> bool:
    address = numeric(host)
    return address is not None and address.is_loopback


def _plain(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


def _name_in(host: str) -> str:
    """The name or address in a Host header, without the port."""
    return _plain(host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host)


def _is_private(name: str) -> bool:
    """Whether no public DNS server can resolve that name."""
    rest, _, last = name.rpartition(".")
    return bool(name) and (not rest or last in _PRIVATE)


def _is_ours(host: str) -> bool:
    """Whether a Host header names this machine in a way that no foreign DNS server can produce."""
    name = _name_in(host)
    try:
        ipaddress.ip_address(name.partition("%")[0])
        return True
    except ValueError:
        own = socket.gethostname().lower()
        return name in ("localhost", own, own.partition(".")[0]) or name.endswith(".localhost")
