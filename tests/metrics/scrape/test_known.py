"""The label values that are listed are those that the code really uses."""

import ast
from pathlib import Path

import kproxy.proxy
import kproxy.wire
from kproxy.metrics.processes.shared import WORKER_LOST
from kproxy.metrics.scrape import known
from kproxy.protocol.schema import address_path, schema
from kproxy.wire.frames import sniff


def literals(package, functions, arguments):
    """The words that calls of these functions have among their first arguments: `f(x, "a" if y else "b")` has two."""
    for path in Path(package.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "func", None)
            if isinstance(node, ast.Call) and getattr(name, "attr", getattr(name, "id", "")).strip("_") in functions:
                for inner in (inner for argument in node.args[:arguments] for inner in ast.walk(argument)):
                    if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value.isidentifier():
                        yield inner.value


def test_every_fault_kind_of_the_wire_is_listed():
    used = set(literals(kproxy.wire, {"fault", "fatal"}, 3))
    used |= {sniff(head)[0] for head in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"PROXY TC", b"GET / HT", b"\xff" * 8)}
    assert len(used) > 8
    assert used == {kind for _, kind in known.FAULTS}


def test_every_cause_of_an_end_is_listed():
    plain = set(literals(kproxy.proxy, {"close", "closed", "never_relayed", "RefusedClient", "drain"}, 1))
    of_sides = {f"{side}_{how}" for side in ("client", "broker") for how in ("closed", "reset", "stalled")}
    plain.add("drained")  # the default of Relay.drain
    assert plain | of_sides | {WORKER_LOST} >= set(known.DISCONNECT_CAUSES)
    assert {cause for cause in plain if not cause.startswith("_")} <= set(known.DISCONNECT_CAUSES)


def test_apis_have_the_names_that_kafka_uses():
    apis = schema().apis.values()
    names = {api.name for api in apis}
    assert names >= known.EVERYDAY_APIS | set(known.HIDING_APIS)
    carriers = {
        api.name for key, api in schema().apis.items() if any(address_path(key, v) for v in api.request.versions)
    }
    assert set(known.ADDRESS_APIS) == carriers
