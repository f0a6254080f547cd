"""A file of users with the credentials to check passwords, not the passwords.

Each line is `NAME:MECHANISM:ITERATIONS:SALT:STORED_KEY:SERVER_KEY` (RFC 5802; the last three in base64, the name
percent-encoded if it has a colon, a space or a non-ASCII character); `#` begins a comment. PLAIN is checked against the
same lines. Bounds: MAX_FILE_BYTES, MAX_ITERATIONS. Error texts name the line and never its content.
"""

import hashlib
import hmac
import os
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from kproxy.proxy.config import files
from kproxy.proxy.sasl.mechanisms import MAX_ITERATIONS, MIN_ITERATIONS, SCRAM, SCRAM_SHA_256, SCRAM_SHA_512

ITERATIONS = 8192  # number for new credentials: checking a PLAIN password takes a few milliseconds
MAX_FILE_BYTES = 16 * 1024 * 1024
_SALT_BYTES = 24
_HASHES = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}


class Credential(NamedTuple):
    """A user's credential for one mechanism. It is as sensitive as the password, so its repr hides it."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        return "Credential(***)"


Users = Mapping[str, Mapping[str, Credential]]  # name -> mechanism -> credential


class UsersError(ValueError):
    """A fault of a file of users, and how to fix it."""


def credential(mechanism: str, password: str, iterations: int = ITERATIONS, salt: bytes | None = None) -> Credential:
    """Return a credential for that password, by default with a new salt. Takes milliseconds."""
    salt = salt or secrets.token_bytes(_SALT_BYTES)
    client_key, server_key = _keys(mechanism, password, salt, iterations)
    return Credential(salt, hashlib.new(_HASHES[mechanism], client_key).digest(), server_key, iterations)


def is_password(mechanism: str, password: str, known: Credential) -> bool:
    """Whether it is the password of that credential. Takes milliseconds, no less for a wrong password."""
    client_key, _ = _keys(mechanism, password, known.salt, known.iterations)
    return hmac.compare_digest(hashlib.new(_HASHES[mechanism], client_key).digest(), known.stored_key)


def _keys(mechanism: str, password: str, salt: bytes, iterations: int) -> tuple[bytes, bytes]:
    """Return (client key, server key) of RFC 5802, section 3, without SASLprep of the password, as Kafka does."""
    name = _HASHES[mechanism]
    salted = hashlib.pbkdf2_hmac(name, password.encode(), salt, iterations)
    return hmac.digest(salted, b"Client Key", name), hmac.digest(salted, b"Server Key", name)


# --- the file --------------------------------------------------------------------------------------------------------


def parse(text: str) -> dict[str, dict[str, Credential]]:
    """Return the users of a file. Raises UsersError with the number of the wrong line."""
    users: dict[str, dict[str, Credential]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, mechanism, entry = _entry(line.strip(), number)
        mechanisms = users.setdefault(name, {})
        if mechanism in mechanisms:
            raise UsersError(f"line {number}: the user has {mechanism} twice: remove one of the two lines")
        mechanisms[mechanism] = entry
    return users


def _entry(line: str, number: int) -> tuple[str, str, Credential]:
    fields = line.split(":")
    if len(fields) != 6:
        raise UsersError(
            f"line {number}: {len(fields)} fields in place of 6, NAME:MECHANISM:ITERATIONS:SALT:STORED_KEY:SERVER_KEY: "
            "`kproxy users add` writes such lines"
        )
    name, mechanism, iterations, *keys = fields
    if not name or mechanism not in SCRAM:
        raise UsersError(f"line {number}: a name, and one of {', '.join(SCRAM)} behind it, are wanted")
    if not (iterations.isascii() and iterations.isdigit() and MIN_ITERATIONS <= int(iterations[:9]) <= MAX_ITERATIONS):
        raise UsersError(f"line {number}: iterations are a number from {MIN_ITERATIONS} to {MAX_ITERATIONS}")
    try:
        salt, stored_key, server_key = (b64decode(key, validate=True) for key in keys)
        user = unquote(name, errors="strict")
    except ValueError:
        raise UsersError(f"line {number}: salt and keys are base64, the name is percent-encoded") from None
    size = hashlib.new(_HASHES[mechanism]).digest_size
    if len(salt) < 12 or len(stored_key) != size or len(server_key) != size:
        raise UsersError(f"line {number}: the salt has 12 bytes at least, the keys of {mechanism} have {size}")
    return user, mechanism, Credential(salt, stored_key, server_key, int(iterations))


def lines(users: Users) -> Iterator[str]:
    """Yield the lines of a file with those users; `parse` reads them back."""
    for name, mechanisms in users.items():
        for mechanism, known in mechanisms.items():
            keys = (b64encode(key).decode() for key in (known.salt, known.stored_key, known.server_key))
            yield ":".join((quote(name, safe="@=,/+"), mechanism, str(known.iterations), *keys))


def read(path: Path) -> dict[str, dict[str, Credential]]:
    """Return the users of the file at `path`. Raises UsersError if it cannot be read."""
    try:
        with files.open_regular(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as fault:
        how = f"; write one by `kproxy users add {path} NAME`" if isinstance(fault, FileNotFoundError) else ""
        raise UsersError(f"{path} cannot be read: {fault.strerror or fault}{how}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsersError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse(data.decode())
    except UnicodeDecodeError:
        raise UsersError(f"{path} is not UTF-8") from None
    except UsersError as fault:
        raise UsersError(f"{path}: {fault}") from None


def change(path: Path, name: str, password: str | None) -> bool:
    """Set a user's password, or remove the user for None; returns whether the user existed.

    All other lines and comments stay; the file is replaced atomically, and only its owner may read it.
    """
    text = path.read_text() if path.exists() else "# users of kproxy: `kproxy users --help`\n"
    was_there = name in parse(text)
    quoted = quote(name, safe="@=,/+")
    kept = [
        line
        for line in text.splitlines()
        if line.lstrip().startswith("#") or unquote(line.strip().partition(":")[0]) != name
    ]
    if password is not None:
        kept += lines({name: {mechanism: credential(mechanism, password) for mechanism in SCRAM}})
    assert quoted or password is None
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write("\n".join(kept) + "\n")
    fresh.replace(path)
    return was_there


class UsersFile:
    """The users of a file, which is read again when it changes. A file with a fault changes nothing."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises UsersError."""
        self.path = path
        self._pepper = secrets.token_bytes(32)
        self._version = files.version(path)
        self.users: Users = read(path)
        self.fault = ""  # the fault of the latest reading

    def refresh(self) -> bool:
        """Read the file if it changed; returns whether it did. `fault` is then the file's fault, or ""."""
        version = files.version(self.path)
        if version == self._version:
            return False
        self._version = version
        try:
            self.users, self.fault = read(self.path), ""
        except UsersError as fault:
            self.fault = str(fault)
        return True

    def find(self, name: str, mechanism: str) -> tuple[Credential, bool]:
        """Return (credential, whether the user exists); an unknown user gets a decoy, whose check takes as long."""
        known = self.users.get(name, {}).get(mechanism)
        if known is not None:
            return known, True
        return self._decoy(name, mechanism), False

    def plain(self, name: str) -> tuple[str, Credential, bool]:
        """Return (mechanism, credential, whether the user exists) to check a PLAIN password."""
        mechanisms = self.users.get(name, {})
        mechanism = SCRAM_SHA_512 if SCRAM_SHA_512 in mechanisms or not mechanisms else SCRAM_SHA_256
        return mechanism, *self.find(name, mechanism)

    def _decoy(self, name: str, mechanism: str) -> Credential:
        """Return a credential that no password matches; its salt is always the same for a name, like a real one."""
        iterations = next((known.iterations for of_one in self.users.values() for known in of_one.values()), ITERATIONS)
        drawn = hmac.digest(self._pepper, f"{mechanism}:{name}".encode(errors="replace"), "sha512")
        size = hashlib.new(_HASHES[mechanism]).digest_size
        return Credential(drawn[:_SALT_BYTES], secrets.token_bytes(size), secrets.token_bytes(size), iterations)
