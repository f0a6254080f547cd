"""`kproxy analyze`: the group of questions to tables. Its help imports neither an engine nor pyarrow."""

import click

from kproxy.cli import Suggesting


class _Questions(Suggesting):
    """Commands that are made when they are asked for, since their options and help are those of the jobs."""

    def list_commands(self, context: click.Context) -> list[str]:
        from kproxy.cli.analyze import COMMANDS

        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        from kproxy.cli.analyze import COMMANDS

        return COMMANDS.get(name)


@click.group(cls=_Questions)
def analyze() -> None:
    """Answers from tables, in a second, on this machine.

    \b
    Make tables from a capture, and ask questions:
      kproxy convert incident.pcap --out tables
      kproxy analyze slow tables
      kproxy analyze latency tables --by api,client --every '1 minute'
    """
