"""API keys and error codes by name."""

from kproxy.protocol import apis
from kproxy.protocol.error_codes import ERRORS
from kproxy.protocol.schema import schema
from tools.make_apis import OUT, text


def test_the_module_is_what_the_layouts_say():
    assert OUT.read_text() == text(), "python tools/make_apis.py"


def test_each_key_and_code_has_one_name():
    constants = {name: value for name, value in vars(apis).items() if name.isupper()}
    assert len(constants) == len(schema().apis) + len(ERRORS)
    assert apis.OFFSET_FOR_LEADER_EPOCH == 23 and apis.UNKNOWN_SERVER_ERROR == -1
