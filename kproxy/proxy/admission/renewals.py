"""Renews kproxy's logins at brokers before their sessions end (KIP-368), on connections in use.

kproxy renews a login at 85 to 95 % of the lifetime that the broker gave, as Kafka's own clients do. It pauses the relay
between two requests, since a broker accepts no other requests during a login. Bounded: a task for each such connection,
which ends with it; ANSWER_S for an answer once no older request is pending. Refuses to know mechanisms.
"""

import asyncio
import logging
import random

from kproxy.errors import UpstreamError
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.relay.relay import Relay
from kproxy.proxy.sasl.login import CLIENT_ID, LoggedIn
from kproxy.proxy.upstream.login import BrokerLogin, Ended, Exchange

ANSWER_S = 10.0
MIN_INTERVAL_S = 1.05  # a broker refuses a second login within a second
RETRY_S = 1.0  # after a password or a token was unavailable

log = logging.getLogger("kproxy.logins")


class Renewals:
    """Renews the logins of one cluster's connections."""

    def __init__(self, cluster: str, login: BrokerLogin) -> None:
        self._cluster = cluster
        self._login = login
        self._limiter = LogLimiter(log)

    async def keep(self, relay: Relay, principal: str, done: LoggedIn) -> None:
        """Renew the login of a connection until it closes; close it if its login cannot be renewed."""
        loop = asyncio.get_running_loop()
        while done.lifetime_ms and not relay.closed:
            ends = loop.time() + done.lifetime_ms / 1000
            await asyncio.sleep(max(MIN_INTERVAL_S, done.lifetime_ms / 1000 * random.uniform(0.85, 0.95)))
            try:
                renewed = await self._renew(relay, principal, done)
                if renewed is None:
                    return  # the connection has ended
                done = renewed
            except UpstreamError as fault:
                is_over = fault.cause != "login_credentials" or loop.time() + RETRY_S > ends
                text = "cluster=%s client=%s: the login at the broker cannot be renewed: %s%s"
                end = "; the connection is closed" if is_over else "; it is tried again"
                self._limiter.log(
                    logging.WARNING, fault.cause, text, self._cluster, relay.info.client_address, fault, end
                )
                if is_over:
                    relay.close("login_expired")
                    return
                done = LoggedIn(done.versions, round((ends - loop.time()) * 1000))

    async def _renew(self, relay: Relay, principal: str, done: LoggedIn) -> LoggedIn | None:
        mechanism = await self._login.prepare(principal)  # before the pause: a command may be slow
        paused = asyncio.Event()
        relay.pause(paused.set)
        try:
            await paused.wait()
            return await self._login.again(mechanism, _exchange_on(relay), done)
        except Ended:
            return None
        finally:
            relay.go_on()


def _exchange_on(relay: Relay) -> Exchange:
    """Return a function that sends kproxy's own request on a paused relay and returns the answer, as `Exchange`."""
    begun = False

    async def exchange(data: bytes) -> bytes:
        nonlocal begun
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def take(frame: bytes) -> None:
            if not answered.done():
                answered.set_result(frame[4:])

        if not relay.ask(data, take, CLIENT_ID):
            raise Ended(begun=begun)
        begun = True
        asked = relay.session.pending[-1]
        while True:
            done, _ = await asyncio.wait([answered], timeout=ANSWER_S)
            if done:
                return answered.result()
            pending = relay.session.pending
            if relay.closed or not pending:
                raise Ended(begun=True)
            if pending[0] is asked:  # else the broker is busy with an older request
                raise UpstreamError(f"the broker did not answer within {ANSWER_S:g} s", "timeout")

    return exchange
