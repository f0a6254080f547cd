"""`./dev mutants`: changes one operator, bound or constant at a time and asks whether the tests of ring 1 notice.

Each mutant runs in a clone of HEAD, against the ring 1 tests of the folder that mirrors the module's, until the first
failure. A run that takes three times as long as the same tests without a mutant hangs, and so is noticed.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from tests.mutants.mutate import Mutant, mutants
from tests.mutants.mutate import count as mutants_of
from tests.project import ROOT

FOLDERS = (
    "kproxy/wire",
    "kproxy/protocol",
    "kproxy/proxy/filters/policy",
    "kproxy/proxy/sasl",
    "kproxy/capture",
    "kproxy/metrics",
)
NO_TESTS = 5  # pytest's status where a folder has no test of the ring
HANGS = 3  # times as long as without a mutant


def sample(count: int, seed: int, only: str | None) -> list[tuple[Path, Mutant]]:
    """Mutants of the modules, chosen at random, the same for a seed."""
    places = [ROOT / only] if only else [ROOT / folder for folder in FOLDERS]
    modules = sorted(path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place]))
    every = [(module, each) for module in modules for each in range(mutants_of(module.read_text()))]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    return [
        (module.relative_to(ROOT), mutant)
        for module, number in chosen
        for mutant in mutants(module.read_text(), {number})
    ]


def tests_of(module: Path, clone: Path) -> str:
    """The folder of tests that mirrors the module's, or the nearest one above it."""
    place = Path("tests", *module.parent.parts[1:])
    while not (clone / place).is_dir():
        place = place.parent
    return str(place)


class Runs:
    """Runs of tests in a clone of HEAD, of which one module is changed at a time."""

    def __init__(self, clone: Path, ring: str) -> None:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        (clone / ".cache").symlink_to(ROOT / ".cache")  # Kafka's jars, without which tests of its own readers fail
        self._clone = clone
        self._command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--ring", ring]
        self._environment = {**os.environ, "PYTHONPATH": str(clone)}
        self._usual_s: dict[str, float] = {}  # of each folder without a mutant

    def notice(self, module: Path, mutant: Mutant) -> bool:
        folder, path = tests_of(module, self._clone), self._clone / module
        if folder not in self._usual_s:
            start = time.monotonic()
            done = self._run(folder, None)
            if done not in (0, NO_TESTS):
                raise click.ClickException(f"{folder} fails without a mutant: ./dev test {folder}")
            self._usual_s[folder] = time.monotonic() - start
        whole = path.read_text()
        path.write_text(mutant.source)
        try:
            return self._run(folder, HANGS * self._usual_s[folder]) not in (0, NO_TESTS)
        except subprocess.TimeoutExpired:
            return True
        finally:
            path.write_text(whole)

    def _run(self, folder: str, limit_s: float | None) -> int:
        """Raises subprocess.TimeoutExpired."""
        command = [*self._command, folder]
        return subprocess.run(
            command, cwd=self._clone, env=self._environment, capture_output=True, timeout=limit_s
        ).returncode


def judged(chosen: list[tuple[Path, Mutant]], ring: str) -> Iterator[tuple[Path, Mutant, bool]]:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder, "kproxy"), ring)
        for module, mutant in chosen:
            yield module, mutant, runs.notice(module, mutant)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--count", type=click.IntRange(1), default=40, show_default=True, help="Mutants to try.")
@click.option("--seed", type=int, default=1, show_default=True, help="Chooses the mutants.")
@click.option("--module", metavar="PATH", help="A file or folder of the package, in place of the six folders.")
@click.option("--ring-2", is_flag=True, help="Run the ring 2 tests of the folder against the survivors of ring 1.")
def main(count: int, seed: int, module: str | None, ring_2: bool) -> None:
    """Change one operator, bound or constant at a time, and list what no test notices."""
    start, survivors, chosen = time.monotonic(), [], sample(count, seed, module)
    for number, (place, mutant, noticed) in enumerate(judged(chosen, "1"), 1):
        what = f"{place}:{mutant.line}: {mutant.before:.80} -> {mutant.after:.80}"
        print(f"{number:4} of {len(chosen)} {'noticed ' if noticed else 'SURVIVES'} {what}", flush=True)
        if not noticed:
            survivors.append((place, mutant))
    if ring_2 and survivors:
        left = [(place, mutant) for place, mutant, noticed in judged(survivors, "2") if not noticed]
        print(f"ring 2 notices {len(survivors) - len(left)} of {len(survivors)} that survive ring 1")
    share = 1 - len(survivors) / len(chosen)
    print(f"ring 1 notices {share:.0%} of {len(chosen)} mutants, in {time.monotonic() - start:.0f} s")
    sys.exit(0 if share >= 0.9 else 1)


main()
