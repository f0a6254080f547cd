"""The options of the commands that ask the admin port of a running kproxy: its token, and the CA of its certificate."""

from pathlib import Path

import click

token_file = click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="KPROXY_ADMIN_TOKEN_FILE",
    metavar="FILE",
    help="File of the bearer token that it requires. Also KPROXY_ADMIN_TOKEN_FILE.",
)
ca = click.option(
    "--ca",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="CA certificates (PEM) for its certificate; implies https.",
)
