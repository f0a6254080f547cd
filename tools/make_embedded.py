#!/usr/bin/env python3
"""Makes kproxy/protocol/layouts/embedded.json and its vectors again from the official jars of Connect and Streams.

    tools/make_embedded.py            write them, then look at the diff
    tools/make_embedded.py --check    say whether they are what the jars make; nothing is written

Needs a JDK 17, Maven and Python 3.11. Jars and classes go to .cache/embedded.
"""

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path

import jars
import layouts
import make_layouts

RELEASE = "4.1.0"  # versions of these protocols were only ever added
EACH = 3  # elements of each collection that was written
CONNECT = ("ConnectWorkerState", "ConnectAssignment")

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
CACHE = ROOT / ".cache" / "embedded" / RELEASE
LAYOUTS = ROOT / "kproxy" / "protocol" / "layouts" / "embedded.json"
VECTORS = ROOT / "tests" / "data" / "embedded.jsonl.gz"

Call = tuple[str, str, str]  # type, value, place in the code: see DumpEmbedded.java

# What a noted value is, by how DumpEmbedded chooses it. The wire has no names.
NAMES = (
    ("topic-", "topic"),
    ("active-", "host"),
    ("standby-", "host"),
    ("100", "topicGroupId"),
    ("200", "partition"),
    ("300", "partition"),
    ("400", "topicGroupId"),
    ("500", "partition"),
    ("600", "port"),
    ("700", "port"),
    ("80", "commonlySupportedVersion"),
    ("9001", "errorCode"),
    ("9002", "nextRebalanceMs"),
    ("abc", "namedTopology"),
)
# And an array by the first value in it.
ARRAYS = (
    ("100", "activeTasks"),
    ("400", "standbyTasks"),
    ("active-", "partitionsByHost"),
    ("standby-", "standbyPartitionsByHost"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit status 1 if anything differs")
    check = parser.parse_args().check
    classes = CACHE / "classes"
    libs = jars.libraries(TOOLS / "embedded" / "pom.xml", f"kafka.version={RELEASE}", CACHE)
    sources = make_layouts.adapted(TOOLS / "java", CACHE / "source/kproxy/tools", make_layouts.MOVED)
    ours = sorted((TOOLS / "embedded").glob("*.java"))
    jars.run("javac", "-nowarn", "-cp", libs / "*", "-sourcepath", sources.parents[1], "-d", classes, *ours)
    dump, vectors = CACHE / "dump.json", CACHE / "vectors.jsonl"
    jars.run("java", "-cp", f"{classes}:{libs}/*", "kproxy.tools.DumpEmbedded", dump, vectors)
    made = layouts.as_text(made_of(json.loads(dump.read_text()))).encode()
    zipped = subprocess.run(["gzip", "-9n"], input=vectors.read_bytes(), stdout=subprocess.PIPE, check=True).stdout
    different = False
    for path, content in ((LAYOUTS, made), (VECTORS, zipped)):
        same = path.exists() and plain(path, path.read_bytes()) == plain(path, content)
        if not same and not check:
            path.write_bytes(content)
        different |= not same
        state = "is what the jars make" if same else "differs" if check else "written"
        print(f"{path.relative_to(ROOT)}: {state}")
    sys.exit(bool(check and different))


def plain(path: Path, content: bytes) -> bytes:
    return gzip.decompress(content) if path.suffix == ".gz" else content


def made_of(dump: layouts.Json) -> layouts.Json:
    """The file to ship."""
    data = []
    for name, versions in dump.items():
        if name == "StreamsAssignmentInfo":
            versions = {version: noted(int(version), list(map(tuple, calls))) for version, calls in versions.items()}
        elif name not in CONNECT:
            for struct in versions.values():  # the version is a field of the message itself
                first = struct["fields"].pop(0)
                layouts.need((first["name"], first["type"]) == ("version", "int32"), f"{name} begins with {first}")
        layout = layouts.joined({int(version): struct for version, struct in versions.items()}, name)
        data.append({"name": name, "section": "embedded", "versionBytes": 2 if name in CONNECT else 4} | layout)
    jars = [f"org.apache.kafka:{jar}:{RELEASE}" for jar in ("connect-runtime", "kafka-streams")]
    meta = {"what": "what members of Connect and Streams send each other, version-range form", "derivedFrom": jars}
    return {"meta": meta, "apis": [], "data": data}


# ---------------------------------------------------------------------------------------- what code wrote, as a layout


def noted(version: int, calls: list[Call]) -> layouts.Json:
    """The layout of one version, from the calls that wrote it."""
    layouts.need(calls[0][:2] == ("int32", str(version)), f"version {version} does not come first")
    return {"flexible": False, "fields": fields_of(calls[1:])}


def fields_of(calls: list[Call]) -> list[layouts.Json]:
    """Calls one after another as fields; a count, and behind it as many turns of one loop, are an array."""
    fields: list[layouts.Json] = []
    at = 0
    while at < len(calls):
        kind, value, _ = calls[at]
        if kind == "int32" and at + 1 < len(calls) and calls[at + 1][0] == "chars":
            layouts.need(int(value) == len(calls[at + 1][1]), f"{calls[at + 1][1]} with another length")
            fields.append({"name": named(calls[at + 1]), "type": "[]uint16", "nullable": False})
            at += 2
            continue
        turns = turns_of(calls, at + 1) if (kind, value) == ("int32", str(EACH)) else None
        if turns is None:
            fields.append({"name": named(calls[at]), "type": kind, "nullable": False})
            at += 1
            continue
        element = fields_of(turns[0])
        name = array_named(turns)
        for_one = len(element) == 1 and "fields" not in element[0]
        kind = element[0]["type"] if for_one else name[0].upper() + name[1:]
        fields.append({"name": name, "type": f"[]{kind}", "nullable": False})
        if not for_one:
            fields[-1] |= {"flexible": False, "fields": element}
        at += 1 + sum(map(len, turns))
    return fields


def turns_of(calls: list[Call], start: int) -> list[list[Call]] | None:
    """The turns of the loop that begins there, each from the same place to the next; None: none does."""
    place = calls[start][2] if start < len(calls) else None
    begins = [at for at in range(start, len(calls)) if calls[at][2] == place]
    if len(begins) != EACH:
        return None
    size = begins[1] - begins[0]
    turns = [calls[at : at + size] for at in begins]
    places = [[place for _, _, place in turn] for turn in turns]
    layouts.need(places[0] == places[1] == places[2], f"turns that differ, from {place}")
    return turns


def named(call: Call) -> str:
    return next((name for beginning, name in NAMES if call[1].startswith(beginning)), "index")


def array_named(turns: list[list[Call]]) -> str:
    value = turns[0][0][1]
    found = next((name for beginning, name in ARRAYS if value.startswith(beginning)), None)
    if found is not None:
        return found
    return "topics" if len(turns[0]) == 2 and turns[0][1][0] == "string" else "partitions"


if __name__ == "__main__":
    main()
