"""Settings of `[[zookeeper]]`: valid values, and conflicts with other settings."""

from pathlib import Path

import pytest

from kproxy.errors import ConfigError
from kproxy.proxy.config.load import load

CLUSTER = '[[cluster]]\nlisten = "127.0.0.1:9092"\nbootstrap = ["kafka:9092"]\n'
PAGE = Path(__file__).parents[3] / "docs" / "zookeeper.md"


def loaded(tmp_path, text, process=""):
    file = tmp_path / "kproxy.toml"
    file.write_text(process + CLUSTER + text)
    return load(str(file), {})


def listener(listen="127.0.0.1:2181", servers='["zk:2181"]', name="old"):
    return f'[[zookeeper]]\nname = "{name}"\nlisten = "{listen}"\nservers = {servers}\n'


def test_the_example_of_the_page_loads(tmp_path):
    file = tmp_path / "kproxy.toml"
    file.write_text(PAGE.read_text().split("```toml\n")[1].split("```")[0])
    (found,) = load(str(file), {}).zookeeper
    assert (found.name, str(found.listen), len(found.servers)) == ("old", "0.0.0.0:2181", 3)


def test_a_file_may_have_several_listeners_or_none(tmp_path):
    assert loaded(tmp_path, "").zookeeper == ()
    both = loaded(tmp_path, listener() + listener("127.0.0.1:2182", '"a:1, b:2"', "new")).zookeeper
    assert [len(each.servers) for each in both] == [1, 2]


@pytest.mark.parametrize(
    "text,process,words",
    [
        (listener(servers="[]"), "", "servers"),
        (listener(servers='["0.0.0.0:2181"]'), "", "names no host"),
        (listener("127.0.0.1:9092"), "", "is taken by 127.0.0.1:9092"),
        (listener("0.0.0.0:9092"), "", "is taken by"),
        (listener() + listener("127.0.0.1:2182"), "", "name of another"),
        (listener() + listener(name="new"), "", "is taken by"),
        (listener(servers='["127.0.0.1:2181"]'), "", "is this listener itself"),
        (listener().replace("servers", "server"), "", "servers"),
    ],
)
def test_a_wrong_setting_is_reported_with_its_place(tmp_path, text, process, words):
    with pytest.raises(ConfigError, match="zookeeper") as caught:
        loaded(tmp_path, text, process)
    assert words in str(caught.value)


def test_a_zookeeper_listener_needs_a_cluster(tmp_path):
    file = tmp_path / "kproxy.toml"
    file.write_text(listener())
    with pytest.raises(ConfigError) as found:
        load(str(file), {})
    (fault,) = found.value.faults
    assert fault == (f"{file}: cluster", "is missing: [[zookeeper]] is served beside one [[cluster]] at least")
    assert load(str(file), {}, {"listen": "127.0.0.1:9092", "bootstrap": "kafka:9092"}).clusters


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError) as found:
        load(str(tmp_path / "none.toml"), {})
    assert [*found.value.faults] == [(str(tmp_path / "none.toml"), "cannot be read: No such file or directory")]
