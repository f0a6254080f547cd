"""The keys of tokens: loaded when they are due or when one is missing, and kept when a load fails."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kproxy.proxy.config import files
from kproxy.proxy.sasl import keys, tokens
from kproxy.proxy.sasl.keys import Keys
from kproxy.proxy.sasl.tokens import TokenError, UnknownKeyError
from tests.proxy.sasl.test_tokens import OTHER, RSA, checker, jwk, jwks, token


def test_keys_are_loaded_once_for_all_who_wait_and_again_when_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(keys, "time", SimpleNamespace(monotonic=lambda: now_s))
    served = [jwks(jwk(RSA, kid="one")), jwks(jwk(OTHER, kid="one")), b"nonsense"]
    loads: list[int] = []

    def load() -> bytes:
        loads.append(1)
        if len(loads) > len(served):
            raise TokenError("gone")
        return served[len(loads) - 1]

    async def test() -> None:
        nonlocal now_s
        one = checker()
        one._keys = []
        fresh = Keys("default", one, load, refresh_s=3600)
        await asyncio.gather(*(fresh.fresh(False) for _ in range(10)))
        assert len(loads) == 1 and one.check(token()).name == "alice"
        with pytest.raises(UnknownKeyError):
            one.check(token(OTHER))
        now_s += keys.MIN_INTERVAL_S - 1
        await fresh.fresh(True)  # too soon after the last load
        assert len(loads) == 1
        now_s += 1
        await asyncio.gather(*(fresh.fresh(True) for _ in range(10)))
        assert len(loads) == 2 and one.check(token(OTHER)).name == "alice"
        for count in (3, 4):  # nonsense, then nothing: what is there stays
            now_s += keys.MIN_INTERVAL_S
            await fresh.fresh(True)
            assert len(loads) == count and one.check(token(OTHER)).name == "alice"
        await fresh.fresh(False)
        assert len(loads) == 4

    asyncio.run(test())


def test_keys_of_a_file_are_those_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    """Replaced by a rename, by another target of a link, or written over: the next login has the new keys."""
    file, target = tmp_path / "jwks", tmp_path / "target"
    new, old = jwks(jwk(OTHER, kid="one")), jwks(jwk(RSA, kid="one"))
    target.write_bytes(old)
    file.symlink_to(target)

    def renamed(data: bytes) -> None:
        (tmp_path / "fresh").write_bytes(data)
        (tmp_path / "fresh").replace(target)

    def linked(data: bytes) -> None:
        other = tmp_path / f"target-{len(data)}-{data is old}"
        other.write_bytes(data)
        (tmp_path / "link").symlink_to(other)
        (tmp_path / "link").replace(file)

    async def test() -> None:
        one = checker()
        of_file = Keys("default", one, partial(tokens.read, file), 3600, partial(files.version, file))
        await of_file.fresh(False)
        for change, data in ((renamed, new), (linked, old), (linked, new), (file.write_bytes, old)):
            change(data)
            await asyncio.gather(*(of_file.fresh(False) for _ in range(3)))
            right, wrong = (OTHER, RSA) if data is new else (RSA, OTHER)
            assert one.check(token(right)).name == "alice"
            with pytest.raises(UnknownKeyError):
                one.check(token(wrong))
        file.write_bytes(b"")
        await of_file.fresh(False)
        assert one.check(token(RSA)).name == "alice"  # those from before, until it is complete
        file.write_bytes(new)
        await of_file.fresh(False)
        assert one.check(token(OTHER)).name == "alice"

    asyncio.run(test())
