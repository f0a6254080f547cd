"""The Helm chart: linted, rendered for every example, valid Kubernetes, and its kproxy.toml is what kproxy loads."""

import math
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kproxy import __version__
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.load import load
from kproxy.proxy.sockets import descriptors

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/kproxy"
EXAMPLES = sorted((DEPLOY / "helm/examples").glob("*.yaml"))
OWN = Path(__file__).parents[2] / ".cache/bin/helm"  # as ./dev test builds it
HELM = str(OWN) if OWN.exists() else shutil.which("helm")
KUBERNETES = "1.31"


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    """Without helm the chart would go untested, and nobody would notice."""
    if HELM is None:
        assert shutil.which("go", path=f"{os.environ['PATH']}:/usr/local/go/bin") is None, (
            "run ./dev test: it builds helm"
        )
        pytest.skip("needs helm: install Go and run ./dev test, which builds it, or put helm on the path")


def helm(*arguments: str | Path, check: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere"}
    done = subprocess.run(
        [str(HELM), *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def rendered(*arguments: str | Path, check: bool = True) -> dict[str, list[dict]]:
    """Render the chart with these values; return the documents by kind (release kp, namespace gw)."""
    template = ("template", "kp", CHART, "--namespace", "gw", "--kube-version", KUBERNETES)
    documents = [one for one in yaml.safe_load_all(helm(*template, *arguments).stdout) if one]
    kinds: dict[str, list[dict]] = {}
    for one in documents:
        kinds.setdefault(one["kind"], []).append(one)
    return kinds


def config_of(kinds, tmp_path):
    (configmap,) = kinds["ConfigMap"]
    file = tmp_path / "kproxy.toml"
    file.write_text(configmap["data"]["kproxy.toml"])
    return load(file)


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request):
    return request.param


def test_helm_lint_reports_nothing(example):
    helm("lint", "--strict", CHART, "-f", example)


def test_the_rendered_manifests_are_valid(example):
    kinds = rendered("-f", example)
    assert {"ConfigMap", "Deployment", "Service"} <= set(kinds)
    assert ("PodDisruptionBudget" in kinds) == (kinds["Deployment"][0]["spec"]["replicas"] > 1)
    for kind, documents in kinds.items():
        for document in documents:
            if kind != "PodMonitor":  # no part of Kubernetes
                kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_ports_probes_and_time_to_drain_fit_the_configuration(example, tmp_path):
    kinds = rendered("-f", example)
    config = config_of(kinds, tmp_path)
    (cluster,) = config.clusters
    (deployment,) = kinds["Deployment"]
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    routes = Routes(cluster, cluster.listen.port)

    assert config.admin == ("0.0.0.0", ports["admin"])  # the kubelet and Prometheus do not come by loopback
    assert ports["bootstrap"] == cluster.listen.port
    declared = {f"broker-{node_id}": routes.port_of(node_id).bind for node_id in routes.declared()}
    if cluster.any_brokers is not None:
        declared |= {f"any-{number}": port for number, port in enumerate(cluster.any_brokers.ports)}
    assert {name: port for name, port in ports.items() if name.startswith(("broker-", "any-"))} == declared
    assert bool(declared) == (cluster.route == "ports")
    for probe, path in (("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready")):
        assert container[probe]["httpGet"] == {"path": path, "port": "admin", "scheme": "HTTP"}
    drain_s = math.ceil(config.drain_delay_s) + math.ceil(config.drain_timeout_s)
    assert drain_s < pod["spec"]["terminationGracePeriodSeconds"] <= drain_s + 15
    assert config.drain_delay_s > 0
    assert descriptors.shares(1 << 20, config.max_connections).connections == config.max_connections
    assert container["image"] == f"kproxy:{__version__}"
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert f"USER {pod['spec']['securityContext']['runAsUser']}:" in (DEPLOY / "Containerfile").read_text()
    assert not pod["spec"]["automountServiceAccountToken"]


def test_advertised_addresses_are_services_that_route_to_kproxy(example, tmp_path):
    kinds = rendered("-f", example)
    (cluster,) = config_of(kinds, tmp_path).clusters
    (deployment,) = kinds["Deployment"]
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    targets = {port["name"]: port["containerPort"] for port in container["ports"]}
    reached = {}  # (service, its port) -> kproxy's port
    for service in kinds["Service"]:
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        for port in service["spec"]["ports"]:
            reached[service["metadata"]["name"], port["port"]] = targets[port["targetPort"]]
            assert port["targetPort"] != "admin"
    assert reached["kp-kproxy", cluster.listen.port] == cluster.listen.port
    routes = Routes(cluster, cluster.listen.port)
    if cluster.any_brokers is not None:
        routes.assigned = {1840211337 + port: port for port in cluster.any_brokers.ports}
    for node_id in (*routes.declared(), *routes.assigned):
        told = routes.advertised(node_id, "kafka")
        service = f"kp-kproxy-{node_id}" if example.stem == "services" else "kp-kproxy"
        assert reached[service, told.port] == routes.port_of(node_id).bind
        if service == "kp-kproxy":
            assert told.host == "kp-kproxy.gw.svc"


def test_ports_that_are_given_out_are_kept_on_a_volume_by_one_pod(tmp_path):
    kinds = rendered("-f", DEPLOY / "helm/examples/any.yaml")
    entry = config_of(kinds, tmp_path).clusters[0].any_brokers
    (deployment,) = kinds["Deployment"]
    assert deployment["spec"]["replicas"] == 1 and deployment["spec"]["strategy"] == {"type": "Recreate"}
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (volume,) = (each for each in container["volumeMounts"] if not each["readOnly"])
    assert str(entry.ports_file.parent) == volume["mountPath"] and len(entry.ports) == 40


def test_each_broker_has_a_service_of_its_own_inside_the_cluster_too():
    kinds = rendered(
        "--set", "cluster.bootstrap={b:9092},expose.by=services,expose.brokers.first=7,expose.brokers.count=2"
    )
    assert [one["metadata"]["name"] for one in kinds["Service"]] == ["kp-kproxy", "kp-kproxy-7", "kp-kproxy-8"]
    assert 'advertise = "kp-kproxy-{id}.gw.svc:9092"' in kinds["ConfigMap"][0]["data"]["kproxy.toml"]


def test_network_policy_and_monitor(tmp_path):
    kinds = rendered("-f", DEPLOY / "helm/examples/ports.yaml")
    config = config_of(kinds, tmp_path)
    (policy,) = kinds["NetworkPolicy"]
    clients, metrics = policy["spec"]["ingress"]
    (cluster,) = config.clusters
    routes = Routes(cluster, cluster.listen.port)
    (ports,) = clients["ports"]
    needed = {cluster.listen.port, *(routes.port_of(node_id).bind for node_id in routes.declared())}
    assert needed == set(range(ports["port"], ports["endPort"] + 1))
    assert metrics["ports"] == [{"protocol": "TCP", "port": config.admin.port}]
    _, brokers = policy["spec"]["egress"]
    assert {port["port"] for port in brokers["ports"]} == {address.port for address in cluster.bootstrap}
    (monitor,) = kinds["PodMonitor"]
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "admin", "path": "/metrics", "interval": "15s"}]
    labels = kinds["Deployment"][0]["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_tables_of_the_configuration_keep_their_shape(tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text(
        yaml.safe_dump(
            {
                "cluster": {
                    "bootstrap": ["kafka:9092"],
                    "limits": {"idle_timeout_s": 600},
                    "login": {"mechanism": "PLAIN", "username": 'quo"te', "password_env": "PASSWORD"},
                },
                "settings": {"log_format": "json", "max_connections": 100},
            }
        )
    )
    config = config_of(rendered("-f", values), tmp_path)
    (cluster,) = config.clusters
    assert config.log_format == "json"
    assert config.max_connections == 100
    assert cluster.login.username == 'quo"te'
    assert cluster.bootstrap == (Address("kafka", 9092),)


def test_an_admin_port_with_tls_is_probed_by_tls_and_what_is_written_has_a_volume(tmp_path):
    values = tmp_path / "values.yaml"
    tls = {"certificate": "/etc/kproxy/tls/tls.crt", "key": "/etc/kproxy/tls/tls.key"}
    endpoint = {"tlsConfig": {"insecureSkipVerify": True}}
    values.write_text(
        yaml.safe_dump(
            {
                "cluster": {"bootstrap": ["kafka:9092"]},
                "settings": {"admin_tls": tls, "record": "/tables/kproxy", "audit": "/audit/lines"},
                "mounts": [
                    {"name": "tls", "secret": "kproxy-tls", "mountPath": "/etc/kproxy/tls"},
                    {"name": "tables", "claim": "tables", "mountPath": "/tables"},
                    {"name": "audit", "emptyDir": {"sizeLimit": "1Gi"}, "mountPath": "/audit"},
                    {"name": "scratch", "emptyDir": {}, "mountPath": "/scratch"},
                ],
                "podMonitor": {"enabled": True, "endpoint": endpoint},
            }
        )
    )
    kinds = rendered("-f", values)
    assert config_of(kinds, tmp_path).admin_tls is not None
    (deployment,) = kinds["Deployment"]
    kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert [probe["scheme"] for probe in probes] == ["HTTPS"] * 3
    ((monitored,),) = [one["spec"]["podMetricsEndpoints"] for one in kinds["PodMonitor"]]
    assert monitored["scheme"] == "https" and endpoint.items() <= monitored.items()
    written = {one["name"] for one in container["volumeMounts"] if not one["readOnly"]}
    assert written == {"tables", "audit", "scratch"}
    volumes = {one.pop("name"): one for one in pod["volumes"]}
    assert volumes["tables"] == {"persistentVolumeClaim": {"claimName": "tables"}}
    assert volumes["audit"] == {"emptyDir": {"sizeLimit": "1Gi"}} and volumes["scratch"] == {"emptyDir": {}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("replicas=2", "cluster.bootstrap"),
        ("cluster.bootstrap={b}", "cluster.bootstrap.0"),
        ("cluster.bootstrap={b:9092},expose.by=port", "expose.by"),
        ("cluster.bootstrap={b:9092},exposed.by=ports", "exposed"),
        ("cluster.bootstrap={b:9092},cluster.listen=:9092", "cluster.listen"),
        ("cluster.bootstrap={b:9092},admin.port=80", "admin.port"),
        ("cluster.bootstrap={b:9092},admin.port=9095", "admin.port: 9095 is among the ports of clients, 9092 to 9095"),
        ("cluster.bootstrap={b:9092},expose.port=65535", "the last broker would have port 65538"),
        ("cluster.bootstrap={b:9092},expose.brokers.first=1000000000", "expose.brokers.first"),
        ("cluster.bootstrap={b:9092},expose.brokers.first=some", "expose.brokers.first"),
        ("cluster.bootstrap={b:9092},expose.brokers.first=any", "set replicas to 1"),
        ("cluster.bootstrap={b:9092},expose.brokers.first=any,replicas=1,expose.by=services", "set expose.by to ports"),
        ("cluster.bootstrap={b:9092},mounts[0].name=config,mounts[0].secret=s,mounts[0].mountPath=/s", "mounts.0.name"),
    ],
)
def test_values_that_cannot_be_are_refused(wrong, said):
    done = helm("template", "kp", CHART, "--kube-version", KUBERNETES, "--set", wrong, check=False)
    assert done.returncode != 0
    assert said in done.stderr


def test_the_commands_of_the_page():
    page = (DEPLOY.parent / "docs/kubernetes.md").read_text()
    commands = re.findall(r"^helm install (.*)$", page, re.MULTILINE)
    assert len(commands) > 1
    for command in commands:
        name, chart, *rest = shlex.split(command)
        assert helm(
            "template", name, DEPLOY.parent / chart, "--kube-version", KUBERNETES, *rest, cwd=DEPLOY.parent
        ).stdout
    for name in re.findall(r"deploy/[\w./-]+\w", page):
        assert (DEPLOY.parent / name).exists(), name
