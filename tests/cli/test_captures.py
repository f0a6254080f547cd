"""Options for captures are defined once: every command that takes captures has all of them, with the same help."""

import json

import click
import pytest
from click.testing import CliRunner

from kproxy.cli import captures, cli
from tests.captures import capture


def taking_captures(group, context, path=()):
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from taking_captures(command, context, (*path, name))
        elif any("CAPTURE" in (parameter.metavar or "") for parameter in command.params):
            yield " ".join((*path, name)), command


def test_every_command_with_captures_has_all_their_options():
    @captures.options
    def plain():
        """Does nothing."""

    words = {option.name: option.to_info_dict() for option in plain.__click_params__}
    assert tuple(reversed(words)) == captures.NAMES
    found = dict(taking_captures(cli, click.Context(cli)))
    assert {"convert", "show", "decode", "spark ingest", "analyze sql", "analyze overview", "analyze slow"} <= set(
        found
    )
    for name, command in found.items():
        mine = {option.name: option.to_info_dict() for option in command.params if option.name in words}
        assert mine == words, name


@pytest.mark.parametrize(("ports", "is_there"), [(("--zookeeper-port", "2181"), True), ((), False)])
def test_ports_of_zookeeper_reach_the_tables(tmp_path, ports, is_there):
    """With --port, ZooKeeper is only found on its own ports."""
    link = tmp_path / "incident.pcap"
    link.symlink_to(capture("k0102_zookeeper"))
    command = ["analyze", "registry", str(link), "--port", "9092", *ports, "--format", "json"]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert bool(rows) == is_there
