"""`kproxy doctor` and `kproxy compat` before a real broker: no findings on a healthy cluster, and each fault is
named."""

from pathlib import Path

import pytest

from kproxy.checks.compat import compatibility
from kproxy.checks.doctor import examine
from kproxy.checks.findings import Report
from kproxy.proxy.config.load import load
from kproxy.views.compat import lines
from tests.broker.cluster import Cluster
from tests.broker.secured import SecuredBroker
from tests.broker.security import MECHANISMS
from tests.broker.test_login import login
from tests.certificates import Authority
from tests.ports import free_ports


def examined(folder: Path, bootstrap: str, tables: str = "") -> Report:
    file = folder / "kproxy.toml"
    listen = f"127.0.0.1:{free_ports(12)}"
    file.write_text(f'max_connections = 1000\n[[cluster]]\nlisten = "{listen}"\nbootstrap = "{bootstrap}"\n{tables}')
    return examine(str(file), {}, {})


def errors(report: Report) -> list[tuple[str, str]]:
    return [(one.check, f"{one.found} {one.fix}") for one in report.findings if one.level == "error"]


def test_a_healthy_cluster_has_no_errors(cluster: Cluster, tmp_path: Path) -> None:
    report = examined(tmp_path, cluster.bootstrap)
    assert report.findings == []
    assert "kproxy reads all that 3 broker(s) serve" in [one.text for one in report.passed]
    config = load(flags={"listen": "127.0.0.1:0", "bootstrap": cluster.bootstrap})
    (found,) = compatibility(config)
    shown = list(lines(found))
    assert shown[0] == "Nothing is lost: clients get every API and version that the brokers serve."
    assert "3 broker(s), which serve what Kafka 4.1 serves" in shown[1]
    assert all(len(line) <= 80 for line in shown)
    treatments = {one.name: one.treatment for one in found.apis}
    assert treatments["ShareFetch"] == treatments["Metadata"] == "rewritten"
    assert treatments["JoinGroup"] == "passed"


def test_a_missing_login_is_reported(secured: SecuredBroker, tmp_path: Path) -> None:
    ((check, text),) = errors(examined(tmp_path, secured.address_of("SASL")))
    assert check == "login"
    assert "only after a login" in text


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_login_is_checked(secured: SecuredBroker, tmp_path: Path, mechanism: str) -> None:
    tables = f"[cluster.login]\n{login(secured, mechanism, tmp_path)}"
    report = examined(tmp_path, secured.address_of("SASL"), tables)
    assert errors(report) == []
    assert f"logged in by {mechanism}" in [one.text for one in report.passed]
    (tmp_path / ("password" if (tmp_path / "password").exists() else "token")).write_text("guessed")
    ((check, text),) = errors(examined(tmp_path, secured.address_of("SASL"), tables))
    assert check == "login"
    assert "[cluster.login]" in text


def test_a_tls_port_without_tls_settings_is_reported(secured: SecuredBroker, tmp_path: Path) -> None:
    ((_, text),) = errors(examined(tmp_path, secured.address_of("SSL")))
    assert "TLS" in text


def test_tls_settings_are_checked(secured: SecuredBroker, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    ours = secured.security.authority.bundle
    report = examined(tmp_path, secured.address_of("SSL"), f'[cluster.upstream_tls]\nca = "{ours}"')
    assert errors(report) == []
    assert [one.text for one in report.passed if one.check == "tls" and "broker 7" in one.subject]
    for settings, expected in (
        (f'ca = "{other.bundle}"', "not signed by `ca`"),
        (f'ca = "{ours}"\nserver_name = "other.example"', "not for 'other.example'"),
    ):
        ((check, text),) = errors(examined(tmp_path, secured.address_of("SSL"), f"[cluster.upstream_tls]\n{settings}"))
        assert check == "tls"
        assert expected in text
    ((check, _),) = errors(examined(tmp_path, secured.address_of("CLIENT"), f'[cluster.upstream_tls]\nca = "{ours}"'))
    assert check == "tls"


def test_a_missing_client_certificate_is_reported(secured: SecuredBroker, tmp_path: Path) -> None:
    tables = f'[cluster.upstream_tls]\nca = "{secured.security.authority.bundle}"\n'
    assert "tls" in [check for check, _ in errors(examined(tmp_path, secured.address_of("MTLS"), tables))]
    mine = secured.security.client("kproxy").settings()
    tables += "".join(f'{name} = "{value}"\n' for name, value in mine.items())
    assert errors(examined(tmp_path, secured.address_of("MTLS"), tables)) == []
