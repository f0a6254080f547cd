"""Settings of kproxy's logins at brokers: the file contains no secret, and no error repeats one."""

from pathlib import Path

import pytest

from kproxy.errors import ConfigError
from kproxy.proxy.config.load import load

HEAD = '[[cluster]]\nlisten = "127.0.0.1:19092"\nbootstrap = "kafka-1:9092"\n'
PLAIN = 'mechanism = "PLAIN"\nusername = "a"\npassword_env = "OF_A"\n'


def faults(tmp_path: Path, text: str) -> str:
    file = tmp_path / "kproxy.toml"
    file.write_text(HEAD + text)
    with pytest.raises(ConfigError) as fault:
        load(file)
    return str(fault.value)


def test_valid_logins_load(tmp_path: Path) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text(
        f"{HEAD}[cluster.login]\n{PLAIN}"
        '[[cluster.login.by_principal]]\nprincipal = "User:a"\nmechanism = "OAUTHBEARER"\ntoken_command = ["token"]\n'
        '[cluster.authentication]\nmechanisms = ["SCRAM-SHA-512"]\nusers_file = "users"\n'
    )
    (cluster,) = load(file).clusters
    assert cluster.login is not None and cluster.authentication is not None
    assert cluster.login.password_env == "OF_A"
    assert cluster.login.by_principal[0].token_command == ("token",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('mechanism = "PLAIN"\nusername = "a"\npassword = "hunter2"\n', "password_file or password_env"),
        ('mechanism = "OAUTHBEARER"\ntoken = "hunter2"\n', "token_file or token_command"),
        ('mechanism = "hunter2"\n', "'PLAIN'"),
        ('mechanism = "PLAIN"\npasword_file = "x"\n', "did you mean password_file?"),
        ('mechanism = "PLAIN"\npassword_env = "X"\n', "username: is missing"),
        ('mechanism = "PLAIN"\nusername = "a"\n', "one of password_file and password_env"),
        (PLAIN + 'password_file = "x"\n', "one of password_file and password_env"),
        (PLAIN + 'token_file = "x"\n', "no tokens"),
        (PLAIN.replace("OF_A", "KPROXY_A"), "take another name"),
        ('mechanism = "OAUTHBEARER"\n', "one of token_file and token_command"),
        ('mechanism = "OAUTHBEARER"\ntoken_file = "x"\nusername = "a"\n', "no username"),
        (
            PLAIN + '[[cluster.login.by_principal]]\nprincipal = "User:a"\nusername = "b"\n',
            "by_principal[0]: PLAIN needs",
        ),
        (PLAIN + f'[[cluster.login.by_principal]]\nprincipal = "User:a"\n{PLAIN}', "nothing says who a client is"),
        (PLAIN + '[[cluster.login.by_principal]]\nprincipal = "User:a"\npassword = "hunter2"\n', "by_principal[0]"),
    ],
)
def test_a_wrong_setting_is_reported_with_its_correction_but_no_secret(
    tmp_path: Path, settings: str, said: str
) -> None:
    message = faults(tmp_path, f"[cluster.login]\n{settings}")
    assert said in message and "login" in message
    assert "hunter2" not in message or "mechanism" in said


def test_a_secret_in_place_of_a_table_is_not_repeated(tmp_path: Path) -> None:
    message = faults(tmp_path, 'login = "alice:hunter2"\n')
    assert "login" in message and "hunter2" not in message
