"""`kproxy spark`: the group of the commands that run on Spark. Its help needs neither pyspark nor a JVM."""

import click

from kproxy.cli import Suggesting


class _SparkCommands(Suggesting):
    """Commands that are made when they are asked for, since their options and help are those of the jobs."""

    def list_commands(self, context: click.Context) -> list[str]:
        from kproxy.cli.spark import COMMANDS

        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        from kproxy.cli.spark import COMMANDS

        return COMMANDS.get(name)


@click.group(cls=_SparkCommands)
def spark() -> None:
    """Captures and tables of any size on Spark, from this machine's cores to a cluster.

    \b
    Tables from captures, and answers from tables, whoever wrote them:
      kproxy spark ingest captures/*.pcap --out tables
      kproxy spark latency tables --by api,client
      kproxy spark slow tables --format json
    """
