"""`./dev incident`: an incident before real brokers, its truth, and beside it what kproxy concludes. See run.py."""

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click

from tests.incident.run import Plan, run


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--times", type=float, default=1, show_default=True, help="Calm parts so many times as long.")
@click.option("--rate", type=int, default=300, show_default=True, help="Records a second of each steady producer.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="For capture, truth and logs. Default: a temporary one."
)
@click.option("--healthy", type=float, default=0, help="So many minutes of healthy clients alone: no finding is right.")
def main(times: float, rate: int, folder: Path | None, healthy: float) -> None:
    """Kill, stop and pause brokers under good and bad clients; print the truth and kproxy's conclusions."""
    place = folder or Path(tempfile.mkdtemp(prefix="incident-"))
    start = time.monotonic()
    given = Plan()
    plan = replace(given, calm_s=given.calm_s * times, between_s=given.between_s * times, rate=rate, has_java=True)
    plan = replace(plan, healthy_s=60 * healthy)
    capture = run(place, plan, lambda text: click.echo(f"{time.monotonic() - start:6.0f} s  {text}"))
    click.echo(f"{capture}: {capture.stat().st_size / 1e6:.0f} MB\n\nThe truth, from {place / 'truth.jsonl'}:\n")
    click.echo((place / "truth.jsonl").read_text())
    click.echo("What kproxy concludes:\n", nl=True)
    for command in ("overview", "findings"):
        subprocess.run([sys.executable, "-m", "kproxy", "analyze", command, str(capture)], check=True)


if __name__ == "__main__":
    main()
