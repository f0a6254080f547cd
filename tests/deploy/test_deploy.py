"""The files under deploy/ start a kproxy configured as their comments describe."""

import configparser
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kproxy import __version__
from kproxy.cli.run import run
from kproxy.cli.watch import settings_of, watch
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.load import load
from kproxy.proxy.config.settings import Config
from kproxy.proxy.sockets import descriptors
from kproxy.proxy.tls import contexts
from kproxy.proxy.tls.certificates import is_for, read_pem
from tests.ports import free_ports

TOP = Path(__file__).parents[2]
DEPLOY = TOP / "deploy"


def settings(arguments: list[str]) -> Config:
    """Return the configuration of `kproxy run` for these arguments."""
    command, *rest = arguments
    assert command == "run"
    flags = run.make_context("run", rest).params
    return load(flags.pop("file"), {}, flags)


def test_compose_publishes_the_ports_of_its_configuration():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    kproxy = services["kproxy"]
    config = settings(kproxy["command"])
    published = dict(port.split(":")[1:] for port in kproxy["ports"])
    assert all(outside == inside for outside, inside in published.items())
    (cluster,) = config.clusters
    node_id = services["kafka"]["environment"]["KAFKA_NODE_ID"]
    advertised = Routes(cluster, cluster.listen.port).advertised(node_id, "kafka")
    assert advertised == Address("localhost", 9094)
    assert config.admin is not None
    assert set(published) == {str(port) for port in (cluster.listen.port, advertised.port, config.admin.port)}
    own = services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].removeprefix("PLAINTEXT://")
    assert own == str(cluster.bootstrap[0])
    assert (DEPLOY / kproxy["build"]["context"] / kproxy["build"]["dockerfile"]).samefile(DEPLOY / "Containerfile")


def test_compose_with_tls(tmp_path):
    """The command in the comment creates a certificate for the host name that kproxy advertises."""
    plain = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["kproxy"]
    text = (DEPLOY / "compose-tls.yaml").read_text()
    kproxy = yaml.safe_load(text)["services"]["kproxy"]
    mounted = dict(reversed(volume.split(":")[:2]) for volume in kproxy["volumes"])
    command, option = kproxy["command"]
    file = option.removeprefix("--config=")
    config = load(DEPLOY / mounted[file])
    assert command == "run"
    assert settings(plain["command"]).model_dump(exclude={"clusters"}) == config.model_dump(exclude={"clusters"})
    (before,), (cluster,) = settings(plain["command"]).clusters, config.clusters
    assert cluster.model_copy(update={"tls": None}) == before
    assert cluster.tls is not None
    made = re.search(r"^#   (mkdir .*)$", text, re.MULTILINE)
    assert made is not None
    subprocess.run(made[1], shell=True, cwd=tmp_path, check=True, capture_output=True)
    inside = Path(mounted[str(cluster.tls.certificate.parent)]).name
    tls = cluster.tls.model_copy(
        update={name: tmp_path / "deploy" / inside / getattr(cluster.tls, name).name for name in ("certificate", "key")}
    )
    assert contexts.for_clients(tls, None, "tls").context is not None
    (certificate,) = read_pem(tls.certificate.read_bytes())
    assert is_for(certificate, Routes(cluster, 9092).advertised(1, "kafka").host)


def test_the_prometheus_configuration_is_valid_and_scrapes_the_admin_port(tmp_path):
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for volume in services["prometheus"]["volumes"]:
        here, there, _ = volume.split(":")
        target = tmp_path / Path(there).relative_to("/etc/prometheus")
        source = DEPLOY / here
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    done = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    admin = settings(services["kproxy"]["command"]).admin
    (job,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"kproxy:{admin.port}"]}] and job["honor_labels"]


def test_the_kubernetes_sidecar_has_matching_ports_image_and_probes():
    template = yaml.safe_load((DEPLOY / "kubernetes-sidecar.yaml").read_text())["spec"]["template"]
    (kproxy,) = template["spec"]["initContainers"]
    assert kproxy["image"] == f"kproxy:{__version__}"
    assert f" -t {kproxy['image']} ." in (DEPLOY / "Containerfile").read_text()
    assert kproxy["restartPolicy"] == "Always"
    config = settings(kproxy["args"])
    (cluster,) = config.clusters
    assert Routes(cluster, cluster.listen.port).advertised(2, "kafka-2.kafka") == Address("kafka-2.kafka", 19092)
    assert config.admin is not None
    ports = {port["name"]: port["containerPort"] for port in kproxy["ports"]}
    assert sorted(ports.values()) == sorted((cluster.listen.port, config.admin.port))
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(config.admin.port)
    for probe, path in (("livenessProbe", "/health"), ("readinessProbe", "/ready")):
        assert kproxy[probe]["httpGet"]["path"] == path
        assert ports[kproxy[probe]["httpGet"]["port"]] == config.admin.port


def test_the_systemd_unit_has_matching_limits_and_timeouts():
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / "kproxy.service")
    service = unit["Service"]
    _, *arguments = shlex.split(service["ExecStart"])
    place = arguments.index("/etc/kproxy/kproxy.toml")
    arguments[place] = str(DEPLOY / "kproxy.toml")
    text = (DEPLOY / "kproxy.service").read_text()
    for name in ("/etc/kproxy/kproxy.toml", "/etc/systemd/system/kproxy.service"):
        assert f"# {' ' * 2}install -D -m 644 deploy/{Path(name).name} {name}" in text
    config = settings(arguments)
    wanted = config.max_connections or descriptors.DEFAULT_CONNECTIONS
    assert descriptors.shares(int(service["LimitNOFILE"]), wanted).connections == wanted
    assert float(service["TimeoutStopSec"]) > config.drain_delay_s + config.drain_timeout_s
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "all")


def test_kproxy_watch_gets_one_capability_and_valid_options():
    """As a systemd service and as a Kubernetes DaemonSet."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / "kproxy-watch.service")
    service = unit["Service"]
    assert service["AmbientCapabilities"] == service["CapabilityBoundingSet"] == "CAP_NET_RAW"
    assert "AF_PACKET" in service["RestrictAddressFamilies"].split()
    (document,) = yaml.safe_load_all((DEPLOY / "kubernetes-watch.yaml").read_text())
    kubernetes_validate.validate(document, "1.31", strict=True)
    template = document["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["image"] == f"kproxy:{__version__}"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_RAW"]}
    for arguments in (shlex.split(service["ExecStart"])[1:], container["args"]):
        assert arguments[0] == watch.name
        options = watch.make_context("watch", list(arguments[1:])).params
        assert settings_of(**{name: each for name, each in options.items() if not name.startswith("log_")}).admin
    admin = settings_of(**{name: each for name, each in options.items() if not name.startswith("log_")}).admin
    assert admin is not None
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(admin.port)
    assert [port["containerPort"] for port in container["ports"]] == [admin.port]


def test_systemd_passes_the_sockets_of_the_configuration():
    """Uses `systemd-socket-activate` with the names of the unit."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / "kproxy.socket")
    (cluster,) = load(DEPLOY / "kproxy.toml").clusters
    assert unit["Socket"]["FileDescriptorName"] == cluster.name
    assert unit["Socket"]["ListenStream"] == str(cluster.listen)
    port = free_ports(2)
    kproxy = Path(sys.executable).with_name("kproxy")
    command = ["systemd-socket-activate", "-l", f"127.0.0.1:{port}", f"--fdname={cluster.name}", "-E", "PYTHONPATH"]
    settings = ["--listen", f"127.0.0.1:{port}", "--bootstrap", f"127.0.0.1:{free_ports(1)}"]
    with subprocess.Popen([*command, str(kproxy), "run", *settings], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            with socket_to(port):  # it starts kproxy
                for line in process.stderr:
                    if "listening cluster=default" in line:
                        break
                else:
                    raise AssertionError("kproxy did not take the socket")
        finally:
            process.terminate()


@contextmanager
def socket_to(port: int) -> Iterator[socket.socket]:
    deadline = time.monotonic() + 60
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.1)
    with sock:
        yield sock


@pytest.mark.ring2
def test_the_container_contains_every_file_of_kproxy(tmp_path):
    text = (DEPLOY / "Containerfile").read_text()
    source = tmp_path / "src"
    source.mkdir()
    for files, target in re.findall(r"^COPY (.+) /src/(\S*)$", text, re.MULTILINE):
        for name in files.split():
            if (TOP / name).is_dir():
                shutil.copytree(TOP / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(TOP / name, source / target)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("kproxy_kafka-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for path in (TOP / "kproxy").rglob("*.*"):
        assert path.suffix == ".pyc" or str(path.relative_to(TOP)) in names
    assert run.name in text.partition("CMD")[2]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd")
def test_systemd_accepts_the_units(tmp_path):
    """Verifies all units together, with existing programs, and checks how strictly the services are sandboxed."""
    units = [*DEPLOY.glob("*.service"), *DEPLOY.glob("*.socket")]
    for unit in units:
        text = re.sub(r"^(Exec\w+=\S*?)/opt/kproxy/bin/kproxy", r"\1/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / unit.name) for unit in units)],
        capture_output=True,
        text=True,
        check=False,
    )
    # Ignore messages about units of the system.
    assert not [line for line in done.stderr.splitlines() if "kproxy" in line], done.stderr
    for name in ("kproxy.service", "kproxy-watch.service"):
        done = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_kubernetes_patch_is_valid_next_to_a_broker():
    patch = yaml.safe_load((DEPLOY / "kubernetes-sidecar.yaml").read_text())
    patch["spec"]["template"]["metadata"]["labels"] = {"app": "kafka"}
    patch["spec"]["template"]["spec"]["containers"] = [{"name": "kafka", "image": "apache/kafka:4.1.0"}]
    whole = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "kafka"}, **patch}
    whole["spec"] |= {"serviceName": "kafka", "selector": {"matchLabels": {"app": "kafka"}}}
    kubernetes_validate.validate(whole, "1.31", strict=True)
