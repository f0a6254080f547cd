"""`kproxy check`: all faults at once with their places, what would run, no port, no secret."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kproxy.checks.check import check, summary
from kproxy.proxy.sasl.users import change
from kproxy.views.check import runs
from tests.certificates import Authority
from tests.ports import free_ports

KPROXY = (sys.executable, "-c", "from kproxy.cli import main; main()")


def run(*arguments):
    return subprocess.run([*KPROXY, "check", *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture
def written(tmp_path):
    def write(text):
        file = tmp_path / "kproxy.toml"
        file.write_text(text)
        return file

    return write


def cluster(**settings):
    port = free_ports(3)
    lines = {"listen": f"127.0.0.1:{port}", "bootstrap": ["kafka.example:9092"]} | settings
    return "[[cluster]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items())


def test_every_fault_is_named_at_once(written, tmp_path):
    (tmp_path / "bad.pem").write_text("no certificate")
    file = written(
        f'audit = "{tmp_path}/no/audit"\n'
        + cluster(name="one")
        + f'[cluster.tls]\ncertificate = "{tmp_path}/bad.pem"\n'
        + '[cluster.login]\nmechanism = "PLAIN"\nusername = "u"\npassword_env = "NO_SUCH_VARIABLE"\n'
        + cluster(name="two")
        + f'[cluster.login]\nmechanism = "PLAIN"\nusername = "u"\npassword_file = "{tmp_path}/none"\n'
    )
    done = run(file)
    assert done.returncode == 1 and not done.stdout
    lines = done.stderr.splitlines()
    assert "two: login.password_file: " in done.stderr and "No such file or directory" in done.stderr
    assert "one: login.password_env: the variable NO_SUCH_VARIABLE is not set" in lines
    assert any(line.startswith("audit: ") for line in lines)
    answer = json.loads(run(file, "--json").stdout)
    assert answer["ok"] is False and answer["runs"] is None and len(answer["faults"]) == len(lines)


def test_the_filters_are_listed_with_what_they_take_part_in(written):
    rules = '[[cluster.policy]]\naction = "deny"\ntopic = "secret-*"\n'
    file = written(
        cluster(name="one", detail="topics")
        + rules
        + "[cluster.telemetry]\n"
        + cluster(name="two", route="transparent")
    )
    listed = json.loads(run(file, "--filters", "--json").stdout)
    one, two = listed["one"]["filters"], listed["two"]["filters"]
    names = ["policy", "versions", "telemetry", "addresses", "leak check", "metrics", "groups"]
    assert [each["name"] for each in one] == names
    assert [each["name"] for each in two] == ["metrics"]
    by_name = {each["name"]: each for each in one}
    assert "Produce" in by_name["policy"]["requests"] and "Metadata" in by_name["policy"]["answers"]
    assert "Produce 10-13" in by_name["addresses"]["answers"] and not by_name["addresses"]["requests"]
    assert by_name["telemetry"]["requests"] == ["ApiVersions", "GetTelemetrySubscriptions", "PushTelemetry"]
    assert "SaslHandshake" in listed["one"]["none"] and not {"Produce", "ApiVersions"} & {*listed["one"]["none"]}
    done = run(file, "--filters")
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 120
    assert "  1  policy      forwards, refuses or edits requests, and edits answers" in done.stdout
    assert "both     all APIs\n" in done.stdout and "No filter decides or changes: all APIs\n" in done.stdout


def test_faults_of_the_settings_and_of_tls_are_those_of_a_start(written, tmp_path):
    file = written(cluster(detial="topics", broker_port_base=70000))
    assert [place for place, _ in check(file, {}).faults] == [
        f"{file}: cluster[0].broker_port_base",
        f"{file}: cluster[0].detial",
    ]
    (tmp_path / "bad.pem").write_text("no certificate")
    found = check(written(cluster() + f'[cluster.tls]\ncertificate = "{tmp_path}/bad.pem"\n'), {})
    assert len(found.faults) == 1 and "bad.pem" in str(found.faults)
    assert run(tmp_path / "none.toml").returncode == 1
    assert run().returncode == 2


def test_the_summary_shows_the_settings_that_would_run_without_secrets(written, tmp_path):
    files = Authority(tmp_path).server()
    (tmp_path / "password").write_text("s3cr3t-of-a-file")
    file = written(
        cluster(name="main", read_only=True)
        + f'[cluster.tls]\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
        + f'[cluster.login]\nmechanism = "SCRAM-SHA-512"\nusername = "kproxy"\npassword_file = "{tmp_path}/password"\n'
    )
    done = run(file)
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("cluster main", "SCRAM-SHA-512 by kproxy", "read-only", "server.pem"):
        assert text in done.stdout
    answer = json.loads(run(file, "--json").stdout)
    assert answer["ok"] and answer["runs"]["clusters"][0]["login"] == "SCRAM-SHA-512"
    assert "s3cr3t" not in done.stdout + json.dumps(answer) and "PRIVATE KEY" not in done.stdout + json.dumps(answer)


def test_the_file_of_the_audit_decides_if_it_is_there_and_not_its_folder(written, tmp_path, monkeypatch):
    audit = tmp_path / "audit.jsonl"
    file = written(f'audit = "{audit}"\n' + cluster())
    writable: list[Path] = []
    monkeypatch.setattr("os.access", lambda path, _: Path(path) in writable)  # root may write to all of them
    assert dict(check(file, {}).faults)["audit"].endswith("is no folder that this user may write to")
    audit.touch()
    assert dict(check(file, {}).faults)["audit"] == f"{audit} cannot be written to by this user: see ls -l {audit}"
    writable.append(audit)
    assert not check(file, {}).faults


def test_faults_that_only_a_start_would_find_are_reported(written, tmp_path):
    (tmp_path / "token").write_text("two words")
    file = written(
        f'admin = 9600\nadmin_token_file = "{tmp_path}/token"\naudit = "{tmp_path}"\n'
        + cluster()
        + '[cluster.login]\nmechanism = "OAUTHBEARER"\ntoken_command = ["no-such-program"]\n'
    )
    faults = dict(check(file, {}).faults)
    assert "it should be one word" in faults["admin_token_file"]
    assert faults["audit"].endswith("is a folder: name a file in it")
    assert faults["default: login.token_command"] == "no-such-program is no program that this user may run"


def test_the_summary_names_settings_left_to_defaults(written):
    file = written("admin = 9600\n" + cluster() + '[[cluster.policy]]\naction = "allow"\ntopic = "a"\n')
    text = "\n".join(runs(summary(check(file, {}).config)))
    assert "1 rule, what none matches is denied" in text and "localhost:9600" in text


def test_a_warning_that_a_start_would_log_is_one_of_check_and_a_finding_of_doctor(written, tmp_path):
    files = Authority(tmp_path).expired()
    tls = f'[cluster.tls]\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
    file = written(cluster(bootstrap=["127.0.0.1:1"]) + tls)
    done = run(file)
    assert done.returncode == 0 and done.stderr.startswith("warning: cluster=default tls: ")
    (line,) = done.stderr.splitlines()
    assert "expired at" in line
    command = [*KPROXY, "doctor", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.stdout.count("fix: renew it") == 1


def test_logins_that_kproxy_checks_do_not_pass_through(written, tmp_path):
    def said(settings):
        done = run(written(cluster() + settings))
        return [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.strip().startswith("login ")]

    assert said("") == ["passed through, if clients log in"]
    change(tmp_path / "users", "alice", "pass of alice")
    assert said(f'[cluster.authentication]\nmechanisms = ["PLAIN"]\nusers_file = "{tmp_path}/users"\n') == [
        "none at the brokers"
    ]


def test_the_summary_has_zookeeper(written):
    file = written(cluster() + '[[zookeeper]]\nname = "old"\nlisten = "localhost:2181"\nservers = ["zk-1:2181"]\n')
    rows = [line.split() for line in runs(summary(check(file, {}).config))]
    at = rows.index(["zookeeper", "old"])
    assert rows[at + 1 : at + 3] == [["listens", "at", "localhost:2181"], ["servers", "at", "zk-1:2181"]]


def test_rules_that_never_decide_are_refused(written):
    rules = 'action = "deny"\nprincipal = "User:eve"', 'action = "allow"', 'action = "deny"\ntopic = "secret"'
    done = run(written(cluster(name="shop") + "".join(f"[[cluster.policy]]\n{rule}\n" for rule in rules)))
    assert done.returncode == 1
    assert "shop: policy[0].principal: nothing says who a client is" in done.stderr + done.stdout
    assert "shop: policy[2]: policy[1] comes before it and allows all that it denies" in done.stderr + done.stdout


def test_a_principal_without_its_type_is_asked_for_again(written):
    file = written(cluster() + '[[cluster.policy]]\naction = "deny"\ntopic = "a"\nprincipal = "User:*"\n')
    asked = ("--request", "Produce", "--topic", "a", "--principal")
    assert "denied" in run(file, *asked, "User:alice").stdout
    done = run(file, *asked, "alice")
    assert done.returncode == 2 and "like User:alice" in done.stderr


def test_no_port_is_opened(written):
    """The result is the same while a kproxy has those ports."""
    file = written(cluster())
    config = check(file, {}).config
    with socket.create_server(config.clusters[0].listen):
        assert run(file).returncode == 0
    assert any("kafka.example:9092" in line for line in runs(summary(config)))


def test_the_count_of_rules_is_singular_or_plural(written):
    rule = '[[cluster.policy]]\naction = "allow"\ntopic = "a"\n'
    assert "1 rule, what none matches is denied" in run(written(cluster() + rule)).stdout
    assert "2 rules, what none matches" in run(written(cluster() + rule * 2)).stdout


def test_the_folder_of_the_flight_recorder_is_one_that_can_be_made(written, tmp_path):
    found = check(written(f'[flight]\nfolder = "{tmp_path}/new/dumps"\n' + cluster()), {})
    assert not found.faults and summary(found.config)["flight"] == f"{tmp_path}/new/dumps"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    found = check(written(f'[flight]\nfolder = "{tmp_path}/file"\n' + cluster()), {})
    assert [place for place, _ in found.faults] == ["flight.folder"] and "is no folder" in found.faults[0][1]


def test_a_table_with_too_few_brackets_is_named(written):
    done = run(written(cluster(name="one").replace("[[cluster]]", "[cluster]") + cluster(name="two")))
    assert done.returncode == 1 and "write each [cluster] as [[cluster]], with two brackets" in done.stderr


def test_a_likely_mistake_is_a_warning_of_check_and_of_doctor(written):
    file = written(cluster(name="shop", bootstrap=["127.0.0.1:1"]) + '[[cluster.policy]]\naction = "allow"\n')
    done = run(file)
    assert done.returncode == 0
    assert done.stderr.startswith("warning: shop: policy[0]: allows everything to everybody")
    (warning,) = json.loads(run(file, "--json").stdout)["warnings"]
    assert warning["place"] == "shop: policy[0]" and "principal" in warning["fix"] == warning["mend"]
    done = subprocess.run([*KPROXY, "doctor", str(file)], capture_output=True, text=True, check=False)
    assert "warning: configuration: shop: policy[0]" in done.stdout


def test_a_refusal_names_the_rule_that_comes_near(written):
    file = written(cluster() + '[[cluster.policy]]\naction = "allow"\ntopic = "orders-*"\n')
    done = run(file, "--request", "JoinGroup", "--group", "g")
    assert done.returncode == 1 and done.stdout.splitlines()[1] == "  rule 1 would allow it, but it has no group"
    (explained,) = json.loads(run(file, "--request", "JoinGroup", "--group", "g", "--json").stdout)
    assert explained["near"] == ["rule 1 would allow it, but it has no group"]


def test_the_file_of_given_ports_may_be_missing_but_is_ours_and_can_be_written(tmp_path):
    file, ports = tmp_path / "kproxy.toml", tmp_path / "ports.json"

    def faults(path):
        file.write_text(
            '[[cluster]]\nlisten = "127.0.0.1:9092"\nbootstrap = ["b:9092"]\n[[cluster.brokers]]\nids = "any"\n'
            f'port = 9201\nport_count = 40\nports_file = "{path}"\n'
        )
        return check(file, {}).faults

    place = "default: brokers[0].ports_file"
    assert faults(ports) == ()
    assert summary(check(file, {}).config)["clusters"][0]["broker_ports"] == ["9201-9240 for any brokers"]
    ports.write_text("notes")
    ((where, text),) = faults(ports)
    assert where == place and "is not used: it is no JSON" in text and "remove it or name another" in text
    ((where, text),) = faults(tmp_path / "missing" / "ports.json")
    assert where == place and f"{tmp_path / 'missing'} is no folder that this user may write to" in text


def test_a_file_of_bytes_is_no_configuration(tmp_path):
    """The advice for text in another encoding, to save it as UTF-8, would not help."""
    capture, text = tmp_path / "seen.pcap", tmp_path / "kproxy.toml"
    capture.write_bytes(b"\xd4\xc3\xb2\xa1\2\0\4\0")
    text.write_bytes("# geändert\n".encode("latin-1"))
    for path, said in ((capture, "no text, but bytes"), (text, "save it as UTF-8")):
        done = run(path)
        assert done.returncode and said in done.stderr, done.stderr
