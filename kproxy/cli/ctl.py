"""`kproxy ctl`: the options of asking a kproxy that runs. The work is that of its admin API; see docs/admin.md."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kproxy.cli import Suggesting, admin_port

if TYPE_CHECKING:
    from kproxy.admin.asking import AdminPort

_PAGE = 10_000
_GROUPS_PAGE = 1000
_ZOOKEEPER_PAGE = 1000
_DUMP_S = 300.0  # a process may have one of its own to write before
_GROUP_COLUMNS = ("cluster", "group", "protocol", "type", "state", "generation", "members", "coordinator")
_REBALANCE_COLUMNS = ("last_rebalance", "took", "cause", "reason")
_COLUMNS = ("number", "cluster", "listener", "client", "principal", "client_id", "software", "tls", "broker", "age")
_OF_ZOOKEEPER = ("number", "cluster", "client", "server", "session", "age", "operations", "operations_pending")
_COUNTS = ("requests", "requests_pending", "bytes_in", "bytes_out")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, as the admin API answers.")


class _Asking(Suggesting):
    """Reports options or addresses that choose the kproxy, and must be before the command, but are after it."""

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(context, arguments)
        own = {option for parameter in self.params for option in parameter.opts}
        its = {option for parameter in command.params for option in parameter.opts} if command is not None else own
        for each in rest:
            option = each.partition("=")[0]
            if option in own - its or each.startswith(("http://", "https://")):
                before = f"{option} ..." if option in own else f"-a {each}"
                raise click.UsageError(
                    f"{each!r} says which kproxy is asked: it stands before {name!r}, as in "
                    f"{context.command_path} {before} {name}",
                    context,
                )
        return name, command, rest


@click.group(cls=_Asking)
@click.option(
    "-a",
    "--admin",
    metavar="[http[s]://][HOST:]PORT",
    default="localhost:9600",
    show_default=True,
    help="Address of the admin port of that kproxy, its --admin, as seen from here.",
)
@admin_port.token_file
@admin_port.ca
@click.pass_context
def ctl(context: click.Context, admin: str, token_file: Path | None, ca: Path | None) -> None:
    """Ask a kproxy that runs, and change what it does.

    \b
    Its state, its connections, and the requests in flight of one:
      kproxy ctl status
      kproxy ctl connections
      kproxy ctl requests 17
    \b
    The frames of one client, decoded, as they pass; secrets and records are left out:
      kproxy ctl trace --client 10.0.0.7
    \b
    A kproxy on another machine:
      kproxy ctl -a https://kproxy-1:9600 --token-file token --ca ca.pem status
    """

    def port() -> "AdminPort":
        from kproxy.admin.asking import AdminPort

        return AdminPort(admin, token_file, ca)

    context.obj = port


@ctl.command()
@as_json
@click.pass_obj
def status(port: "Callable[[], AdminPort]", as_json: bool) -> None:
    """Show whether it is ready, how many connections it has, and how long it has been running.

    \b
      kproxy ctl status
      kproxy ctl status --json | jq .ready
    """
    answer = port().get("/api/status")
    if as_json:
        _print(answer)
        return
    from kproxy.views import operator as view

    started = (time.time_ns() - answer.pop("started_ns")) / 1e9
    view.show_values({**answer, "running for": view.age(started)})


@ctl.command()
@as_json
@click.pass_obj
def dump(port: "Callable[[], AdminPort]", as_json: bool) -> None:
    """Write what the flight recorder holds: the last minutes, as tables and as packets for Wireshark.

    The folder is on the machine of that kproxy, in the folder of its --flight. tables_from and frames_from are the
    times at which the tables and the packets begin; `shorter` names the setting that made one of them begin later.

    \b
      kproxy ctl dump
      kproxy analyze overview DUMPS/20261122T101500.000Z-asked
      wireshark DUMPS/20261122T101500.000Z-asked/frames.pcapng
    """
    from kproxy.errors import KproxyError
    from kproxy.views.progress import waiting

    admin = port()
    if not as_json:
        click.echo("kproxy writes what it has in memory; with both memories full this takes a minute", err=True)
    with waiting("kproxy writes the dump", quiet=as_json):
        status, answer = admin.post("/api/dump", timeout_s=_DUMP_S)
    if status != 200:
        raise KproxyError(answer["error"])
    if as_json:
        _print(answer)
        return
    from kproxy.views import operator as view

    view.show_values(answer)


@ctl.command()
@click.option("--cluster", metavar="NAME", help="Only those of this cluster.")
@click.option("--client", metavar="TEXT", help="Only those whose address, client id or principal contains this.")
@click.option("--zookeeper", is_flag=True, help="The clients of [[zookeeper]] instead, with their sessions.")
@as_json
@click.pass_obj
def connections(
    port: "Callable[[], AdminPort]", cluster: str | None, client: str | None, zookeeper: bool, as_json: bool
) -> None:
    """Open connections, the oldest first: client, age, broker, requests and bytes.

    \b
      kproxy ctl connections
      kproxy ctl connections --client orders-service
      kproxy ctl connections --zookeeper
    """
    place, size = ("/api/zookeeper", _ZOOKEEPER_PAGE) if zookeeper else ("/api/connections", _PAGE)
    admin, rows, after = port(), [], 0
    while page := admin.get(place, limit=size, after=after):
        rows += [row for row in page if _matches(row, cluster, client)]
        after = max(row["number"] for row in page)
        if len(page) < size:
            break
    if as_json:
        _print(rows)
        return
    from kproxy.views import operator as view

    view.show_table(
        view.connections(rows, time.time_ns()), _OF_ZOOKEEPER if zookeeper else (*_COLUMNS, *_COUNTS), "no connections"
    )


@ctl.command()
@click.option("--cluster", metavar="NAME", help="Only those of this cluster.")
@click.option("--group", metavar="TEXT", help="Only those whose id contains this.")
@as_json
@click.pass_obj
def groups(port: "Callable[[], AdminPort]", cluster: str | None, group: str | None, as_json: bool) -> None:
    """Consumer groups, from their traffic: state, members, the last rebalance and its cause.

    protocol: classic, consumer (KIP-848), share or streams (KIP-1071); type: kind of its members, as consumer,
    connect or streams. Only clusters whose `detail` is topics or batches, and groups seen since kproxy started. Their
    lag: `kproxy top`, and kproxy_group_committed_offset of /metrics by partition.

    \b
      kproxy ctl groups
      kproxy ctl groups --group orders --json | jq '.[].members'
    """
    admin, rows, after, known = port(), [], "", 0
    while page := admin.get("/api/groups", limit=_GROUPS_PAGE, after=after):
        known += len(page)
        rows += [row for row in page if cluster in (None, row["cluster"]) and (group or "") in row["group"]]
        after = f"{page[-1]['cluster']}/{page[-1]['group']}"
        if len(page) < _GROUPS_PAGE:
            break
    if as_json:
        _print(rows)
        return
    from kproxy.views import operator as view
    from kproxy.wording import counted

    nothing = (
        "no groups were seen: a group is listed once a member joins through kproxy (KIP-848: heartbeats), where the "
        'cluster has detail = "topics" (--detail topics)'
    )
    if known:
        nothing = f"{counted(known, 'group')} seen, none of them chosen; `kproxy ctl groups` lists them"
    view.show_table(view.groups(rows, time.time_ns()), (*_GROUP_COLUMNS, *_REBALANCE_COLUMNS), nothing)


@ctl.command()
@click.option("--cluster", metavar="NAME", help="Only those of this cluster.")
@click.option(
    "--threshold",
    "given",
    metavar="NAME=VALUE",
    multiple=True,
    help="Threshold of a finding, as listed by `kproxy analyze findings --list`.",
)
@as_json
@click.pass_obj
def findings(port: "Callable[[], AdminPort]", cluster: str | None, given: tuple[str, ...], as_json: bool) -> None:
    """Findings of the last quarter of an hour: evidence, why it matters, which setting to change.

    They come from metrics: topics, groups and lag need `detail` topics or batches. `kproxy analyze findings` finds
    more, in a capture or a recording.

    \b
      kproxy ctl findings
      kproxy ctl findings --threshold loop_lag_ms=1 --json
    """
    from kproxy.analysis.findings.thresholds import parted

    answer = port().get("/api/findings", **parted(given))
    if cluster is not None:
        answer["findings"] = [row for row in answer["findings"] if row["cluster"] == cluster]
    if as_json:
        _print(answer)
        return
    from kproxy.views import findings as view

    view.show_live(answer, sys.stdout)


def _matches(row: dict[str, Any], cluster: str | None, client: str | None) -> bool:
    named = any(client in str(row[name]) for name in ("client", "client_id", "principal")) if client else True
    return named and cluster in (None, row["cluster"])


@ctl.command()
@click.argument("connection", type=int)
@as_json
@click.pass_obj
def requests(port: "Callable[[], AdminPort]", connection: int, as_json: bool) -> None:
    """The requests in flight of a connection: API and age of each.

    \b
    CONNECTION is a number of `kproxy ctl connections`:
      kproxy ctl requests 17
    """
    rows = port().get("/api/requests", connection=connection)
    if as_json:
        _print(rows)
        return
    from kproxy.views import operator as view

    columns = ("number", "api", "version", "correlation_id", "client_id", "bytes", "pending_s", "answer_begun")
    view.show_table(rows, columns, "no requests in flight")


@ctl.command()
@click.argument("connection", type=int)
@as_json
@click.pass_obj
def close(port: "Callable[[], AdminPort]", connection: int, as_json: bool) -> None:
    """Close a connection at once, even with requests in flight. `drain` lets its requests finish first.

    \b
      kproxy ctl close 17
    """
    _done(port().post("/api/close", connection=connection), as_json, "closed", f"connection {connection} is not open")


@ctl.command()
@click.option("--connection", type=int, metavar="NUMBER", help="One connection.")
@click.option("--cluster", metavar="NAME", help="All connections of a cluster.")
@click.option("--all", "everything", is_flag=True, help="All connections.")
@as_json
@click.pass_obj
def drain(
    port: "Callable[[], AdminPort]", connection: int | None, cluster: str | None, everything: bool, as_json: bool
) -> None:
    """Close connections between two requests; their clients reconnect at once.

    \b
      kproxy ctl drain --connection 17
      kproxy ctl drain --cluster orders
    """
    if (connection is not None) + (cluster is not None) + everything != 1:
        raise click.UsageError("say what is drained: --connection NUMBER, --cluster NAME, or --all")
    answer = port().post("/api/drain", connection=connection, cluster=cluster, all="yes" if everything else None)
    _done(answer, as_json, "draining", f"connection {connection} is not open")


@ctl.command("log-level")
@click.argument("level", required=False, type=click.Choice(("debug", "info", "warning", "error")))
@as_json
@click.pass_obj
def log_level(port: "Callable[[], AdminPort]", level: str | None, as_json: bool) -> None:
    """Show the log level, or change it until kproxy ends.

    \b
      kproxy ctl log-level
      kproxy ctl log-level debug
    """
    answer = port().get("/api/log-level") if level is None else port().post("/api/log-level", level=level)[1]
    if as_json:
        _print(answer)
    else:
        click.echo(answer["level"])


@ctl.command()
@as_json
@click.pass_obj
def brokers(port: "Callable[[], AdminPort]", as_json: bool) -> None:
    """The brokers of each cluster: their ports in kproxy, and their own addresses.

    Clients cannot reach a broker without a port: GET /ready has the reason.

    \b
      kproxy ctl brokers
    """
    clusters = port().get("/api/clusters")
    if as_json:
        _print(clusters)
        return
    from kproxy.views import operator as view

    rows = [
        {"cluster": cluster["name"], "broker": node_id, **broker}
        for cluster in clusters
        for node_id, broker in cluster["brokers"].items()
    ]
    view.show_table(rows, ("cluster", "broker", "port", "upstream"), "no brokers are known yet")


@ctl.command()
@as_json
@click.pass_obj
def policy(port: "Callable[[], AdminPort]", as_json: bool) -> None:
    """The policy of each cluster, in order of evaluation: read_only, the rules, the default. And its limits.

    The audit and `kproxy check` name a rule by its number.

    \b
      kproxy ctl policy
      kproxy ctl policy --json
    """
    answer = port().get("/api/policy")
    if as_json:
        _print(answer)
        return
    from kproxy.views import operator as view

    for cluster in answer:
        is_read_only = cluster["read_only"]
        of_reads = "true: refuses every API but `read` and `describe`, before any rule" if is_read_only else False
        rules = [{"rule": number, **rule} for number, rule in enumerate(cluster["policy"], 1)]
        view.show_values({**cluster, "read_only": of_reads, "policy": rules})


@ctl.command()
@as_json
@click.pass_obj
def reload(port: "Callable[[], AdminPort]", as_json: bool) -> None:
    """Make kproxy read its settings again. If they have a fault, nothing changes, and the fault is printed.

    \b
      kproxy ctl reload
    """
    status, answer = port().post("/api/reload")
    if as_json:
        _print(answer)
    else:
        from kproxy.views import operator as view

        view.show_values(answer)
    if status >= 400:
        sys.exit(2)


@ctl.command()
@click.option("--connection", type=int, metavar="NUMBER", help="Number of a connection, from `kproxy ctl connections`.")
@click.option("--client", metavar="ADDRESS", help="All connections of an address, also later ones.")
@click.option(
    "--seconds", type=click.IntRange(1, 3600), default=60, show_default=True, help="Maximum duration in seconds."
)
@click.option(
    "--frames", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="Maximum number of frames."
)
@click.option("--bytes", "size", type=click.IntRange(1), help="Maximum bytes of frames. Default: 16 MiB.")
@as_json
@click.pass_obj
def trace(
    port: "Callable[[], AdminPort]",
    connection: int | None,
    client: str | None,
    seconds: int,
    frames: int,
    size: int | None,
    as_json: bool,
) -> None:
    """Print the frames of a client as they pass, decoded as `kproxy decode` does.

    SASL tokens, passwords, HMACs and records never leave kproxy. Traffic does not wait for a trace: frames that it
    cannot keep up with are left out, and counted.

    \b
      kproxy ctl trace --client 10.0.0.7
      kproxy ctl trace --connection 17 --seconds 5 --json
    """
    if (connection is None) == (client is None):
        raise click.UsageError("say what is traced: --connection NUMBER or --client ADDRESS")
    asked = {"connection": connection, "client": client, "seconds": seconds, "frames": frames, "bytes": size}
    lines = port().stream("/api/trace", **asked)
    try:
        if as_json:
            for line in lines:
                click.echo(json.dumps(line))
            return
        from kproxy.views import operator as view

        shown = view.Frames()
        for line in lines:
            shown.show(line)
    except KeyboardInterrupt:
        pass


def _print(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _done(answer: tuple[int, Any], as_json: bool, what: str, nothing: str) -> None:
    """Print the number of connections concerned; exit status 1 if there was none."""
    status, value = answer
    if as_json:
        _print(value)
    elif status < 400:
        click.echo(f"{what}: {value[what]}")
    else:
        click.echo(nothing, err=True)
    if status >= 400:
        sys.exit(1)
