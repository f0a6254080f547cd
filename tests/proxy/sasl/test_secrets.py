"""A secret is shown by `reveal` and by nothing else."""

import copy
import pickle
import traceback

import pytest

from kproxy.proxy.sasl.mechanisms import OAuthBearer, Plain
from kproxy.proxy.sasl.secrets import Secret, without


def test_the_texts_of_a_secret_hide_it() -> None:
    secret = Secret("hunter2")
    texts = (repr(secret), str(secret), f"{secret!r} {secret}", repr({"a": [secret]}))
    assert not any("hunter2" in text for text in texts)
    assert secret.reveal() == "hunter2"
    assert secret == Secret("hunter2") != Secret("hunter3")
    for leaves in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError):
            leaves(secret)


def test_mechanisms_and_their_tracebacks_do_not_show_the_secret() -> None:
    for mechanism in (Plain("alice", Secret("hunter2")), OAuthBearer(Secret("hunter2"))):
        try:
            raise RuntimeError(mechanism)
        except RuntimeError as fault:
            assert "hunter2" not in "".join(traceback.format_exception(fault)) + repr(mechanism.__dict__)


def test_a_peers_text_is_shown_as_one_short_line_without_secrets() -> None:
    assert without("no:\n  hunter2\tis wrong", [Secret("hunter2"), Secret("")]) == "no: *** is wrong"
    assert len(without("x" * 10_000, [])) == 303
    assert without("x" * 300, []) == "x" * 300 and without("x" * 301, []) == "x" * 300 + "..."
    assert without("abcd", [], at_most=4) == "abcd" and without("abcde", [], at_most=4) == "abcd..."
