"""The command line: each command is a file here with its options, its help and one call. The work is done elsewhere.

A command's file is imported when the command is used, and imports what is heavy when it runs: `kproxy --version` loads
click and nothing of its weight.
"""

import difflib
import importlib
import logging
import os
import shlex
import sys
from contextlib import suppress

import click

from kproxy import __version__
from kproxy.errors import KproxyError, missing_package

_MODULE_OF = {
    "run": "kproxy.cli.run",
    "check": "kproxy.cli.check",
    "doctor": "kproxy.cli.doctor",
    "compat": "kproxy.cli.compat",
    "users": "kproxy.cli.users",
    "convert": "kproxy.cli.convert",
    "analyze": "kproxy.cli.analyze_group",
    "report": "kproxy.cli.report",
    "show": "kproxy.cli.show",
    "spark": "kproxy.cli.spark_group",
    "ctl": "kproxy.cli.ctl",
    "top": "kproxy.cli.top",
    "watch": "kproxy.cli.watch",
    "decode": "kproxy.cli.decode",
    "demo": "kproxy.cli.demo",
}


class Suggesting(click.Group):
    """Names commands with a similar name for an unknown one."""

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(context, arguments)
        except click.UsageError as fault:
            if os.path.exists(arguments[0]):  # noqa: PTH110 - whatever the text is, it raises nothing
                raise click.UsageError(self._file_first(context, arguments), context) from None
            near = difflib.get_close_matches(arguments[0], self.list_commands(context), 1)
            if not near or "Did you mean" in fault.format_message():  # newer versions of click add it
                raise
            raise click.UsageError(f"{fault.format_message()} Did you mean {near[0]!r}?", context) from None

    def _file_first(self, context: click.Context, arguments: list[str]) -> str:
        commands = self.list_commands(context)
        asked = [each for each in arguments[1:] if each in commands]
        some = (
            asked or [each for each in ("overview", "analyze overview") if each.partition(" ")[0] in commands] or ["-h"]
        )
        begin = f"{context.command_path} {some[0]}"
        return f"{arguments[0]!r} is no command; put the command before it: {begin} {shlex.quote(arguments[0])}"


class Hinting(click.Command):
    """Adds to click's message about a wrong command line the option that the user probably meant, if `hint` has one."""

    def hint(self, arguments: list[str]) -> str:
        """A sentence with the fix; empty: none is known."""
        raise NotImplementedError

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        given = list(arguments)
        try:
            return super().parse_args(context, arguments)
        except click.UsageError as fault:
            hint = self.hint(given)
            if not hint:
                raise
            raise click.UsageError(f"{fault.format_message()} {hint}", context) from None


class _Commands(Suggesting):
    """Commands whose modules are imported when they are asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_MODULE_OF)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _MODULE_OF:
            return None
        command = getattr(importlib.import_module(_MODULE_OF[name]), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kproxy")
def cli() -> None:
    """A protocol-aware proxy for Apache Kafka, and an analyser of its traffic.

    \b
    See it work, with nothing to set up:
      kproxy demo
    \b
    Put it before a cluster, and read its metrics:
      kproxy run --listen localhost:9092 --bootstrap kafka-1:9092 --admin localhost:9600
      curl -s localhost:9600/metrics
    \b
    Turn a packet capture into Parquet tables, and ask them:
      kproxy convert incident.pcap --out tables
      kproxy analyze overview tables
    \b
    Completion of commands and options in the shell: bash, zsh, fish
      echo 'eval "$(_KPROXY_COMPLETE=bash_source kproxy)"' >> ~/.bashrc
      echo 'eval "$(_KPROXY_COMPLETE=zsh_source kproxy)"' >> ~/.zshrc
      echo '_KPROXY_COMPLETE=fish_source kproxy | source' > ~/.config/fish/completions/kproxy.fish
    """


def main() -> None:
    """The program `kproxy`: a fault that kproxy knows is a line on standard error, with exit status 2."""
    _open_standard_files()
    # Nobody multiplies matrices here: numpy's threads for that would only cost 40 ms of CPU at each start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        cli()
    except KproxyError as fault:
        logging.shutdown()  # print the log lines that led to it first
        click.echo(f"kproxy: {fault}" if "\n" not in str(fault) else f"kproxy:\n{fault}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as fault:
        missing = missing_package(fault.name)
        if missing is None:
            raise
        click.echo(f"kproxy: this {missing}", err=True)
        sys.exit(2)
    except OSError as fault:  # for example, the output's disk is full
        click.echo(f"kproxy: {_os_error_text(fault)}", err=True)
        with suppress(OSError):
            sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python flushes once more at its end, and reports it again
        sys.exit(1)


def _os_error_text(fault: OSError) -> str:
    """The system's message, and the file concerned."""
    return f"{fault.filename}: {fault.strerror}" if fault.strerror and fault.filename is not None else str(fault)


def _open_standard_files() -> None:
    """Opens /dev/null for a standard file that our parent has closed.

    Else a socket takes its number, and libuv aborts the process when it is to close one of these numbers.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, mode))
