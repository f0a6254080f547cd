"""`./dev chaos`: clients with promises, three brokers and kproxy, while all that can fail fails. See run.py."""

import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import click

from tests.chaos.run import STUCK_AFTER_S, run


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--minutes", type=float, default=60, show_default=True, help="How long faults go on.")
@click.option("--seed", type=int, help="Of the schedule of faults. Default: another one each time.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Of kproxy.")
@click.option(
    "--stuck-after-s", type=float, default=STUCK_AFTER_S, show_default=True, help="Without progress after a fault."
)
@click.option(
    "--json", "output", type=click.Path(path_type=Path), help="A file for the tally. It is printed in any case."
)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="A folder for all logs. Default: one that is kept on failure."
)
def main(
    minutes: float, seed: int | None, workers: int, stuck_after_s: float, output: Path | None, keep: Path | None
) -> None:
    """Kill, cut, stall and move all there is, then look for anything lost, doubled, torn or stuck."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a shell's background, too: brokers are ended in any case
        signal.signal(number, signal.default_int_handler)
    chosen = random.randrange(1 << 30) if seed is None else seed
    folder = keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    start = time.monotonic()
    click.echo(f"seed {chosen}, logs in {folder}")
    tally = run(
        folder,
        seconds=minutes * 60,
        seed=chosen,
        workers=workers,
        stuck_after_s=stuck_after_s,
        say=lambda text: click.echo(f"{time.monotonic() - start:6.0f} s  {text}"),
    )
    click.echo(tally.json())
    if output is not None:
        output.write_text(tally.json() + "\n")
    if tally.violations:
        again = f"./dev chaos --seed {chosen} --minutes {minutes:g}" + (f" --workers {workers}" if workers > 1 else "")
        click.echo(f"{len(tally.violations)} violations. Again: {again}   Logs: {folder}", err=True)
        sys.exit(1)
    if keep is None:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
