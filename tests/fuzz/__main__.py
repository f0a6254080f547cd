"""`./dev fuzz`: mutated requests of every API and version, read by kproxy and by Kafka's own classes."""

import sys
import time
from collections import Counter

import click

from tests.fuzz.compare import compare


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--count", type=click.IntRange(1), default=1_000_000, show_default=True, help="Requests to compare.")
@click.option(
    "--seed", type=int, default=1, show_default=True, help="Of the mutations; the same seed, the same requests."
)
def main(count: int, seed: int) -> None:
    """Compare what kproxy reads of a million mutated requests with what Kafka's own classes read in the same bytes.

    Names that rules are about, first fields, and requests that kproxy replaces.

    \b
    ./dev fuzz                        a million, some minutes
    ./dev fuzz --count 20000 --seed 7
    """
    start = time.monotonic()

    def progress(done: int, seen: Counter[str]) -> None:
        if done % 50_000 < 2000 or done == count:
            click.echo(f"{time.monotonic() - start:6.0f} s  {done:,} requests, {seen['read by both']:,} read by both")

    try:
        seen = compare(count, seed, progress)
    except AssertionError as difference:
        click.echo(f"a difference: {difference}", err=True)
        sys.exit(1)
    for what, number in sorted(seen.items()):
        click.echo(f"{number:10,}  {what}")


if __name__ == "__main__":
    main()
