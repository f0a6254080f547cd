"""The whole error tree.

KproxyError                     everything that kproxy raises on purpose
├── ProtocolError               bytes of a peer that are not what the protocol says
│   ├── Malformed               cut short, a length that cannot be, a value out of its range
│   │   └── TooLarge            it would become larger than its reader takes
│   └── Unsupported             an API, a version or a codec that this kproxy does not know
├── ConfigError                 settings: every fault at once, each with its path
├── CaptureError                a capture file: which file, at which offset
│   └── StorageError            where it lies failed: it may be read later
├── RefusedClient               a client that gets no relay: what it sent, or who it is
└── UpstreamError               a broker that cannot be reached or answers nonsense

"Not enough bytes yet" is a value, never an exception. Each message names the cause and, where there is one, the fix.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

# Why a broker cannot be reached: its name is not known, the resolver does not answer, the broker refused, it did not
# answer in time, the network has no route to it, rules of this machine forbid it, the address leads back to kproxy, no
# local port or no file descriptor is left, the source address is none of this machine, nothing has named an address
# yet, TLS did not come about.
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
# without SASL, an answer that is none, a password or a token that cannot be had, a client for whom there is no login.
LOGIN_CAUSES = (
    "login_failed",
    "login_mechanism",
    "login_unsupported",
    "login_protocol",
    "login_credentials",
    "login_principal",
)


class KproxyError(Exception):
    """The root: catching it catches what kproxy raises on purpose and nothing else."""


class ProtocolError(KproxyError):
    """Bytes of a peer are not what the protocol says."""


class Malformed(ProtocolError):
    """The bytes are cut short, or a length or a value in them cannot be."""


class TooLarge(Malformed):
    """What would become of the bytes is larger than their reader takes."""


class Unsupported(ProtocolError):
    """An API, a version or a compression codec that this kproxy does not know."""


class ConfigError(KproxyError):
    """Settings with faults: `faults` holds (path, what is wrong and how to fix it), all of them."""

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(f"{path}: {text}" if path else text for path, text in self.faults))


class CaptureError(KproxyError):
    """A capture cannot be read: the file's name, and the offset in bytes where that is known."""

    def __init__(self, name: str, text: str, offset: int | None = None) -> None:
        self.name = name
        self.text = text
        self.offset = offset
        super().__init__(f"{name}: {text}" if offset is None else f"{name}: at byte {offset}: {text}")

    def __reduce__(self) -> tuple[type["CaptureError"], tuple[str, str, int | None]]:
        return type(self), (self.name, self.text, self.offset)  # it travels between processes


class StorageError(CaptureError):
    """The storage in which a capture lies did not give it, for no reason that is the capture's: later it may."""


class UpstreamError(KproxyError):
    """A broker cannot be reached, or its answer is of no use. `cause`, a label of metrics, is one of
    DIAL_CAUSES, or of LOGIN_CAUSES. Its string is `text`, which says what happened, and `remedy`, if there is one."""

    def __init__(self, text: str, cause: str = "other", remedy: str = "") -> None:
        self.text = text
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"{text}: {remedy}" if remedy else text)


class RefusedClient(KproxyError):
    """A client that is closed before it has a relay. `cause` is a label of metrics: one of few.

    kind: lines of one kind are limited together; finer than the cause where that has several.
    said_nothing: not worth a line for each: it closed its connection before its first byte, as health checks of
    balancers do, or it was on its way in when kproxy began to drain.
    mechanism, claimed: of a login that failed, by what and as whom; empty: unknown.
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
    """What to do about a module that an extra installs and that is not there; None if it is no module of an extra."""
    package = (module or "").partition(".")[0]
    if package not in _EXTRA_OF:
        return None
    return f"needs {package}, which is not installed: {install_command(_EXTRA_OF[package])}"


@contextmanager
def of_extras(refused: Callable[[str], KproxyError]) -> Iterator[None]:
    """Imports of what extras install: for one that is not there raise what `refused` makes of `missing_package`."""
    try:
        yield
    except ModuleNotFoundError as fault:
        missing = missing_package(fault.name)
        if missing is None:
            raise
        raise refused(missing) from None


def install_command(extra: str) -> str:
    """The shell command that installs an extra beside the Python that runs; from the checkout or the wheel that kproxy
    was installed from, where that is still there.
    """
    return f"{shlex.quote(sys.executable or 'python3')} -m pip install {_installed_from(extra)}"


def _installed_from(extra: str) -> str:
    """What pip is given: the folder or file that it noted (PEP 610), else the distribution's name."""
    import json
    from importlib import metadata
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    for found in metadata.distributions(name=DISTRIBUTION):
        try:
            told = json.loads(found.read_text("direct_url.json") or "{}")
            address = urlsplit(told["url"])
        except (ValueError, KeyError):  # from an index
            continue
        place = Path(url2pathname(address.path))
        option = "-e " if told.get("dir_info", {}).get("editable") else ""
        is_there = (place / "pyproject.toml").exists() if "dir_info" in told else place.is_file()
        if address.scheme == "file" and is_there:
            return f"{option}{shlex.quote(f'{place}[{extra}]')}"
    return f"'{DISTRIBUTION}[{extra}]'"
