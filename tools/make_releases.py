#!/usr/bin/env python3
"""Makes kproxy/protocol/layouts/releases.json again: which API versions each release of Kafka serves.

    tools/make_releases.py            write it
    tools/make_releases.py --check    say whether it is what the jars make; nothing is written

Needs a JDK 17, Maven and Python 3.11; four minutes the first time. Jars go to .cache/releases. For a new release of
Kafka: put it at the end of RELEASES, or in place of the older patch of its line, and run.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import layouts

# Oldest first, the last patch of each line.
RELEASES = (
    *("0.8.0", "0.8.1.1", "0.8.2.2", "0.9.0.1", "0.10.0.1", "0.10.1.1", "0.10.2.2", "0.11.0.3"),
    *("1.0.2", "1.1.1"),
    *("2.0.1", "2.1.1", "2.2.2", "2.3.1", "2.4.1", "2.5.1", "2.6.3", "2.7.2", "2.8.2"),
    *("3.0.2", "3.1.2", "3.2.3", "3.3.2", "3.4.1", "3.5.2", "3.6.2", "3.7.2", "3.8.1", "3.9.2"),
    *("4.0.2", "4.1.2", "4.2.2", "4.3.1", "4.4.0"),
)
CLIENTS = "org.apache.kafka:kafka-clients"
SCALA_CORE = "org.apache.kafka:kafka_2.10"  # of 0.8, whose brokers read requests with classes of their own
SUPPORT = (  # what their classes need to load
    *("org.slf4j:slf4j-nop:1.7.36", "org.slf4j:slf4j-api:1.7.36", "log4j:log4j:1.2.17"),
    "org.scala-lang:scala-library:2.10.7",
)

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
CACHE = ROOT / ".cache" / "releases"
MADE = ROOT / "kproxy/protocol/layouts/releases.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit status 1 if it differs")
    check = parser.parse_args().check
    for command, package in (("mvn", "maven"), ("javac", "openjdk-17-jdk-headless")):
        if shutil.which(command) is None:
            sys.exit(f"make_releases: {command} is missing: apt-get install {package}")
    support = [fetched(artifact) for artifact in SUPPORT]
    classes = CACHE / "classes"
    run("javac", "-d", classes, TOOLS / "java/kproxy/tools/Served.java")
    releases = {}
    for release in RELEASES:
        class_path = ":".join(map(str, (classes, fetched(artifact_of(release)), *support)))
        lines = run("java", "-cp", class_path, "kproxy.tools.Served").splitlines()
        releases[release] = layouts.served(lines)
        print(f"Kafka {release}: {len(lines)} APIs", flush=True)
    text = layouts.as_text(layouts.releases_file(releases, [artifact_of(release) for release in RELEASES]))
    same = MADE.exists() and MADE.read_text(encoding="utf-8") == text
    if not same and not check:
        MADE.write_text(text, encoding="utf-8")
    print(f"{'what the jars make' if same else 'differs' if check else 'written'}: {MADE.relative_to(ROOT)}")
    sys.exit(check and not same)


def artifact_of(release: str) -> str:
    return f"{SCALA_CORE if release.startswith('0.8.') else CLIENTS}:{release}"


def fetched(artifact: str) -> Path:
    """The jar of an artifact, whole or not at all."""
    jar = CACHE / "-".join(artifact.split(":")[1:])
    jar = jar.with_name(jar.name + ".jar")
    if not jar.exists():
        unfinished = CACHE / "new"
        shutil.rmtree(unfinished, ignore_errors=True)
        print(f"fetching {artifact}", flush=True)
        goal = ["dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={unfinished}"]
        run("mvn", "-q", "-B", "-f", TOOLS / "pom.xml", *goal)
        (unfinished / jar.name).rename(jar)
    return jar


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.stdout.write(done.stdout)
        sys.exit(f"make_releases: {command[0]} failed; its reasons are above")
    return done.stdout


if __name__ == "__main__":
    main()
