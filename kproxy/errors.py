"""The whole error tree.

KproxyError                     everything that kproxy raises on purpose
├── ProtocolError               a peer's bytes that violate the protocol
│   ├── Malformed               truncated, an impossible length, or a value out of range
│   │   └── TooLarge            it would decode or decompress to more bytes than the limit
│   └── Unsupported             an API, a version or a codec that this kproxy does not know
├── ConfigError                 invalid settings: all faults together, each with its path
├── CaptureError                an unreadable capture file, with the offset
│   └── StorageError            its storage failed: a later read may succeed
├── RefusedClient               a client that gets no relay, because of its bytes or its identity
└── UpstreamError               a broker that cannot be reached or sends an invalid answer

"Not enough bytes yet" is a value, never an exception. Each message names the cause and, where there is one, the fix.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

# Why a broker cannot be reached: its name is unknown, the resolver does not answer, the broker refused, it did not
# answer in time, the network has no route to it, this machine's rules forbid it, the address leads back to kproxy, no
# local port or file descriptor is free, the source address does not belong to this machine, no address is known yet,
# the TLS handshake failed.
DIAL_CAUSES = (
    "name",
    "resolver",
    "refused",
    "timeout",
    "unreachable",
    "not_permitted",
    "loop",
    "no_port",
    "no_descriptor",
    "source_address",
    "no_address",
    "tls",
    "other",
)

# Why kproxy's own login at a broker fails: wrong credentials, a mechanism that the broker does not offer, a listener
# without SASL, an invalid answer, a password or token that cannot be read, a client without a login.
LOGIN_CAUSES = (
    "login_failed",
    "login_mechanism",
    "login_unsupported",
    "login_protocol",
    "login_credentials",
    "login_principal",
)


class KproxyError(Exception):
    """The root of all exceptions that kproxy raises on purpose."""


class ProtocolError(KproxyError):
    """A peer's bytes violate the protocol."""


class Malformed(ProtocolError):
    """The bytes are cut short, or a length or a value in them cannot be."""


class TooLarge(Malformed):
    """The bytes would decode or decompress to more than the limit."""


class Unsupported(ProtocolError):
    """An API, a version or a compression codec that this kproxy does not know."""


class ConfigError(KproxyError):
    """Invalid settings. `faults` holds all faults: (path, the fault and its fix)."""

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(f"{path}: {text}" if path else text for path, text in self.faults))


class CaptureError(KproxyError):
    """A capture cannot be read. offset: in bytes, where it is known."""

    def __init__(self, name: str, text: str, offset: int | None = None) -> None:
        self.name = name
        self.text = text
        self.offset = offset
        super().__init__(f"{name}: {text}" if offset is None else f"{name}: at byte {offset}: {text}")

    def __reduce__(self) -> tuple[type["CaptureError"], tuple[str, str, int | None]]:
        return type(self), (self.name, self.text, self.offset)  # it travels between processes


class StorageError(CaptureError):
    """A capture's storage failed to deliver it; the capture itself may be fine, so a later read may succeed."""


class UpstreamError(KproxyError):
    """A broker cannot be reached, or its answer is invalid.

    cause: one of DIAL_CAUSES or LOGIN_CAUSES, a label of metrics. Its string is `text`, followed by `remedy` if any.
    """

    def __init__(self, text: str, cause: str = "other", remedy: str = "") -> None:
        self.text = text
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"{text}: {remedy}" if remedy else text)


class RefusedClient(KproxyError):
    """A client is closed before it has a relay. `cause` is a label of metrics with few values.

    kind: log lines of one kind share a limit; more specific than the cause.
    said_nothing: not worth a warning: the client closed before its first message was complete, as health checks of load
    balancers do, or was being accepted when kproxy began to drain.
    mechanism, claimed: the mechanism and the claimed name of a failed login; empty: unknown.
    """

    def __init__(
        self,
        cause: str,
        text: str,
        kind: str = "",
        *,
        said_nothing: bool = False,
        mechanism: str = "",
        claimed: str = "",
    ) -> None:
        self.cause = cause
        self.kind = kind or cause
        self.said_nothing = said_nothing
        self.mechanism = mechanism
        self.claimed = claimed
        super().__init__(text)


def why_no_folder(fault: OSError) -> str:
    """Why a folder cannot be made, in words."""
    return "it is a file, no folder" if isinstance(fault, FileExistsError) else fault.strerror or str(fault)


# The name that pip knows: on PyPI, `kproxy` is another project. The command and the import are `kproxy`.
DISTRIBUTION = "kproxy-kafka"

_EXTRA_OF = {
    "altair": "report",
    "jwt": "sasl",
    "duckdb": "analyze",
    "fsspec": "storage",
    "s3fs": "storage",
    "google": "telemetry",
    "numpy": "offline",
    "opentelemetry": "telemetry",
    "pandas": "spark",
    "prompt_toolkit": "analyze",
    "py4j": "spark",
    "pyarrow": "offline",
    "pyshark": "wireshark",
    "pyspark": "spark",
    "scramp": "sasl",
    "textual": "top",
    "vl_convert": "report",
}


def missing_package(module: str | None) -> str | None:
    """Return how to install a missing module; None if no extra has it."""
    package = (module or "").partition(".")[0]
    if package not in _EXTRA_OF:
        return None
    return f"needs {package}, which is not installed: {install_command(_EXTRA_OF[package])}"


@contextmanager
def of_extras(refused: Callable[[str], KproxyError]) -> Iterator[None]:
    """A `with` for imports of optional modules: raises `refused(missing_package(...))` for a missing one."""
    try:
        yield
    except ModuleNotFoundError as fault:
        missing = missing_package(fault.name)
        if missing is None:
            raise
        raise refused(missing) from None


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra for the running Python.

    It installs from the checkout or wheel that kproxy was installed from, if that still exists.
    """
    return f"{shlex.quote(sys.executable or 'python3')} -m pip install {_installed_from(extra)}"


def _installed_from(extra: str) -> str:
    """Return the requirement for pip: the folder or file that it recorded (PEP 610), else the distribution's name."""
    import json
    from importlib import metadata
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    for distribution in metadata.distributions(name=DISTRIBUTION):
        try:
            origin = json.loads(distribution.read_text("direct_url.json") or "{}")
            address = urlsplit(origin["url"])
        except (ValueError, KeyError):  # from an index
            continue
        place = Path(url2pathname(address.path))
        option = "-e " if origin.get("dir_info", {}).get("editable") else ""
        exists = (place / "pyproject.toml").exists() if "dir_info" in origin else place.is_file()
        if address.scheme == "file" and exists:
            return f"{option}{shlex.quote(f'{place}[{extra}]')}"
    return f"'{DISTRIBUTION}[{extra}]'"
