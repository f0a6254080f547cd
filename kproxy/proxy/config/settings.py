"""The settings of `kproxy run`: frozen models, and the form of each single value.

A wrong value raises ValueError with the value and the expected form; `load.py` adds its place. The settings of a
feature have a module of their own in this folder, and a field here. Refuses to resolve names, to open files, and to
compare settings with each other (`checks.py`).
"""

import re
import string
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kproxy.addresses import numeric
from kproxy.proxy.config.addresses import MAX_PORT, WILDCARDS, Address, is_wildcard, parse_address
from kproxy.proxy.config.authentication import Authentication
from kproxy.proxy.config.flight import Flight, of_folder
from kproxy.proxy.config.lag import Lag
from kproxy.proxy.config.limits import Limits, Networks
from kproxy.proxy.config.login import Login
from kproxy.proxy.config.model import Frozen, model_in
from kproxy.proxy.config.otlp import Otlp, of_endpoint
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.config.telemetry import Telemetry
from kproxy.proxy.config.tls import ClientTls, UpstreamTls
from kproxy.proxy.config.zookeeper import ZooKeeper

MAX_REQUEST_BYTES = 100 * 1024 * 1024  # a broker's socket.request.max.bytes by default
MAX_HELD_BYTES = 64 * 1024 * 1024
MAX_WORKERS = 256
MAX_PORT_COUNT = 4096
ANY: Literal["any"] = "any"
PLACEHOLDERS = frozenset(("id", "host", "port"))


def _upstream(value: Any) -> Address:
    address = value if isinstance(value, Address) else parse_address(str(value))
    if is_wildcard(address.host):
        raise ValueError(f"{value!r} names no host to dial")
    return address


def _bound(value: Any) -> Address:
    return value if isinstance(value, Address) else parse_address(str(value), lowest_port=0)


def _admin(value: Any) -> Address:
    """Return the address that HOST:PORT, or a port alone, means."""
    text = str(value).strip()
    return _bound(f":{text}" if text.isascii() and text.isdigit() else value)


def _host(value: str) -> str:
    name = value.strip()
    if not name or set(name) & set(" /:*"):
        raise ValueError(f"{value!r} is no name: write it as it stands in a URL, without scheme and port, no patterns")
    return name


def _source(value: str) -> str:
    text = value.strip().removeprefix("[").removesuffix("]")
    address = numeric(text)
    if address is None or "%" in text:
        raise ValueError(f"{value!r} is no numeric address: write it like 10.0.0.5 or 2001:db8::5")
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{value!r} is no address of one machine that connections could come from")
    return str(address)


def _upstreams(value: Any) -> Any:
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _ids(value: Any) -> "range | Literal['any']":
    if value == ANY:
        return ANY
    match = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", str(value))
    if match is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is neither a node id nor a range of them, like 0-9, nor any")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < 1 << 31:
        raise ValueError(f"{value!r} is no range of node ids: the first must not exceed the last")
    return range(first, last + 1)


def _template(value: Any) -> str:
    """Return HOST:PORT, which may contain {id}, {host} and {port}, after a check with example values."""
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


def _server_name(value: Any) -> str:
    """Return a host name that contains {id} once, for the broker's node id."""
    text = str(value).lower().rstrip(".")
    fields = [(name, form) for _, name, form, _ in string.Formatter().parse(text) if name is not None]
    if [name for name, _ in fields] != ["id"] or (fields[0][1] and not re.fullmatch("0[1-9]", fields[0][1])):
        raise ValueError(f"{value!r}: {{id}} stands once in it, like broker-{{id}}.kafka.example")
    if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+", text.format(id=1)):
        raise ValueError(f"{value!r} is no host name with a domain, like broker-{{id}}.kafka.example")
    return text


def _names(value: Any) -> Any:
    names = value.split(",") if isinstance(value, str) else value
    return tuple(str(name).strip().lower().rstrip(".") for name in names)


class BrokerPorts(Frozen):
    """`[[cluster.brokers]]`: declared node ids and the ports that represent them, counted up from the first id's."""

    # node ids, like 0-9; one alone, like 1001; any: all that no other entry declares, which get ports as they appear
    ids: Annotated[range | Literal["any"], BeforeValidator(_ids)]
    # route ports: kproxy's port for the first id; further ids count up from it
    port: Annotated[int, Field(ge=1, le=MAX_PORT)] | None = None
    # ids any: number of ports, from `port` on, that kproxy assigns
    port_count: Annotated[int, Field(ge=1, le=MAX_PORT_COUNT)] | None = None
    # ids any: file that preserves the assignment of ports to ids across restarts; default: ports are assigned in the
    # order of the ids in the cluster's first answer
    ports_file: Path | None = None
    # value of {port} in `advertise` for the first id; further ids count up from it; default: `port`
    advertise_port: Annotated[int, Field(ge=1, le=MAX_PORT)] | None = None
    # address of these brokers until the cluster reports another one; {id} stands for the node id
    upstream: Annotated[str, BeforeValidator(_upstream_template)] | None = None

    @property
    def declared(self) -> range:
        """The declared node ids; none for `ids = "any"`."""
        return range(0) if self.ids == ANY else self.ids

    @property
    def ports(self) -> range:
        """The ports that represent its brokers, now or later; none without `port`."""
        count = len(self.declared) if self.ids != ANY else self.port_count or 0
        return range(self.port, self.port + count) if self.port is not None else range(0)


class Cluster(Frozen):
    """`[[cluster]]`: the address that clients dial, the brokers, and the addresses that clients get."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "default"  # the label and the column `cluster`
    listen: Annotated[Address, BeforeValidator(_bound)]
    bootstrap: Annotated[
        tuple[Annotated[Address, BeforeValidator(_upstream)], ...], Field(min_length=1), BeforeValidator(_upstreams)
    ]
    route: Literal["ports", "sidecar", "sni", "transparent"] = "ports"
    # route sni: the server name of each broker, like broker-{id}.kafka.example
    sni: Annotated[str, BeforeValidator(_server_name)] | None = None
    # route sni: server names that clients bootstrap at; default: bootstrap.DOMAIN of `sni`
    sni_bootstrap: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    advertise: Annotated[str, BeforeValidator(_template)] | None = None
    broker_port_base: Annotated[int, Field(ge=1, le=MAX_PORT)] | None = None
    detail: Literal["headers", "topics", "batches"] = "headers"
    # a larger request is a fault, as for a broker (its socket.request.max.bytes)
    max_request_bytes: Annotated[int, Field(ge=1024, le=(1 << 31) - 1)] = MAX_REQUEST_BYTES
    # action for an answer that still names a broker's own address: log it, or close the connection
    on_address_leak: Literal["log", "close"] = "log"
    brokers: tuple[BrokerPorts, ...] = ()
    login: Login | None = None
    authentication: Authentication | None = None
    limits: Limits = Limits()
    accept_proxy_protocol: bool = False  # every client's connection begins with a PROXY header
    trusted_proxies: Networks = ()  # the addresses that may send a PROXY header
    destinations: Networks = ()  # route transparent: only addresses that redirected clients may reach; default: all
    # connections to brokers begin with a PROXY header of this version
    proxy_protocol: Literal["v1", "v2"] | None = None
    policy: tuple[Rule, ...] = ()
    # action for a request that no rule matches; default: deny if some rule allows, else allow
    policy_default: Literal["allow", "deny"] | None = None
    read_only: bool = False
    filter_lists: bool = True  # lists of topics and groups leave out what a client may not see
    tls: ClientTls | None = None
    upstream_tls: UpstreamTls | None = None
    telemetry: Telemetry | None = None
    lag: Lag = Lag()

    @property
    def any_brokers(self) -> BrokerPorts | None:
        """The entry whose ports are given out as node ids appear."""
        return next((entry for entry in self.brokers if entry.ids == ANY), None)

    @property
    def advertised(self) -> str:
        """The template of the brokers' addresses in responses to clients."""
        if self.advertise is not None:
            return self.advertise
        if self.route == "sidecar":
            return "{host}:{port}"
        if self.route == "sni" and self.sni is not None:
            return f"{self.sni}:{{port}}"
        return f"[{self.listen.host}]:{{port}}" if ":" in self.listen.host else f"{self.listen.host}:{{port}}"


class Config(Frozen):
    """All settings of one kproxy."""

    clusters: Annotated[tuple[Cluster, ...], Field(validation_alias="cluster")]  # the file's key is `cluster`
    admin: Annotated[Address, BeforeValidator(_admin)] | None = None  # no host: this machine alone
    admin_token_file: Path | None = None  # requests need the token in it, except /health and /ready
    admin_tls: ClientTls | None = None  # the admin port speaks TLS
    page: bool = True  # the admin port serves a web page, and keeps the last hour in memory for it
    admin_open_metrics: bool = False  # /metrics needs no token
    # host names accepted in requests of browsers and others without a token, like kproxy.example.com
    admin_hosts: Annotated[tuple[Annotated[str, AfterValidator(_host)], ...], BeforeValidator(_upstreams)] = ()
    workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = 1  # processes that relay
    max_connections: Annotated[int, Field(ge=1)] | None = None  # 10,000, or as many as open files allow
    accept_backlog: Annotated[int, Field(ge=1, le=65535)] = 1024  # clients that wait in the listen backlog of each port
    # seconds to connect to a broker, including the lookup of its name
    connect_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    drain_delay_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    drain_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    discovery_interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    # SO_MARK of connections to brokers, for the kernel's routing and firewall rules; needs CAP_NET_ADMIN
    upstream_mark: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None
    # addresses of this machine that connections to brokers come from, in turn; those of IPv4 serve brokers of IPv4,
    # those of IPv6 brokers of IPv6; default: the kernel chooses
    upstream_source_addresses: Annotated[
        tuple[Annotated[str, AfterValidator(_source)], ...], BeforeValidator(_upstreams)
    ] = ()
    record: Path | None = None
    # recorded files older than this are removed
    record_keep_h: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    # bytes of all recorded files; the oldest are removed
    record_keep_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    flight: Annotated[Flight, BeforeValidator(of_folder)] | None = None  # a table, or its folder alone
    otlp: Annotated[Otlp, BeforeValidator(of_endpoint)] | None = None  # a table, or the collector's URL alone
    audit: str | None = None  # "stderr", or a file
    watch_config: bool = False  # reload when the file changes, as by SIGHUP
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    log_connections: bool = False  # a line when a connection ends
    # bytes of answers buffered for rewriting, of all connections together
    max_held_bytes: Annotated[int, Field(ge=1 << 20)] = MAX_HELD_BYTES
    zookeeper: tuple[ZooKeeper, ...] = ()


CLUSTER_SETTINGS = (
    "listen",
    "bootstrap",
    "route",
    "advertise",
    "broker_port_base",
    "detail",
    "max_request_bytes",
    "on_address_leak",
    "read_only",
)

# Settings that can be a flag: plain values, and tables that one value can stand for.
PROCESS_SETTINGS = tuple(
    name for name, field in Config.model_fields.items() if model_in(field.annotation) in (None, Flight, Otlp)
)
