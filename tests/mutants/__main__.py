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
from contextlib import contextmanager
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


def sample(count: int, seed: int, only: str | None, clone: Path) -> list[tuple[Path, Mutant]]:
    """Mutants of the modules of the clone, chosen at random, the same for a seed.

    Raises click.UsageError where there are none.
    """
    places = [clone / only] if only else [clone / folder for folder in FOLDERS]
    for place in places:
        is_module = place.is_dir() or (place.is_file() and place.suffix == ".py")
        if not (is_module and place.resolve().is_relative_to((clone / "kproxy").resolve())):
            raise click.UsageError(f"HEAD has no module or folder {only} in kproxy/; one is kproxy/wire/frames.py")
    modules = sorted(path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place]))
    every = [(module, each) for module in modules for each in range(mutants_of(module.read_text()))]
    if not every:
        raise click.UsageError(f"{only} has no operator, bound or constant to change")
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    return [
        (module.relative_to(clone), mutant)
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
    """Runs of tests in a clone, of which one module is changed at a time."""

    def __init__(self, clone: Path, ring: str) -> None:
        self._clone, self._ring = clone, ring
        self._command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--ring", ring]
        self._environment = {**os.environ, "PYTHONPATH": str(clone)}
        self._usual_s: dict[str, float] = {}  # of each folder without a mutant

    def notice(self, module: Path, mutant: Mutant) -> bool:
        folder, path = tests_of(module, self._clone), self._clone / module
        if folder not in self._usual_s:
            start = time.monotonic()
            print(f"ring {self._ring} of {folder}, without a mutant", end="", flush=True, file=sys.stderr)
            done = self._run(folder, None)
            if done not in (0, NO_TESTS):
                raise click.ClickException(f"{folder} fails without a mutant: ./dev test {folder}")
            took_s = self._usual_s[folder] = time.monotonic() - start
            result = "has no tests: each mutant survives" if done == NO_TESTS else f"takes {took_s:.0f} s"
            print(f": {result}", file=sys.stderr)
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


@contextmanager
def clone_of_head() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "kproxy")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        (clone / ".cache").symlink_to(ROOT / ".cache")  # Kafka's jars, without which tests of its own readers fail
        yield clone


def judged(chosen: list[tuple[Path, Mutant]], ring: str, clone: Path) -> Iterator[tuple[Path, Mutant, bool]]:
    runs = Runs(clone, ring)
    for module, mutant in chosen:
        yield module, mutant, runs.notice(module, mutant)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--count", type=click.IntRange(1), default=40, show_default=True, help="Mutants to try.")
@click.option("--seed", type=int, default=1, show_default=True, help="Chooses the mutants.")
@click.option("--module", metavar="PATH", help="A file or folder of the package, in place of the six folders.")
@click.option("--ring-2", is_flag=True, help="Run the ring 2 tests of the folder against the survivors of ring 1.")
def main(count: int, seed: int, module: str | None, ring_2: bool) -> None:
    """Change one operator, bound or constant at a time, in a clone of HEAD, and list what no test notices.

    The tests of the module's folder run once without a mutant and then once for each, so all of it takes minutes to
    hours. The exit status is 0 if ring 1 notices at least 90 % of the mutants.
    """
    start, survivors = time.monotonic(), []
    with clone_of_head() as clone:
        chosen = sample(count, seed, module, clone)
        if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True).stdout:
            print("changes that are not committed are left out", file=sys.stderr)
        for number, (place, mutant, noticed) in enumerate(judged(chosen, "1", clone), 1):
            what = f"{place}:{mutant.line}: {mutant.before:.80} -> {mutant.after:.80}"
            print(f"{number:4} of {len(chosen)} {'noticed ' if noticed else 'SURVIVES'} {what}", flush=True)
            if not noticed:
                survivors.append((place, mutant))
        if ring_2 and survivors:
            left = [(place, mutant) for place, mutant, noticed in judged(survivors, "2", clone) if not noticed]
            print(f"ring 2 notices {len(survivors) - len(left)} of {len(survivors)} that survive ring 1")
    share = 1 - len(survivors) / len(chosen)
    print(f"ring 1 notices {share:.0%} of {len(chosen)} mutants, in {time.monotonic() - start:.0f} s")
    sys.exit(0 if share >= 0.9 else 1)


if __name__ == "__main__":
    main(prog_name="./dev mutants")
