"""The settings of `kproxy run`: frozen, from a TOML file, the environment and flags; the later wins.

Every fault is reported at once, each with where its value came from (a flag, a variable, a place in the file). What can
be known without a socket is checked here: ports that overflow or overlap, an upstream that is kproxy itself, addresses
that no client could dial. Refuses to resolve names or to open anything.

A flag `--broker-port-base` is the variable KPROXY_BROKER_PORT_BASE and the key `broker_port_base` of the file. Flags
and variables describe the cluster where there is one; several are told apart only in the file, one `[[cluster]]` each.
"""

import difflib
import ipaddress
import re
import string
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from kproxy.errors import ConfigError

MAX_PORT = 65535
MAX_REQUEST_BYTES = 100 * 1024 * 1024  # a broker's socket.request.max.bytes by default
WILDCARDS = frozenset(("", "0.0.0.0", "::"))
PLACEHOLDERS = frozenset(("id", "host", "port"))

Faults = list[tuple[str, str]]
Model = TypeVar("Model", bound=BaseModel)


class Address(NamedTuple):
    """HOST:PORT, as one writes it: `[::1]:9092` for IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@lru_cache(maxsize=4096)
def numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A numeric address in its one form: IPv4 mapped into IPv6 becomes IPv4, a scope is left out; None: a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def parse_address(text: str, *, lowest_port: int = 1) -> Address:
    """HOST:PORT; port 0 (any free one) only where the caller allows it."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]{}]*)):([0-9]{1,5})", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not HOST:PORT (IPv6: [ADDRESS]:PORT)")
    port = int(match[3])
    if not lowest_port <= port <= MAX_PORT:
        raise ValueError(f"port {port} of {text!r} is not between {lowest_port} and {MAX_PORT}")
    return Address(match[1] or match[2], port)


def is_wildcard(host: str) -> bool:
    """Whether it means all addresses of a machine, in whatever spelling."""
    address = numeric(host)
    return host in WILDCARDS or (address is not None and address.is_unspecified)


def _leads_to(host: str, listen: str) -> bool:
    """Whether a connection to a host certainly arrives at that listening address, as far as text shows."""
    target, own = numeric("127.0.0.1" if host == "localhost" else host), numeric(listen)
    if target is None or own is None:
        return host == listen or (listen == "" and target is not None and target.is_loopback)
    return target == own or (own.is_unspecified and target.is_loopback and own.version == target.version)


def _upstream(value: Any) -> Address:
    address = value if isinstance(value, Address) else parse_address(str(value))
    if is_wildcard(address.host):
        raise ValueError(f"{value!r} names no host to dial")
    return address


def _bound(value: Any) -> Address:
    return value if isinstance(value, Address) else parse_address(str(value), lowest_port=0)


def _upstreams(value: Any) -> Any:
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _ids(value: Any) -> range:
    match = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", str(value))
    if match is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is neither a node id nor a range of them, like 0-9")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < 1 << 31:
        raise ValueError(f"{value!r} is no range of node ids: the first must not exceed the last")
    return range(first, last + 1)


def _template(value: Any) -> str:
    """HOST:PORT in which {id}, {host} and {port} may stand; checked by filling it in once."""
    text = str(value)
    try:
        for _, name, form, conversion in string.Formatter().parse(text):
            if name is not None and name not in PLACEHOLDERS:
                raise ValueError(f"{{{name}}} is none of {{id}}, {{host}}, {{port}}")
            if conversion or (form and not re.fullmatch("0[1-9]", form)):
                raise ValueError(f"of {{{name}}} only the digits can be told, like {{id:03}}")
        address = parse_address(text.format(id=1, host="host", port=9092))
    except (ValueError, IndexError, KeyError, AttributeError) as fault:
        raise ValueError(f"{text!r} is no address to advertise: {fault}") from None
    if address.host in WILDCARDS:
        raise ValueError(f"{text!r} names no host that a client could dial")
    return text


def _upstream_template(value: Any) -> str:
    text = _template(value)
    if "{host" in text or "{port" in text:
        raise ValueError(f"{text!r}: of the placeholders only {{id}} says anything about an upstream")
    return text


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class BrokerPorts(_Frozen):
    """`[[cluster.brokers]]`: declared node ids and the ports that stand for them, counting up from the first id's."""

    ids: Annotated[range, BeforeValidator(_ids)]
    port: Annotated[int, Field(ge=1, le=MAX_PORT)]
    advertise_port: Annotated[int, Field(ge=1, le=MAX_PORT)] | None = None  # {port} of `advertise`; default: `port`
    upstream: Annotated[str, BeforeValidator(_upstream_template)] | None = None  # until the cluster says otherwise


class Cluster(_Frozen):
    """`[[cluster]]`: where clients come in, where brokers are, and what clients are told."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "default"
    listen: Annotated[Address, BeforeValidator(_bound)]
    bootstrap: Annotated[
        tuple[Annotated[Address, BeforeValidator(_upstream)], ...], Field(min_length=1), BeforeValidator(_upstreams)
    ]
    route: Literal["ports", "sidecar"] = "ports"
    advertise: Annotated[str, BeforeValidator(_template)] | None = None
    broker_port_base: Annotated[int, Field(ge=1, le=MAX_PORT)] | None = None
    detail: Literal["headers", "topics", "batches"] = "headers"
    max_request_bytes: Annotated[int, Field(ge=1024, le=(1 << 31) - 1)] = MAX_REQUEST_BYTES
    on_address_leak: Literal["log", "close"] = "log"
    brokers: tuple[BrokerPorts, ...] = ()

    @property
    def advertised(self) -> str:
        """The template of the addresses that clients are told."""
        if self.advertise is not None:
            return self.advertise
        if self.route == "sidecar":
            return "{host}:{port}"
        return f"[{self.listen.host}]:{{port}}" if ":" in self.listen.host else f"{self.listen.host}:{{port}}"


class Config(_Frozen):
    """All settings of one kproxy."""

    clusters: Annotated[tuple[Cluster, ...], Field(validation_alias="cluster")]  # as the file calls them, and only so
    admin: Annotated[Address, BeforeValidator(_bound)] | None = None
    max_connections: Annotated[int, Field(ge=1)] | None = None  # 10,000, or as many as open files allow
    accept_backlog: Annotated[int, Field(ge=1, le=65535)] = 1024
    connect_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    drain_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    discovery_interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    record: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"


CLUSTER_SETTINGS = (
    "listen",
    "bootstrap",
    "route",
    "advertise",
    "broker_port_base",
    "detail",
    "max_request_bytes",
    "on_address_leak",
)
PROCESS_SETTINGS = tuple(name for name in Config.model_fields if name != "clusters")


def load(
    file: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The settings, or ConfigError with every fault. `flags` holds names as in the file; None means not given."""
    environment = environment or {}
    file = file or environment.get("KPROXY_CONFIG") or None
    document = _read(Path(file)) if file else {}
    where = f"{file}: " if file else ""
    faults: Faults = []

    tables = document.pop("cluster", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError([(f"{where}cluster", "write it as [[cluster]], one for each")])
    origins: dict[str, str] = {}
    overrides: dict[str, Any] = {}
    for name in (*CLUSTER_SETTINGS, *PROCESS_SETTINGS):
        variable = f"KPROXY_{name.upper()}"
        if (flags or {}).get(name) is not None:
            overrides[name], origins[name] = (flags or {})[name], f"--{name.replace('_', '-')}"
        elif environment.get(variable):
            overrides[name], origins[name] = environment[variable], variable

    faults += _mistyped(environment)
    if len(tables) > 1:
        faults += [
            (origins[name], f"which of the {len(tables)} clusters of {file}? set {name} in the file")
            for name in CLUSTER_SETTINGS
            if name in overrides
        ]
    else:
        tables = [{**(tables[0] if tables else {}), **_only(overrides, CLUSTER_SETTINGS)}]

    clusters: list[Cluster] = []
    sound: list[Cluster] = []
    misplaced = document.keys() & set(CLUSTER_SETTINGS)
    for number, table in enumerate(tables):
        paths = _Paths(f"{where}cluster[{number}]." if file else "", origins if len(tables) == 1 else {})
        cluster = _validated(Cluster, table, paths, faults, misplaced)
        if cluster is not None:
            clusters.append(cluster)
            found = [(paths(name), text) for name, text in _cluster_faults(cluster)]
            faults += found
            if not found:
                sound.append(cluster)
    paths = _Paths(where, origins)
    process = _validated(Config, {**document, **_only(overrides, PROCESS_SETTINGS), "cluster": clusters}, paths, faults)
    faults += _shared_faults(sound, process.admin if process else None)
    if faults or process is None:
        raise ConfigError(faults)
    return process


def _mistyped(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that begin as ours do and are none, but those that Kubernetes sets for a Service called kproxy."""
    known = ["KPROXY_CONFIG", *(f"KPROXY_{name.upper()}" for name in (*CLUSTER_SETTINGS, *PROCESS_SETTINGS))]
    services = [name.removesuffix("SERVICE_HOST") for name in environment if name.endswith("_SERVICE_HOST")]
    for variable in sorted(environment):
        if not variable.startswith("KPROXY_") or variable in known:
            continue
        if any(variable.startswith((f"{one}SERVICE_", f"{one}PORT_")) or variable == f"{one}PORT" for one in services):
            continue
        suffixes = [name.removeprefix("KPROXY_") for name in known]
        near = difflib.get_close_matches(variable.removeprefix("KPROXY_"), suffixes, 1)
        hint = f"did you mean KPROXY_{near[0]}?" if near else f"there are: {', '.join(known)}"
        yield variable, f"no such setting; {hint}"


class _Paths:
    """Names the place of a setting: the flag or variable that set it, else its place in the file."""

    def __init__(self, prefix: str, origins: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._origins = origins

    def __call__(self, *location: str | int) -> str:
        name, *rest = location or ("",)
        inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
        origin = self._origins.get(str(name))
        return f"{origin}{inner}" if origin else f"{self._prefix}{name}{inner}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as fault:
        raise ConfigError([("--config", f"{path} cannot be read: {fault.strerror or fault}")]) from None
    except UnicodeDecodeError as fault:
        raise ConfigError([(str(path), f"not valid TOML: {fault}")]) from None
    except tomllib.TOMLDecodeError as fault:
        hint = "; strings need quotes" if "Invalid value" in str(fault) else ""
        raise ConfigError([(str(path), f"not valid TOML: {fault}{hint}")]) from None


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _validated(
    model: type[Model], values: Mapping[str, Any], paths: _Paths, faults: Faults, misplaced: Iterable[str] = ()
) -> Model | None:
    """The model, or None and faults. misplaced: settings of a cluster that stand above all [[cluster]] of the file."""
    try:
        return model.model_validate(values)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            location = error["loc"]
            name = str(location[0]) if location else ""
            if error["type"] == "missing" and name in misplaced:
                text = ""
            elif error["type"] == "missing" and name in CLUSTER_SETTINGS and len(location) == 1:
                flag = f"--{name.replace('_', '-')}"
                text = f"is missing: give {flag} HOST:PORT, KPROXY_{name.upper()} or, in [[cluster]], {name}"
            elif error["type"] == "extra_forbidden" and model is Config and name in Cluster.model_fields:
                text = "belongs in [[cluster]]: put it below that line, of the cluster that it is about"
            elif error["type"] == "extra_forbidden":
                known = model.model_fields if len(location) == 1 else BrokerPorts.model_fields
                text = _no_such_setting(name if len(location) == 1 else str(location[-1]), model, known)
            else:
                text = _in_our_words(error)
            if text:
                faults.append((paths(*location), text))
        return None


def _no_such_setting(name: str, model: type[BaseModel], known: Iterable[str]) -> str:
    """What to write in place of a key of the file that is none."""
    of_file = {"cluster" if one == "clusters" else one: one for one in known}
    names = [*of_file, *(CLUSTER_SETTINGS if model is Config else ())]
    near = difflib.get_close_matches(name.replace("-", "_"), names, 1)
    if not near:
        return f"no such setting; there are: {', '.join(of_file)}"
    if model is Config and near[0] == "cluster":
        return "no such setting; did you mean [[cluster]]?"
    where = " of [[cluster]]" if model is Config and near[0] not in of_file else ""
    return f"no such setting; did you mean {near[0]}{where}?"


def _in_our_words(error: ErrorDetails) -> str:
    """What pydantic found, with the value that it found it in; nothing where that has been told of its parts."""
    value = error["input"]
    match error["type"]:
        case "value_error":
            return error["msg"].removeprefix("Value error, ")
        case "missing":
            return "is missing"
        case "int_parsing" | "int_type":
            return f"{value!r} is not a whole number"
        case "too_short":
            return "" if value else "is empty"
        case "tuple_type":
            return f"{value!r} should be a list"
    return re.sub(r"^(Input|String)\b", lambda _: repr(value), error["msg"])


def _cluster_faults(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """What is wrong with a cluster whose every single value is right."""
    template = cluster.advertised
    if cluster.route == "sidecar":
        if len(cluster.bootstrap) > 1:
            yield "bootstrap", "route sidecar has one upstream, the broker beside it; for several use route ports"
        if cluster.broker_port_base is not None:
            yield "broker_port_base", "route sidecar binds no broker ports; leave it out or use route ports"
        if cluster.brokers:
            yield "brokers", "route sidecar binds no broker ports; leave the table out or use route ports"
        return
    if cluster.advertise is None and cluster.listen.host in WILDCARDS:
        yield (
            "listen",
            f"clients cannot dial {cluster.listen}: say what they should, like --advertise 'kproxy.example:{{port}}'",
        )
    elif "{port" not in template and "{id" not in template:
        yield "advertise", f"{template!r} is the same for every broker: put {{port}} or {{id}} into it"
    if cluster.brokers and cluster.broker_port_base is not None:
        yield "broker_port_base", "brokers declares the ports already: keep one of the two"
    if not cluster.brokers and cluster.broker_port_base is None and cluster.listen.port == MAX_PORT:
        yield "listen", f"no port is left above {MAX_PORT} for the brokers: give --broker-port-base"
    declared: set[int] = set()
    for number, entry in enumerate(cluster.brokers):
        path = f"brokers[{number}]"
        for name, first in (("port", entry.port), ("advertise_port", entry.advertise_port or 1)):
            if len(entry.ids) > MAX_PORT - first + 1:
                yield f"{path}.{name}", f"{len(entry.ids)} ids from port {first} on go beyond port {MAX_PORT}"
                break
        else:
            if not declared.isdisjoint(entry.ids):
                yield f"{path}.ids", f"node id {min(declared.intersection(entry.ids))} is declared twice"
            declared.update(entry.ids)


def _shared_faults(clusters: list[Cluster], admin: Address | None) -> Iterator[tuple[str, str]]:
    """What is wrong between clusters: names, ports, and kproxy as its own upstream."""
    taken: dict[int, list[tuple[str, str]]] = {}  # port -> (host, whose it is)
    told: set[tuple[str, str]] = set()

    def take(host: str, port: int, owner: str) -> Iterator[tuple[str, str]]:
        holders = taken.setdefault(port, [])
        for other, whose in holders:
            clash = host == other or host in WILDCARDS or other in WILDCARDS
            if clash and (owner, whose) not in told:
                told.add((owner, whose))
                yield owner, f"{Address(host, port)} is taken by {whose}"
        holders.append((host, owner))

    if admin is not None and admin.port:
        yield from take(*admin, "admin")
    names: set[str] = set()
    for cluster in clusters:
        if cluster.name in names:
            yield "cluster", f"two are called {cluster.name!r}: give each a name of its own"
        names.add(cluster.name)
        if cluster.listen.port:
            yield from take(*cluster.listen, f"{cluster.name}: listen")
        for entry in cluster.brokers:
            for port in range(entry.port, entry.port + len(entry.ids)):
                yield from take(cluster.listen.host, port, f"{cluster.name}: brokers")
    for cluster in clusters:
        for upstream in cluster.bootstrap:
            for host, whose in taken.get(upstream.port, ()):
                if _leads_to(upstream.host, host):
                    yield (
                        f"{cluster.name}: bootstrap",
                        f"{upstream} is kproxy itself ({whose}): give the brokers' addresses",
                    )
