#!/usr/bin/env python3
"""Makes kproxy/protocol/layouts and the vectors of tests/data again from the official jars.

    tools/make_layouts.py            write them, then look at the diff: it is the changelog of the protocol
    tools/make_layouts.py --check    say whether they are what the jars make; nothing is written

Needs a JDK 17, Maven and Python 3.11; about a minute. Jars and classes go to .cache/layouts. For a new release of
Kafka: put it at the end of RELEASES, run, read the diff, run the tests.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

import jars
import layouts

# Oldest first. The last one tells every version that it has, the first what was dropped since; those between are there
# for the ranges that each release serves.
RELEASES = ("3.9.1", "4.1.0", "4.4.0")
SEED, FRAMES_OF_A_KIND = 1, 3

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
CACHE = ROOT / ".cache" / "layouts"

# Where classes lived before 4.4; the sources here are written for the newest release.
MOVED = {"common.record.internal.": "common.record.", "common.utils.internals.": "common.utils."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit status 1 if anything differs")
    check = parser.parse_args().check
    for command, package in (("mvn", "maven"), ("javac", "openjdk-17-jdk-headless"), ("gzip", "gzip")):
        if shutil.which(command) is None:
            sys.exit(f"make_layouts: {command} is missing: apt-get install {package}")
    for release in RELEASES:
        jars.libraries(TOOLS / "pom.xml", f"kafka.version={release}", home(release))
        compile_for(release)
    dumps = {release: dump(release) for release in RELEASES}
    made = layouts.made_of(dumps)
    compared = layouts.prove(made, dumps)
    print(f"{len(made['schema.json']['apis'])} APIs; {compared} versions of messages expand to what the jars say")
    files = {ROOT / "kproxy/protocol/layouts" / name: layouts.as_text(made[name]).encode() for name in made}
    data = ROOT / "tests/data"
    files |= {data / "vectors-dev.jsonl.gz": vectors(), data / "records-dev.jsonl.gz": records()}
    different = [path for path, content in files.items() if not same(path, content)]
    for path in different:
        print(f"{'differs' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[path])
    if not different:
        print("all files are what the jars make")
    sys.exit(bool(check and different))


def same(path: Path, content: bytes) -> bool:
    if not path.exists():
        return False
    if path.suffix == ".gz":  # one text has many compressed forms
        return gzip.decompress(path.read_bytes()) == gzip.decompress(content)
    return path.read_bytes() == content


def home(release: str) -> Path:
    return CACHE / release


def compile_for(release: str) -> None:
    source, classes = home(release) / "source", home(release) / "classes"
    shutil.rmtree(classes, ignore_errors=True)
    classes.mkdir(parents=True)
    adapted(TOOLS / "java", source, [package for package in MOVED if not package_exists(release, package)])
    jars.run(
        "javac", "-nowarn", "-Xlint:none", "-cp", home(release) / "libs" / "*", "-d", classes, *source.glob("*.java")
    )


def adapted(sources: Path, target: Path, packages: Iterable[str]) -> Path:
    """The sources in one folder, `target`, with these of MOVED where they were before."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(sources.rglob("*.java")):
        text = path.read_text()
        for package in packages:
            text = text.replace(package, MOVED[package])
        (target / path.name).write_text(text)
    return target


def package_exists(release: str, package: str) -> bool:
    with ZipFile(home(release) / "libs" / f"kafka-clients-{release}.jar") as jar:
        return any(name.startswith(f"org/apache/kafka/{package.replace('.', '/')}") for name in jar.namelist())


def dump(release: str) -> layouts.Json:
    out = home(release) / "dump.json"
    java(release, "Dump", home(release) / "libs", out)
    content: layouts.Json = json.loads(out.read_text(encoding="utf-8"))
    return content


def vectors() -> bytes:
    oldest, newest = RELEASES[0], RELEASES[-1]
    old, new = home(oldest) / "vectors.jsonl", home(newest) / "vectors.jsonl"
    java(oldest, "WriteVectors", oldest, SEED, FRAMES_OF_A_KIND, old, home(newest) / "dump.json")
    java(newest, "WriteVectors", newest, SEED, FRAMES_OF_A_KIND, new)
    lines: list[bytes] = (old.read_bytes() + new.read_bytes()).splitlines(keepends=True)
    lines.sort(key=place)
    return compressed(b"".join(lines))


def place(line: bytes) -> tuple[bool, int, str, str, int]:
    """By API, side and version, whoever wrote it; what is of no API comes last."""
    vector = json.loads(line)
    key = vector["api_key"]
    return key is None, key or 0, vector["dir"], vector["api"], vector["version"]


def records() -> bytes:
    out = home(RELEASES[-1]) / "records.jsonl"
    java(RELEASES[-1], "WriteRecords", SEED, out)
    return compressed(out.read_bytes())


def compressed(text: bytes) -> bytes:
    return subprocess.run(["gzip", "-9n"], input=text, stdout=subprocess.PIPE, check=True).stdout


def java(release: str, main_class: str, *arguments: object) -> None:
    class_path = f"{home(release) / 'classes'}:{home(release) / 'libs'}/*"
    jars.run("java", "-cp", class_path, f"kproxy.tools.{main_class}", *arguments)


if __name__ == "__main__":
    main()
