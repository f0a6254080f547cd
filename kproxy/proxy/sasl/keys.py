"""Keeps the keys that check tokens fresh: loads them at an interval, or when one is missing.

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
    """load(): returns the JWKS; called on a thread; raises TokenError."""

    def __init__(self, cluster: str, checker: TokenChecker, load: Callable[[], bytes], refresh_s: float) -> None:
        self._cluster = cluster
        self._checker = checker
        self._load = load
        self._refresh_s = refresh_s
        self._tried = 0.0  # monotonic seconds; 0: never
        self._are_there = False
        self._loading: asyncio.Task[None] | None = None
        self._limiter = LogLimiter(log)

    def begin(self, newer: bool) -> None:
        """Load the keys in the background if they are due. newer: the loaded keys do not fit."""
        age_s = time.monotonic() - self._tried
        due_s = MIN_INTERVAL_S if newer or not self._are_there else self._refresh_s
        if self._loading is None and (not self._tried or age_s >= due_s):
            self._tried = time.monotonic()
            self._loading = asyncio.get_running_loop().create_task(self._reload())

    async def fresh(self, newer: bool) -> None:
        """Load the keys if they are due, and wait for that if none are loaded, or if newer ones are needed."""
        self.begin(newer)
        if self._loading is not None and (newer or not self._are_there):
            await asyncio.shield(self._loading)

    async def _reload(self) -> None:
        try:
            self._checker.use(await asyncio.to_thread(self._load))
            self._are_there = True
        except TokenError as fault:
            text = "cluster=%s: the keys that check tokens cannot be loaded: %s%s"
            kept = "; those from before stay" if self._are_there else "; logins by OAUTHBEARER are refused"
            self._limiter.log(logging.WARNING, "keys", text, self._cluster, fault, kept)
        finally:
            self._loading = None
