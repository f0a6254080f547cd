"""The official Java client reads the refusals of every API and version."""

import random
import subprocess
from collections import Counter

from kproxy.protocol import codec
from kproxy.proxy.filters.policy.refusals import refusal
from tests.broker.jvm import java
from tests.proxy.filters.policy.policies import random_body
from tests.proxy.filters.policy.test_refusals import REQUESTS, denied_in


def test_the_java_client_reads_every_refusal_and_finds_its_errors(tmp_path):
    rng = random.Random(5)
    asked = []
    for layout in REQUESTS * 3:
        body = random_body(layout, rng)
        request = codec.decode_request(layout.encode(body))[1]
        denied = denied_in(layout, body, rng)
        made = codec.at_once(refusal(layout.api_key, layout.version, 7, request, denied, "refused by a rule"))
        if made is not None:
            asked.append((layout, made[0][4:], set(made[1])))
    file = tmp_path / "responses"
    file.write_text("".join(f"{layout.api_key} {layout.version} {frame.hex()}\n" for layout, frame, _ in asked))
    program = __file__.replace("test_refusals.py", "Responses.java")
    done = subprocess.run(java(program, str(file)), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines_of_client = done.stdout.splitlines()
    assert len(lines_of_client) == len(asked)
    tally: Counter[str] = Counter()
    uncounted = set()
    for (layout, frame, errors), line in zip(asked, lines_of_client, strict=True):
        if "Duplicate key" in line:  # the request names a resource twice, which this client never does
            tally["twice"] += 1
            continue
        assert not line.startswith("failed"), f"{layout} {frame.hex()}: {line}"
        tally[line.split()[0] if line == "skipped" else "read"] += 1
        if line != "skipped":
            counts = {int(pair.split("=")[0]) for pair in line.strip("{}").split(", ") if pair}
            if not counts & errors:
                uncounted.add(layout.message.name)
    assert tally["read"] > 400 and tally["twice"] < 20, (
        tally
    )  # the others belong to versions that this client no longer supports
    # Its error counts omit the top level, which its own admin client checks first.
    assert uncounted <= {"DescribeUserScramCredentialsRequest", "MetadataRequest"}
