"""Official jars by Maven, and what Java makes of them: what the tools that make layouts share.

Duty: have the jars of a pom in a folder, whole or not at all; run a command and stop where it fails. Refuses to know
what is in a jar.
"""

import shutil
import subprocess
import sys
from pathlib import Path


def libraries(pom: Path, version: str, folder: Path) -> Path:
    """The folder of the jars that `pom` names, with what they need; `version` as "property=value"."""
    libs, unfinished = folder / "libs", folder / "libs.new"
    if not libs.is_dir():
        shutil.rmtree(unfinished, ignore_errors=True)
        print(f"fetching jars, {version}", flush=True)
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={unfinished}"]
        run("mvn", "-q", "-B", "-f", pom, f"-D{version}", *goal)
        unfinished.rename(libs)
    return libs


def run(*command: object) -> None:
    if subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL).returncode:
        sys.exit(f"{command[0]} failed; its reasons are above")
