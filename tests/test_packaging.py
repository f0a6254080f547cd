"""What is published: an sdist from which the project is built and tested, and a wheel with its types."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path
from shutil import which

import pytest

import kproxy
from kproxy.errors import DISTRIBUTION
from tests.project import ROOT, files

CARGO = f"{Path.home()}/.cargo/bin:{os.environ['PATH']}"
NOT_COLLECTED = ("broker", "spark", "analysis", "bench")  # they look for Kafka's jars and a JVM when they are imported


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The unpacked sdist, built from a copy of the project: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("sdist")
    for path in files():
        target = folder / "source" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    build("sdist", folder / "source", folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as bundle:
        bundle.extractall(folder)  # ours; a filter is not known before 3.11.4
    return folder / archive.name.removesuffix(".tar.gz")


def build(what, source, out):
    code = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ring2
def test_the_sdist_is_the_project(sdist):
    made = {"PKG-INFO", "setup.cfg"}
    shipped = {path.relative_to(sdist) for path in sdist.rglob("*") if path.is_file()}
    shipped = {path for path in shipped if not path.parts[0].endswith(".egg-info") and path.name not in made}
    assert shipped == set(files())
    assert os.access(sdist / "dev", os.X_OK)


@pytest.mark.ring2
def test_the_wheel_from_the_sdist_is_the_package(sdist, tmp_path):
    build("wheel", sdist, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    bundle = zipfile.ZipFile(wheel)
    shipped = {name for name in bundle.namelist() if ".dist-info/" not in name}
    assert shipped == {str(path) for path in files() if path.parts[0] == "kproxy"}

    assert "kproxy/py.typed" in shipped
    assert any(name.endswith("licenses/NOTICE") for name in bundle.namelist())
    (metadata,) = (name for name in bundle.namelist() if name.endswith(".dist-info/METADATA"))
    said = message_from_string(bundle.read(metadata).decode())
    assert (said["Name"], said["Version"]) == (DISTRIBUTION, kproxy.__version__)
    assert said["Author"] and said["License-Expression"] == "Apache-2.0"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(said.get_all("Classifier"))
    assert said.get_all("Project-URL")
    assert {"offline", "spark", "all"} <= set(said.get_all("Provides-Extra"))


@pytest.mark.ring2
@pytest.mark.skipif(which("cargo", path=CARGO) is None, reason="there is no cargo: the compiled core is not built here")
@pytest.mark.timeout(570)
def test_wheels_of_the_compiled_core_run_with_an_old_glibc(sdist, tmp_path):
    source = shutil.copytree(sdist, tmp_path / "source")
    machine = platform.machine()
    command = [sys.executable, source / "tools/make_wheels.py", machine]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": CARGO})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "dist").glob(f"kproxy_core-*-abi3-manylinux2014_{machine}.*.whl")
    (library,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    needed = re.findall(rb"GLIBC_2\.(\d+)", zipfile.ZipFile(wheel).read(library))
    assert needed and max(map(int, needed)) <= 17
    assert len(list((source / "dist").glob("kproxy_kafka-*-py3-none-any.whl"))) == 1


@pytest.mark.ring2
def test_the_tests_of_the_sdist_can_be_collected(sdist):
    ignored = [f"--ignore=tests/{name}" for name in NOT_COLLECTED]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *ignored, "tests"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST"))}
    done = subprocess.run(command, cwd=sdist, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "test_packaging.py" in done.stdout


def test_what_an_index_shows_and_an_sdist_holds_is_named():
    """Without a build, which ring 2 makes: what of it would be missing."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = whole["project"]
    assert project["authors"] and project["urls"] and project["license"] == "Apache-2.0"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(project["classifiers"])
    assert "py.typed" in whole["tool"]["setuptools"]["package-data"]["kproxy"] and (ROOT / "kproxy/py.typed").is_file()
    of_itself = {"kproxy", "pyproject.toml", "MANIFEST.in", "README.md", *project["license-files"]}
    named = set((ROOT / "MANIFEST.in").read_text().split())
    assert {path.parts[0] for path in files()} <= named | of_itself


def test_no_hint_names_the_distribution_of_others():
    """`kproxy` on PyPI is another project: an extra of it would install a stranger's code."""
    hint = re.compile(rb"(?<![\w-])kproxy\[(?:all|dev|offline|spark)|pip3? install (?:-\S+ )*['\"]?kproxy(?![\w-])")
    assert not [path for path in files() if hint.search((ROOT / path).read_bytes())]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION != "kproxy"
    assert project["version"] == kproxy.__version__


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"dir_info": {"editable": True}}, "-e '{}[offline]'"),
        ({"dir_info": {}}, "'{}[offline]'"),
        ({"archive_info": {}}, "'{}/kproxy.whl[offline]'"),
        ({"archive_info": {}, "gone": True}, "'kproxy-kafka[offline]'"),
        (None, "'kproxy-kafka[offline]'"),
    ],
)
def test_an_extra_comes_from_where_kproxy_came_from(tmp_path, told, shown):
    """Of a checkout or a wheel pip is given the folder or the file: an index may not have it."""
    checkout, noted = tmp_path / "my checkout", tmp_path / "kproxy_kafka-9.9.dist-info"
    checkout.mkdir()
    noted.mkdir()
    (checkout / "pyproject.toml").touch()
    (noted / "METADATA").write_text("Metadata-Version: 2.1\nName: kproxy-kafka\nVersion: 9.9\n")
    if told is not None:
        wheel = checkout / "kproxy.whl"
        if "gone" not in told:
            wheel.touch()
        place = wheel if "archive_info" in told else checkout
        (noted / "direct_url.json").write_text(json.dumps({"url": place.as_uri(), **told}))
    code = f"import sys; sys.path[1:] = [{str(tmp_path)!r}, *(p for p in sys.path[1:] if 'site-packages' not in p)]\n"
    code += f"sys.path.append({str(ROOT)!r}); from kproxy.errors import install_command as c; print(c('offline'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60
    )
    assert done.stdout.strip().endswith(f"-m pip install {shown.format(checkout)}")
