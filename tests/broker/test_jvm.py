"""The outputs of tools that run one after another in one JVM stay separate, and a tool that hangs blocks no other."""

import pytest

from tests.broker.jvm import tool
from tests.broker.tools import CONSUMER, TOPICS
from tests.ports import free_ports

STORAGE = "kafka.tools.StorageTool"


def test_the_output_of_a_tool_is_separate_from_earlier_ones() -> None:
    first, second = (tool(STORAGE, "random-uuid").strip() for _ in range(2))
    assert len(first) == len(second) == 22 and first != second
    with pytest.raises(AssertionError, match=r"(?s)StorageTool format exited 1\n.*--config"):
        tool(STORAGE, "format")
    with pytest.raises(AssertionError, match=r"(?s)no.such.Tool  exited 1\n.*ClassNotFoundException"):
        tool("no.such.Tool")
    assert len(tool(STORAGE, "random-uuid").strip()) == 22


@pytest.mark.ring2
def test_a_tool_that_hangs_is_ended() -> None:
    nobody = f"127.0.0.1:{free_ports(1)}"
    with pytest.raises(AssertionError, match=f"--bootstrap-server {nobody} --topic t did not end within 3 s"):
        tool(CONSUMER, "--bootstrap-server", nobody, "--topic", "t", timeout_s=3)
    assert tool(TOPICS, "--version").startswith("4.")
