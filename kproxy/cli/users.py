"""`kproxy users`: the file of users that `[cluster.authentication]` checks passwords against (`sasl.users`)."""

import sys
from pathlib import Path

import click

MIN_PASSWORD = 8

_File = click.Path(dir_okay=False, path_type=Path)


@click.group()
def users() -> None:
    """Add, remove and list users whose logins kproxy checks itself.

    The file holds what SCRAM needs to check a password, not the password. A running kproxy reads it again when it
    changes.

    \b
      kproxy users add /etc/kproxy/users alice
      kproxy users add /etc/kproxy/users shop < password-of-shop
      kproxy users remove /etc/kproxy/users alice
      kproxy users list /etc/kproxy/users
    """


@users.command()
@click.argument("file", type=_File)
@click.argument("name")
def add(file: Path, name: str) -> None:
    """Add a user, or change the password; it is asked for, or the first line of standard input.

    A password has 8 characters at least. The name is that of the login: a policy calls `alice` User:alice.

    \b
      kproxy users add /etc/kproxy/users alice
    """
    from kproxy.proxy.config.policy import PRINCIPAL_TYPE
    from kproxy.proxy.sasl.users import UsersError, change

    if not name.isprintable() or not name:
        raise click.UsageError("a name has no control characters, and at least one other")
    if name.startswith(PRINCIPAL_TYPE):
        bare = name.removeprefix(PRINCIPAL_TYPE)
        raise click.UsageError(f"a name goes without its type, as clients log in: {bare or 'alice'}, not {name}")
    if not file.parent.is_dir():
        raise click.ClickException(f"{file} cannot be written: there is no folder {file.parent}: make it first")
    if sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().removesuffix("\n").removesuffix("\r")
    if len(password) < MIN_PASSWORD:
        raise click.UsageError(f"a password has {MIN_PASSWORD} characters at least")
    if not password.isprintable() or not _is_the_same_prepared(password):
        raise click.UsageError(
            "SCRAM libraries treat some characters of this password differently (SASLprep, RFC 4013), so that not all "
            "clients could log in: use others"
        )
    try:
        was_there = change(file, name, password)
    except UsersError as fault:
        raise click.ClickException(f"{file}: {fault}") from None
    click.echo(f"{name}: {'password changed' if was_there else 'added'}")


@users.command()
@click.argument("file", type=_File)
@click.argument("name")
def remove(file: Path, name: str) -> None:
    """Remove a user. Open connections stay until their sessions end.

    \b
      kproxy users remove /etc/kproxy/users alice
    """
    from kproxy.proxy.sasl.users import UsersError, change, read

    try:
        if name not in read(file):
            raise click.ClickException(f"{file} has no user {name}")
        change(file, name, None)
    except UsersError as fault:
        raise click.ClickException(str(fault)) from None
    click.echo(f"{name}: removed")


@users.command("list")
@click.argument("file", type=_File)
def list_(file: Path) -> None:
    """List the names of a file's users, and the mechanisms that they can use.

    \b
      kproxy users list /etc/kproxy/users
    """
    from kproxy.proxy.sasl.users import UsersError, read

    try:
        found = read(file)
    except UsersError as fault:
        raise click.ClickException(str(fault)) from None
    for name, mechanisms in sorted(found.items()):
        click.echo(f"{name}  {' '.join(('PLAIN', *sorted(mechanisms)))}")


def _is_the_same_prepared(text: str) -> bool:
    """Whether SASLprep leaves a text as it is: Kafka's clients do not apply it, others do. ASCII always is."""
    if text.isascii():
        return True
    try:
        from scramp.utils import saslprep
    except ModuleNotFoundError:
        return False
    try:
        return bool(saslprep(text) == text)
    except Exception:  # it has characters that must not be there
        return False
