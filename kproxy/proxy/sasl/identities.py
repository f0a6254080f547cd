"""kproxy's identity at brokers for each client, and the sources of its passwords and tokens.

Files and variables are read at each login, so that their changes take effect at the next one. A token printed by a
command is kept until shortly before it expires. Bounds: MAX_SECRET_BYTES, the command's timeout, one command at a time
for each identity. Faults are UpstreamErrors that name the source and never its content. Refuses to know brokers.
"""

import asyncio
import json
import os
import signal
import time
from base64 import urlsafe_b64decode
from contextlib import suppress
from pathlib import Path
from re import DOTALL, Pattern, compile, escape

from kproxy.errors import UpstreamError, install_command
from kproxy.proxy.config.files import named, open_regular
from kproxy.proxy.config.login import Credentials, Login
from kproxy.proxy.sasl.mechanisms import OAUTHBEARER, PLAIN, Mechanism, OAuthBearer, Plain, Scram
from kproxy.proxy.sasl.secrets import Secret

MAX_SECRET_BYTES = 64 * 1024
EARLY_S = 30.0  # a token is replaced so long before its expiry, or a tenth of its life if that is less
OPAQUE_TOKEN_S = 60.0  # lifetime of a token without an expiry

CREDENTIALS = "login_credentials"
PRINCIPAL = "login_principal"


class Identities:
    """The identities of one [cluster.login]."""

    def __init__(self, settings: Login) -> None:
        self._own = Identity(settings, settings.mechanism, settings.token_timeout_s)
        self._by_principal = [
            (_pattern(one.principal), Identity(one, one.mechanism or settings.mechanism, settings.token_timeout_s))
            for one in settings.by_principal
        ]
        self._refuses_others = bool(settings.by_principal) and settings.others == "refuse"

    @property
    def mechanisms(self) -> set[str]:
        return {identity.mechanism for identity in (self._own, *(one for _, one in self._by_principal))}

    def of(self, principal: str | None) -> "Identity":
        """Return the identity for a client's principal; None: kproxy's own. Raises UpstreamError if there is none."""
        if principal is None:
            return self._own
        for pattern, identity in self._by_principal:
            if pattern.fullmatch(principal):
                return identity
        if self._refuses_others:
            raise UpstreamError(
                f"no [[cluster.login.by_principal]] fits {principal}, so kproxy has no login for it: "
                'add one, or set others = "own" in [cluster.login]',
                PRINCIPAL,
            )
        return self._own

    def check(self) -> None:
        """Read all files and variables. Raises UpstreamError for the first that is missing."""
        for identity in (self._own, *(one for _, one in self._by_principal)):
            identity.check()


class Identity:
    """One identity at brokers."""

    def __init__(self, settings: Credentials, mechanism: str, timeout_s: float) -> None:
        self.mechanism = mechanism
        self._settings = settings
        self._timeout_s = timeout_s
        self._token: tuple[Secret, float] | None = None  # (token of the command, monotonic time until which it is used)
        self._running = asyncio.Lock()

    async def login(self) -> Mechanism:
        """Return a login with the current content of its files. Raises UpstreamError."""
        if self.mechanism == OAUTHBEARER:
            return OAuthBearer(await self._bearer())
        username, password = self._settings.username or "", self._password()
        if self.mechanism == PLAIN:
            return Plain(username, password)
        try:
            return Scram(self.mechanism, username, password)
        except ModuleNotFoundError:
            raise UpstreamError(f"SCRAM needs scramp: {install_command('sasl')}", CREDENTIALS) from None
        except Exception as fault:  # raised by scramp for a name or a password that SASLprep prohibits
            raise UpstreamError(
                f"{self.mechanism} does not take this username or password: {fault}", CREDENTIALS
            ) from None

    def check(self) -> None:
        if self.mechanism != OAUTHBEARER:
            self._password()
        elif self._settings.token_file is not None:
            _read(self._settings.token_file, "token_file")

    def _password(self) -> Secret:
        settings = self._settings
        if settings.password_file is not None:
            return _read(settings.password_file, "password_file")
        name = settings.password_env or ""
        value = os.environ.get(name)
        if not value:
            raise UpstreamError(f"password_env: there is no variable {name}, or it is empty", CREDENTIALS)
        return Secret(value)

    async def _bearer(self) -> Secret:
        if self._settings.token_file is not None:
            return _read(self._settings.token_file, "token_file", strips=True)
        async with self._running:
            if self._token is None or time.monotonic() >= self._token[1]:
                token = await self._run(self._settings.token_command or ())
                self._token = token, time.monotonic() + _useful_s(token.reveal())
            return self._token[0]

    async def _run(self, command: tuple[str, ...]) -> Secret:
        name = f"token_command {command[0]}"
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # it may contain a secret
                start_new_session=True,
            )
        except OSError as fault:
            raise UpstreamError(f"{name} cannot be run: {fault.strerror or fault}", CREDENTIALS) from None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                data = bytearray()
                while part := await process.stdout.read(MAX_SECRET_BYTES + 1 - len(data)):
                    data += part
                    if len(data) > MAX_SECRET_BYTES:
                        raise UpstreamError(f"{name} printed more than {MAX_SECRET_BYTES} bytes", CREDENTIALS)
                status = await process.wait()
        except TimeoutError:
            text = f"{name} did not end within {self._timeout_s:g} s (token_timeout_s)"
            raise UpstreamError(text, CREDENTIALS) from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and its children
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):  # another process may hold its pipe
                        while await process.stdout.read(MAX_SECRET_BYTES):  # else asyncio's wait() may never return
                            pass
                        await process.wait()
        if status != 0:
            raise UpstreamError(f"{name} ended with status {status}: run it by hand to see why", CREDENTIALS)
        return _secret(bytes(data), name, strips=True)


def _pattern(text: str) -> Pattern[str]:
    """Return a pattern: `*` in the text matches any characters, and all other characters match themselves."""
    return compile(".*".join(map(escape, text.split("*"))), DOTALL)


def _read(path: Path, setting: str, *, strips: bool = False) -> Secret:
    try:
        with open_regular(path) as file:
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as fault:
        raise UpstreamError(
            f"{setting}: {named(path)} cannot be read: {fault.strerror or fault}", CREDENTIALS
        ) from None
    if len(data) > MAX_SECRET_BYTES:
        raise UpstreamError(f"{setting}: {path} is larger than {MAX_SECRET_BYTES} bytes", CREDENTIALS)
    return _secret(data, f"{setting}: {path}", strips=strips)


def _secret(data: bytes, source: str, *, strips: bool) -> Secret:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UpstreamError(f"{source}: it is not UTF-8", CREDENTIALS) from None
    text = text.strip() if strips else text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise UpstreamError(f"{source}: it is empty", CREDENTIALS)
    if not strips and ("\n" in text or "\r" in text):
        raise UpstreamError(f"{source}: it has several lines: write the password as the only one", CREDENTIALS)
    if "\0" in text or (strips and not text.isprintable()):
        raise UpstreamError(
            f"{source}: it is no {'token' if strips else 'password'}: it has control characters", CREDENTIALS
        )
    return Secret(text)


def _useful_s(token: str) -> float:
    """Return how long to use a token, in seconds; its claims are not verified here, the broker does that."""
    try:
        part = token.split(".")[1]
        expires = float(json.loads(urlsafe_b64decode(part + "=" * (-len(part) % 4)))["exp"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return OPAQUE_TOKEN_S
    left = expires - time.time()
    return max(0.0, left - min(EARLY_S, left / 10))
