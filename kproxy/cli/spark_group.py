"""`kproxy spark`: the group of the commands that run on Spark. Its help needs neither pyspark nor a JVM."""

import click

from kproxy.cli import Suggesting


class _SparkCommands(Suggesting):
    """Commands that are made when they are asked for, since their options and help are those of the jobs."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_commands())

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return _commands().get(name)


def _commands() -> dict[str, click.Command]:
    from kproxy.cli.prepare import prepare
    from kproxy.cli.spark import COMMANDS

    return {**COMMANDS, "prepare": prepare}


@click.group(cls=_SparkCommands)
def spark() -> None:
    """Read captures and tables of any size with Spark, on this machine or on a cluster.

    `ingest` and `follow` turn captures into a folder of tables. The other commands answer questions from such a folder;
    `kproxy convert` and `kproxy run --record` write one, too.

    \b
    Turn the captures in the folder `captures` into tables in the folder `tables`, then ask:
      kproxy spark ingest captures --out tables
      kproxy spark latency tables --by api,client
      kproxy spark slow tables --format json
    """
