"""Writes `kproxy/protocol/apis.py`: API keys and error codes as constants, from the layouts.

    python tools/make_apis.py

Run it after `make_layouts.py`; a test fails as long as the file differs from what this would write.
"""

import re
from pathlib import Path

from kproxy.protocol.error_codes import ERRORS
from kproxy.protocol.schema import schema

OUT = Path(__file__).resolve().parents[1] / "kproxy" / "protocol" / "apis.py"
HEAD = '''"""API keys and error codes of Kafka by name.

Written by `tools/make_apis.py` from the layouts; do not edit.
"""
'''


def constant(name: str) -> str:
    """`OffsetForLeaderEpoch` as OFFSET_FOR_LEADER_EPOCH."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()


def text() -> str:
    """The whole module."""
    apis = [f"{constant(api.name)} = {key}" for key, api in sorted(schema().apis.items())]
    errors = [f"{error.name} = {code}" for code, error in sorted(ERRORS.items())]
    return "\n".join([HEAD, "# API keys", *apis, "", "# Error codes", *errors, ""])


if __name__ == "__main__":
    OUT.write_text(text())
