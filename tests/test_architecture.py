"""The shape of the project, held: which way imports point, linters and types, docstrings, and where tests are."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.each import each

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kproxy"
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}

# Imports point from a later line to an earlier one, never within a line. The rooms of the proxy, and `admin`, which is
# one of them though it stands beside, have their own order.
LAYERS = (
    {"addresses", "errors", "interrupts", "wording"},
    {"core", "protocol", "zookeeper"},
    {"wire"},
    {"insight", "metrics", "tables", "capture"},
    {"flight"},
    {"admin", "convert", "proxy"},
    {"analysis", "checks", "spark", "watch"},
    {"views"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
LAYER = {unit: depth for depth, units in enumerate(LAYERS) for unit in units}
ROOMS = (
    *("proxy.config", "proxy.log_limiter", "proxy.log_lines", "proxy.tasks"),
    *("proxy.sockets", "proxy.tls", "proxy.sasl", "proxy.relay", "proxy.filters", "proxy.upstream", "proxy.cluster"),
    *("proxy.admission", "proxy.connection", "admin", "proxy.process"),
)

MOST_MODULES = 13
CROWDED = {  # folders with more modules, each with the one duty that they share
    "kproxy.analysis.findings": "a family of findings each",
    "kproxy.cli": "a command each",
    "kproxy.proxy.config": "a section of the settings each",
    "kproxy.proxy.filters.policy": "a step of one decision each",
    "kproxy.views": "a screen or a part of screens each",
}

MOST_LINES = 600
LONG = {  # modules with more, each with the reason why it is one
    "kproxy.analysis.findings.kinds": "the words of all kinds of findings: a list",
    "kproxy.capture.connections.flows": "all ways of a packet to its connection share state; each takes several",
    "kproxy.capture.dissection.packets": "one chain of headers: each layer is a few lines, and may hold any other",
    "kproxy.capture.connections.reassembly": "one half of TCP's receiver, as RFC 9293 describes it in one section",
    "kproxy.insight.membership.classic": "one state machine: the classic group protocol",
    "kproxy.protocol.codec": "encoding and decoding are one another's mirror, field type by field type",
}

# What bytes-to-events code must never touch, so that it stays pure: clocks, sockets, loggers, threads, Arrow, metrics.
IMPURE = {"aiohttp", "asyncio", "logging", "os", "prometheus_client", "pyarrow", "random", "rich", "select", "socket"}
IMPURE |= {"ssl", "subprocess", "sys", "threading", "time", "uvloop"}
PURE_UNITS = {"insight", "protocol", "wire", "zookeeper"}

# Tests of no single module: of the whole, with real brokers, of the bench and the tools.
BEYOND_MODULES = {
    "tests/bench",
    "tests/broker",
    "tests/deploy",
    "tests/docs",
    "tests/capture/columns/test_shares.py",
    "tests/capture/columns/test_story.py",
    "tests/capture/test_broker_logs.py",
    "tests/capture/test_fuzz.py",
    "tests/capture/test_shapes.py",
    "tests/capture/test_snapshots.py",
    "tests/capture/test_tshark.py",
    "tests/chaos",
    "tests/incident",
    "tests/knowledge",
    "tests/matrix",
    "tests/metrics/test_docs.py",
    "tests/mutants",
    "tests/proxy/filters/policy/test_caches.py",
    "tests/proxy/filters/policy/test_passing.py",
    "tests/proxy/filters/policy/test_slices.py",
    "tests/proxy/sasl/test_limits.py",
    "tests/proxy/test_docs.py",
    "tests/spark/test_cluster.py",
    "tests/tables/test_docs.py",
    "tests/test_api.py",
    "tests/test_architecture.py",
    "tests/test_dev.py",
    "tests/test_each.py",
    "tests/test_environment.py",
    "tests/test_packaging.py",
    "tests/test_rings.py",
    "tests/test_traps.py",
    "tests/test_waiting.py",
    "tests/tools",
}


def unit_of(module):
    """The room of the package that a module belongs to."""
    name = module.split(".")[1]
    return "kproxy" if name == "__init__" else name


@cache
def imported_names(path):
    """All modules that a file imports, wherever in its code, under TYPE_CHECKING too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide direction"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names | {f"{name}.__init__" for name in names if f"{name}.__init__" in MODULES}


def imports_of(module):
    return {name for name in imported_names(MODULES[module]) if not name.startswith("kproxy") or name in MODULES}


def test_long_modules_have_a_reason():
    long = {name for name, path in MODULES.items() if len(path.read_text().splitlines()) > MOST_LINES}
    assert {name for name in long if ".layouts." not in name} <= set(LONG)


def test_crowded_folders_have_one_duty():
    folders = Counter(name.rpartition(".")[0] for name in MODULES if not name.endswith("__init__"))
    crowded = {folder for folder, count in folders.items() if count > MOST_MODULES and ".layouts" not in folder}
    assert crowded == set(CROWDED)


def test_every_room_has_its_layer_and_every_layer_its_rooms():
    assert {unit_of(module) for module in MODULES} - {"kproxy"} == set(LAYER)


@each("module", MODULES)
def test_imports_point_one_way(module):
    unit = unit_of(module)
    for imported in imports_of(module):
        if not imported.startswith("kproxy.") or unit_of(imported) in (unit, "kproxy"):
            continue
        other = unit_of(imported)
        if module == "kproxy.__init__":
            continue  # the public names, imported for type checkers only: see test_api.py
        assert unit != "kproxy", f"{module} is imported by all and imports {imported}"
        rooms = {unit, other} == {"admin", "proxy"}  # in their own order, below
        assert LAYER[other] < LAYER[unit] or rooms, f"{module} imports {imported}"


def test_no_modules_import_each_other_in_a_circle():
    """Nor by an import inside a function, which only hides it. The public names of `kproxy` are looked up at use."""
    left = {module: imports_of(module) & MODULES.keys() for module in MODULES if module != "kproxy.__init__"}
    while leaves := {module for module, names in left.items() if not names & left.keys()}:
        left = {module: names for module, names in left.items() if module not in leaves}
    assert not left


def room_of(module):
    """The room of the proxy that a module belongs to, None of all others and of `proxy` itself."""
    unit, _, rest = module.removeprefix("kproxy.").partition(".")
    name = unit if unit == "admin" else f"{unit}.{rest.partition('.')[0]}"
    return name if unit in ("admin", "proxy") and module != "kproxy.proxy.__init__" else None


@each("module", [module for module in MODULES if room_of(module)])
def test_the_rooms_of_the_proxy_know_only_those_before_them(module):
    beyond = {
        name
        for name in imports_of(module)
        if room_of(name) and ROOMS.index(room_of(name)) > ROOMS.index(room_of(module))
    }
    assert not beyond


@each("module", [module for module in MODULES if unit_of(module) in PURE_UNITS])
def test_the_core_is_pure(module):
    impure = {imported for imported in imports_of(module) if imported.split(".")[0] in IMPURE}
    assert not impure


def test_the_command_line_starts_light():
    """What `kproxy --version` imports: click and nothing of its weight."""
    code = "import sys; from kproxy.cli import cli; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    heavy = {
        "aiohttp",
        "lz4",
        "numpy",
        "prometheus_client",
        "pyarrow",
        "pydantic",
        "pyspark",
        "rich",
        "snappy",
        "uvloop",
    }
    assert not loaded & heavy
    code = "import sys; import kproxy.cli; print(*[name for name in sys.modules if name.startswith('kproxy')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) == {"kproxy", "kproxy.cli", "kproxy.errors"}
    code = "import sys; from kproxy.cli import cli; cli(['--help'], standalone_mode=False); "
    code += "print('LOADED', *[name for name in sys.modules if name.startswith('kproxy')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.partition("LOADED")[2].split()
    light = {"kproxy", "kproxy.cli", "kproxy.errors", "kproxy.interrupts"}
    assert {name for name in loaded if not name.startswith("kproxy.cli.")} == light


def test_a_proxy_of_one_plain_cluster_imports_no_more_than_it_needs():
    """What it does not use is memory of every proxy: aiohttp 11 MB, urllib.request 1, what follows groups 1."""
    code = "import sys, kproxy.cli.run, kproxy.proxy.process.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "kproxy.proxy.relay.relay" in loaded
    unneeded = {"aiohttp", "prometheus_client", "numpy", "pyarrow", "jwt", "urllib.request", "http.client"}
    unneeded |= {"kproxy.insight", "kproxy.flight.dump", "kproxy.proxy.process.knowledge.feed_link", "kproxy.zookeeper"}
    assert not loaded & unneeded


@each("module", MODULES)
def test_a_module_opens_with_its_duty(module):
    assert len(ast.get_docstring(ast.parse(MODULES[module].read_text())) or "") > 20


def test_tests_mirror_the_package():
    """A test file is called after the module, or the package, that it is about; one of a module's bounds says so."""
    strangers = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        place = path.relative_to(ROOT / "tests")
        if {f"tests/{place}", f"tests/{place.parts[0]}"} & BEYOND_MODULES:
            continue
        module = PACKAGE / place.with_name(place.name.removeprefix("test_").replace("_bounds.py", ".py"))
        if not module.exists() and not module.with_suffix("").is_dir() and module.stem != place.parent.name:
            strangers.append(str(place))
    assert not strangers


def test_no_module_without_a_test():
    """A test imports it, or one that a test imports and that stands beside it does."""
    met = {name for path in (ROOT / "tests").rglob("*.py") for name in imported_names(path)} & set(MODULES)
    while True:
        places = {MODULES[module].parent for module in met}
        further = {name for module in met for name in imports_of(module) if name in MODULES} - met
        further = {name for name in further if MODULES[name].parent in places}
        if not further:
            break
        met |= further
    assert not set(MODULES) - met - {name for name in MODULES if name.endswith("__init__")}


def test_no_cancellation_is_forgotten():
    """asyncio.wait_for before Python 3.12 returns a result that comes with a cancellation: nobody ends then."""
    for path in PACKAGE.rglob("*.py"):
        assert ".wait_for(" not in path.read_text(), f"{path}: use asyncio.timeout"


def test_ruff_has_nothing_to_say():
    for command in (("check",), ("format", "--check")):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)  # longer than others: without its cache mypy takes a minute of CPU
def test_types_are_strict():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (checked,) = re.findall(r"in (\d+) source files", done.stdout)
    assert int(checked) >= len(MODULES)  # no folder is left out
