"""Settings of `[cluster.telemetry]`."""

import asyncio
import sys
from pathlib import Path

import pytest

from kproxy.errors import ConfigError, install_command
from kproxy.proxy.config.load import load
from kproxy.proxy.config.telemetry import Telemetry
from kproxy.proxy.process.server import Server

FILE = '[[cluster]]\nlisten = "127.0.0.1:0"\nbroker_port_base = 20000\nbootstrap = "kafka-1:9092"\n'


def loaded(folder: Path, *lines: str, above: str = "") -> Telemetry | None:
    file = folder / "kproxy.toml"
    file.write_text(FILE + above + "\n".join(("[cluster.telemetry]", *lines)))
    return load(file).clusters[0].telemetry


def test_an_empty_table_subscribes_to_all_metrics_each_minute(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    assert found == Telemetry() and found.metrics == ("*",) and found.push_interval_s == 60
    assert load(flags={"listen": "127.0.0.1:9092", "bootstrap": "kafka-1:9092"}).clusters[0].telemetry is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('metrics = ["*", "org.apache.kafka.producer."]', "'*' stands for all metrics"),
        ("metrics = []", "metrics"),
        ('metrics = ["org.apache.kafka.producer.*"]', "matches no metric: it is a beginning of names"),
        ("push_interval_s = 0.01", "push_interval_s"),
        ("max_push_bytes = 1000000000", "max_push_bytes"),
        ('answer = "never"', "answer"),
    ],
)
def test_a_wrong_setting_is_reported_with_its_place(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, line)
    assert "telemetry" in str(refused.value) and said in str(refused.value)


def test_a_transparent_listener_cannot_receive_pushes(tmp_path: Path) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text(FILE.replace("broker_port_base = 20000", 'route = "transparent"') + "[cluster.telemetry]\n")
    with pytest.raises(ConfigError, match="telemetry: route transparent changes no answer"):
        load(file)


def test_a_missing_extra_is_reported_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text(f'[otlp]\nendpoint = "http://localhost:4318"\n{FILE}[cluster.telemetry]\n')
    for module in [name for name in sys.modules if name.startswith(("opentelemetry", "kproxy.proxy.process.otlp."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    faults = dict(asyncio.run(Server(load(file)).preflight()))
    assert install_command("otlp") in faults["otlp"]
    assert install_command("telemetry") in faults["default: telemetry"]
    file.write_text(file.read_text().replace(":4318", ":4317"))
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert install_command("otlp-grpc") in dict(asyncio.run(Server(load(file)).preflight()))["otlp"]
