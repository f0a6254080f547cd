"""`kproxy check`: the options. The checks: `checks.check`, how they look: `views.check`."""

import ipaddress
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from kproxy.proxy.config.settings import Config


@click.command(
    epilog="Exit status: 0, it can run, or the request passes; 1, it has faults, or the request is refused; 2, this "
    "command is wrong."
)
@click.argument("file", metavar="FILE.toml")
@click.option("--json", "as_json", is_flag=True, help="Print the faults, or what would run, as JSON.")
@click.option(
    "--filters",
    "lists_filters",
    is_flag=True,
    help="List the filters of each cluster's connections in their order, with the APIs that each one takes part in.",
)
@click.option(
    "--request", metavar="API", help="Report what the policy does with such a request, and which rule decides."
)
@click.option("--version", metavar="N", type=int, help="Version of the API. Default: the newest that kproxy reads.")
@click.option("--topic", "topics", metavar="NAME", multiple=True, help="A topic that the request names.")
@click.option("--group", "groups", metavar="NAME", multiple=True, help="A group that the request names.")
@click.option(
    "--transactional-id",
    "transactional_ids",
    metavar="ID",
    multiple=True,
    help="A transactional id that the request names.",
)
@click.option("--principal", metavar="NAME", default="User:ANONYMOUS", help="Principal of the client, like User:alice.")
@click.option("--client-id", metavar="ID", help="The client id of the request.")
@click.option("--address", metavar="IP", default="127.0.0.1", help="Address of the client.")
@click.option("--cluster", metavar="NAME", help="Name of the [[cluster]], if the file has several.")
def check(
    file: str, as_json: bool, lists_filters: bool, request: str | None, cluster: str | None, **asked: Any
) -> None:
    """Check a configuration without opening a port.

    Names everything that `kproxy run --config FILE.toml` would refuse, each with its place and its remedy: settings,
    TLS files, secrets that cannot be read. It warns of valid settings that are probably a mistake, like a policy that
    refuses nothing. Variables KPROXY_... count as they do there. `kproxy doctor` also asks the clusters.

    \b
      kproxy check kproxy.toml
      kproxy check kproxy.toml --json | jq .runs.clusters
      kproxy check kproxy.toml && kill -HUP "$(pidof kproxy)"
      kproxy check kproxy.toml --request Produce --topic orders --principal User:alice
      kproxy check kproxy.toml --filters
    """
    # messages that a start would log, such as an expired certificate
    logging.basicConfig(format="warning: %(message)s")
    from kproxy.checks.check import check as checked
    from kproxy.checks.check import summary
    from kproxy.views.check import faults, runs, warnings

    _refuse_mistakes(request, asked)
    found = checked(file, os.environ)
    if request is not None and found.config is not None:
        from kproxy.proxy.filters.policy.explain import explain, listener

        explained = explain(listener(found.config, cluster), api=request, **asked)
        if as_json:
            click.echo(json.dumps([one.as_json() for one in explained], indent=2))
        else:
            for one in explained:
                click.echo(one)
                for line in one.near:
                    click.echo(f"  {line}")
        sys.exit(0 if all(one.verdict.allowed for one in explained) else 1)
    if lists_filters and found.config is not None:
        _show_filters(found.config, as_json=as_json)
        sys.exit(0)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    elif found.config is None:
        for line in faults(found.faults):
            click.echo(line, err=True)
    else:
        for line in runs(summary(found.config)):
            click.echo(line)
        for line in warnings(found.warnings):
            click.echo(line, err=True)
    sys.exit(1 if found.faults else 0)


def _show_filters(config: "Config", *, as_json: bool) -> None:
    from kproxy.checks.filters import filters_of
    from kproxy.views.check import filters

    chains = {cluster.name: filters_of(config, cluster) for cluster in config.clusters}
    if as_json:
        listed = {
            name: {"filters": [each.as_json() for each in chain], "none": list(free.names)}
            for name, (chain, free) in chains.items()
        }
        click.echo(json.dumps(listed, indent=2))
        return
    for name, (chain, free) in chains.items():
        for line in filters(name, chain, free):
            click.echo(line)


def _refuse_mistakes(request: str | None, asked: dict[str, Any]) -> None:
    """Raises click.UsageError for options that no request could have, or that are given without --request."""
    from kproxy.proxy.config.policy import PRINCIPAL_TYPE

    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if request is None and given and option.name in (*asked, "cluster"):
            raise click.UsageError(f"{option.opts[0]} is about a request: add --request API")
    if not asked["principal"].startswith(PRINCIPAL_TYPE):
        name = asked["principal"].rpartition(":")[2]
        raise click.UsageError(f"--principal has the type before the name, like {PRINCIPAL_TYPE}{name}")
    try:
        ipaddress.ip_address(asked["address"])
    except ValueError:
        raise click.UsageError(f"--address: {asked['address']!r} is no IP address, like 10.1.2.3") from None
