"""Settings of `[otlp]`, also as a URL alone."""

from pathlib import Path

import pytest

from kproxy.errors import ConfigError
from kproxy.proxy.config.load import load
from kproxy.proxy.config.otlp import Otlp

CLUSTER = {"listen": "127.0.0.1:9092", "bootstrap": "kafka-1:9092"}


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://collector:4318", "http://collector:4318/v1/metrics"),
        ("https://collector/", "https://collector/v1/metrics"),
        ("https://[::1]:4318/otlp/metrics", "https://[::1]:4318/otlp/metrics"),
        ("http://collector:4317", "http://collector:4317"),
        ("https://collector:4317/", "https://collector:4317"),
        ("http://collector:4317/v1/metrics", "http://collector:4317/v1/metrics"),
    ],
)
def test_a_url_replaces_the_table(url: str, endpoint: str) -> None:
    for settings in (load(flags={**CLUSTER, "otlp": url}), load(environment={"KPROXY_OTLP": url}, flags=CLUSTER)):
        assert settings.otlp == Otlp(endpoint=endpoint) and settings.otlp.interval_s == 60


@pytest.mark.parametrize(
    "url",
    ["collector:4318", "ftp://collector", "http://", "http://collector:99999", "http://collector:0", "http://a b", "7"],
)
def test_an_invalid_url_is_reported(url: str) -> None:
    with pytest.raises(ConfigError, match="write it like http://collector:4318"):
        load(flags={**CLUSTER, "otlp": url})


@pytest.mark.parametrize(
    "url", ["https://me:hunter2@collector", "https://collector/?key=hunter2", "https://c/#hunter2"]
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text(f'[[cluster]]\nlisten = ":9092"\nbootstrap = "kafka-1:9092"\n[otlp]\nendpoint = "{url}"\n')
    with pytest.raises(ConfigError, match="headers_file") as refused:
        load(file)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "protocol", "is_grpc"),
    [
        ("http://collector:4317", None, True),
        ("http://collector:4318", None, False),
        ("http://collector:4317/v1/metrics", None, False),  # a path implies HTTP
        ("https://collector", "grpc", True),
        ("http://collector:4317", "http/protobuf", False),
    ],
)
def test_the_port_selects_the_protocol_unless_it_is_set(url: str, protocol: str | None, is_grpc: bool) -> None:
    assert Otlp.model_validate({"endpoint": url, "protocol": protocol}).is_grpc == is_grpc


def test_grpc_has_no_path(tmp_path: Path) -> None:
    file = tmp_path / "kproxy.toml"
    table = '[otlp]\nprotocol = "grpc"\nendpoint = "http://collector:4317/v1/metrics"\n'
    file.write_text(f'[[cluster]]\nlisten = ":9092"\nbootstrap = "kafka-1:9092"\n{table}')
    with pytest.raises(ConfigError, match="gRPC has no path"):
        load(file)
