"""Keeps the keys that check tokens fresh: loads them at an interval, when their file changes, or when one is missing.

It loads on a thread, one load at a time. A failed load keeps the loaded keys; the next attempt is after MIN_INTERVAL_S.
Refuses to know the location of keys.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.sasl.tokens import TokenChecker, TokenError

MIN_INTERVAL_S = 10.0

log = logging.getLogger("kproxy.logins")


class Keys:
    """load(): returns the JWKS, on a thread; raises TokenError. version(): differs after a change of its file."""

    def __init__(
        self,
        cluster: str,
        checker: TokenChecker,
        load: Callable[[], bytes],
        refresh_s: float,
        version: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        self._cluster = cluster
        self._checker = checker
        self._load = load
        self._refresh_s = refresh_s
        self._tried = 0.0  # monotonic seconds; 0: never
        self._are_there = False
        self._has_failed = False  # the last load
        self._version = version
        self._tried_version: tuple[int, ...] = ()
        self._loading: asyncio.Task[None] | None = None
        self._limiter = LogLimiter(log)

    def begin(self, newer: bool) -> bool:
        """Load the keys in the background if they are due. newer: the loaded keys do not fit.

        Returns whether their file has changed since the last load that ended.
        """
        version = self._version()
        has_changed = version != self._tried_version
        age_s = time.monotonic() - self._tried
        due_s = MIN_INTERVAL_S if newer or self._has_failed or not self._are_there else self._refresh_s
        if self._loading is None and (not self._tried or has_changed or age_s >= due_s):
            self._tried = time.monotonic()
            self._loading = asyncio.get_running_loop().create_task(self._reload(version))
        return has_changed

    async def fresh(self, newer: bool) -> None:
        """Load the keys if they are due, and wait for keys of a changed file, for the first, and for newer ones."""
        has_changed = self.begin(newer)
        if self._loading is not None and (newer or has_changed or not self._are_there):
            await asyncio.shield(self._loading)

    async def _reload(self, version: tuple[int, ...]) -> None:
        try:
            self._has_failed = True
            self._checker.use(await asyncio.to_thread(self._load))
            self._are_there = True
            self._has_failed = False
        except TokenError as fault:
            text = "cluster=%s: the keys that check tokens cannot be loaded: %s%s"
            kept = "; those from before stay" if self._are_there else "; logins by OAUTHBEARER are refused"
            self._limiter.log(logging.WARNING, "keys", text, self._cluster, fault, kept)
        finally:
            self._tried_version = version
            self._loading = None
