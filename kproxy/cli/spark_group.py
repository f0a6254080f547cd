"""`kproxy spark`: the group of the commands that run on Spark. Its help needs neither pyspark nor a JVM."""

import click

# As in `kproxy.cli.spark`, which needs pyspark, imported in half a second; a test holds both together.
SUMMARIES = {
    "ingest": "Captures of any size to the tables of kproxy convert.",
    "latency": "How long answers take.",
    "slow": "The slowest exchanges, each explained.",
    "throttle": "Who is throttled, how often and how long.",
    "errors": "What brokers refuse.",
    "talkers": "Who talks most.",
    "skew": "Hot partitions.",
    "batching": "How well producers batch.",
    "fetching": "How well consumers fetch.",
    "lag": "How far consumers are behind, as their fetches say.",
    "offsets": "How groups commit.",
    "clients": "Which software speaks which versions, and who breaks on a Kafka release.",
    "connections": "How connections live.",
    "compare": "Two captures side by side.",
    "quality": "What a capture could not show.",
}


class _SparkCommands(click.Group):
    """Commands that are made when one of them is asked for, since their options are the parameters of the jobs."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(SUMMARIES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in SUMMARIES:
            return None
        from kproxy.cli.spark import COMMANDS

        command: click.Command = COMMANDS[name]
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))


@click.group(cls=_SparkCommands)
def spark() -> None:
    """Captures and tables of any size on Spark, from this machine's cores to a cluster.

    \b
    Tables from captures, and answers from tables, whoever wrote them:
      kproxy spark ingest captures/*.pcap --out tables
      kproxy spark latency tables --by api,client
      kproxy spark slow tables --format json
    """
