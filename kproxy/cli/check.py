"""`kproxy check`: the options. The checks are in `kproxy.proxy.control.check`, how they look in `views.check`."""

import json
import os
import sys

import click


@click.command(epilog="Exit status: 0, it can run; 1, it has faults; 2, this command is wrong.")
@click.argument("file", metavar="FILE.toml")
@click.option("--json", "as_json", is_flag=True, help="Print the faults, or what would run, as JSON.")
def check(file: str, as_json: bool) -> None:
    """Check a configuration without opening a port.

    All that `kproxy run --config FILE.toml` would refuse is named at once, each with its place and its mend: settings,
    TLS files, secrets that cannot be read. Variables KPROXY_... count as they do there. `kproxy doctor` also asks the
    clusters.

    \b
      kproxy check kproxy.toml
      kproxy check kproxy.toml --json | jq .runs.clusters
      kproxy check kproxy.toml && kill -HUP "$(pidof kproxy)"
    """
    from kproxy.proxy.control.check import check as checked
    from kproxy.proxy.control.check import summary
    from kproxy.views.check import faults, runs

    found = checked(file, os.environ)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    elif found.config is None:
        for line in faults(found.faults):
            click.echo(line, err=True)
    else:
        for line in runs(summary(found.config)):
            click.echo(line)
    sys.exit(1 if found.faults else 0)
