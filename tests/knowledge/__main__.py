"""./dev knowledge: what kproxy says of groups, leaders and the registry, beside what real clusters log at the time."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.knowledge import judge, old, playbooks, recorded, registry, rig
from tests.knowledge.judge import Difference
from tests.knowledge.truth import Run


def played(name: str, folder: Path) -> Iterable[Difference]:
    """Play one, and compare."""
    if name in old.VERSIONS:
        with old.running(name, folder) as run:
            old.playbook(run)
        return [*registry.differences(registry.OldRun(folder))]
    with rig.running(folder) as cluster:
        playbooks.PLAYBOOKS[name](cluster)
    return judge.differences(Run(folder))


def by_pytest(*tests: str) -> int:
    """Tests that are too long for every day; how many failed, or 1."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", *tests]
    return subprocess.run(command, env={**os.environ, "KNOWLEDGE_LONG": "1"}, check=False).returncode


# The same traffic by all routes; a flood that reaches the caps as they are.
LONG = {
    "routes": ("tests/broker/test_tables.py",),
    "flood": ("tests/proxy/process/knowledge/test_feed_link.py", "-k", "invents"),
}


def main() -> int:
    every = (*playbooks.PLAYBOOKS, *old.VERSIONS, *LONG)
    parser = argparse.ArgumentParser(prog="./dev knowledge", description=__doc__)
    parser.add_argument("playbooks", nargs="*", help=f"default: all of {', '.join(every)}")
    parser.add_argument("--folder", type=Path, help="keep captures and logs here")
    parser.add_argument("--keep", action="store_true", help="also put them into tests/data/knowledge")
    chosen = parser.parse_args()
    if unknown := set(chosen.playbooks) - set(every):
        parser.error(f"no playbook {', '.join(sorted(unknown))}: there are {', '.join(every)}")
    with tempfile.TemporaryDirectory() as temporary:
        faults = 0
        for name in chosen.playbooks or every:
            folder = (chosen.folder or Path(temporary)) / name
            start = time.monotonic()
            if name in LONG:
                failed = by_pytest(*LONG[name])
                print(f"{name}: {failed} faults, {time.monotonic() - start:.0f} s", flush=True)
                faults += failed
                continue
            found = played(name, folder)
            explained = judge.EXPLAINED | judge.SOMETIMES | registry.EXPLAINED
            wrong = [each for each in found if each.kind not in explained]
            counts = Counter(each.kind for each in found if each.kind in explained)
            print(f"{name}: {len(wrong)} faults, {time.monotonic() - start:.0f} s", flush=True)
            for kind, count in counts.most_common():
                print(f"  {count} x {kind}. {explained[kind]}")
            for each in wrong:
                print(f"  FAULT {each}")
            faults += len(wrong)
            if chosen.keep:
                recorded.keep(folder, name)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
