#!/usr/bin/env python3
"""Makes kproxy/zookeeper/layouts.json again from the official jars.

    tools/make_zookeeper.py            write it, then look at the diff
    tools/make_zookeeper.py --check    say whether it is what the jars make; nothing is written

Needs a JDK 17, Maven and Python 3.11. Jars and classes go to .cache/zookeeper.
"""

import argparse
import json
import sys
from pathlib import Path

import jars

RELEASE = "3.9.4"  # records only ever gained company: the newest reads what the oldest wrote

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
CACHE = ROOT / ".cache" / "zookeeper" / RELEASE
LAYOUTS = ROOT / "kproxy" / "zookeeper" / "layouts.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit status 1 if anything differs")
    check = parser.parse_args().check
    classes = CACHE / "classes"
    libs = jars.libraries(TOOLS / "zookeeper" / "pom.xml", f"zookeeper.version={RELEASE}", CACHE)
    jars.run("javac", "-cp", libs / "*", "-d", classes, TOOLS / "zookeeper" / "DumpJute.java")
    dump = CACHE / "dump.json"
    jute = libs / f"zookeeper-jute-{RELEASE}.jar"
    jars.run("java", "-cp", f"{classes}:{libs}/*", "kproxy.tools.DumpJute", jute, dump)
    text = as_text({"release": RELEASE, **json.loads(dump.read_text())})
    different = not LAYOUTS.exists() or LAYOUTS.read_text() != text
    if different and not check:
        LAYOUTS.write_text(text)
    state = ("differs" if check else "written") if different else "is what the jars make"
    print(f"{LAYOUTS.relative_to(ROOT)}: {state}")
    sys.exit(bool(check and different))


def as_text(layouts: dict[str, object]) -> str:
    """JSON with a line for each record and each number, so that a diff reads well."""
    parts = []
    for name, value in layouts.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
            parts.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
        else:
            parts.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
