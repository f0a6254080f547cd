"""SASL of one cluster: kproxy's login at brokers, clients' logins at kproxy, and the ends of sessions.

Connects the settings, the steps on both sides of a connection, and the renewals while it lasts. Bounded: a timer and a
task for each connection whose logins expire. Refuses to know frames and mechanisms.
"""

import asyncio
import logging
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kproxy.addresses import numeric
from kproxy.errors import LOGIN_CAUSES, ConfigError, UpstreamError, of_extras
from kproxy.metrics.counters.cells import ClusterCells
from kproxy.proxy.admission.failed_logins import FailedLogins
from kproxy.proxy.admission.renewals import Renewals
from kproxy.proxy.config import files
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.authentication import Authentication as Settings
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.filters.chain import Filter
from kproxy.proxy.filters.relogin import AnswerLogins, RenewLogins
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.relay.ends import Admitted
from kproxy.proxy.relay.relay import Relay
from kproxy.proxy.sasl import tokens
from kproxy.proxy.sasl.checks import Checks, LoginRefusedError
from kproxy.proxy.sasl.clients import Authenticator
from kproxy.proxy.sasl.clients import Session as ClientSession
from kproxy.proxy.sasl.identities import Identities
from kproxy.proxy.sasl.keys import Keys
from kproxy.proxy.sasl.login import LoggedIn
from kproxy.proxy.sasl.tokens import TokenChecker
from kproxy.proxy.sasl.users import UsersError, UsersFile
from kproxy.proxy.upstream.login import BrokerLogin
from kproxy.proxy.upstream.loops import LoopGuard
from kproxy.wire.events import ClientNamed
from kproxy.wire.interest import Interest
from kproxy.wire.session import Session

BROKER_OUTCOMES = ("success", "renewed", "timeout", "disconnected", *LOGIN_CAUSES)
CLIENT_OUTCOMES = (
    "success",
    "renewed",
    "failed",
    "mechanism",
    "state",
    "malformed",
    "timeout",
    "disconnected",
    "expired",
)

log = logging.getLogger("kproxy.logins")


def broker_login(cluster: Cluster, loops: LoopGuard, cells: ClusterCells) -> BrokerLogin | None:
    """Return kproxy's login at a cluster's brokers; None if it has none. Raises ConfigError for unreadable files."""
    if cluster.login is None:
        return None
    identities = Identities(cluster.login)
    try:
        identities.check()
    except UpstreamError as fault:
        raise ConfigError([(f"{cluster.name}: login", str(fault))]) from None
    if any(mechanism.startswith("SCRAM") for mechanism in identities.mechanisms):
        with of_extras(lambda missing: ConfigError([(f"{cluster.name}: login", f"it {missing}")])):
            import scramp  # noqa: F401 - 50 ms, which the first login would take of the loop
    for mechanism in sorted(identities.mechanisms):
        cells.expect_authentications("broker", mechanism, BROKER_OUTCOMES)
    return BrokerLogin(identities, loops, partial(cells.authenticated, "broker"))


class Logins:
    """The logins of one cluster's connections; `of_broker` is a step of connecting to a broker."""

    def __init__(self, cluster: Cluster, loops: LoopGuard, cells: ClusterCells) -> None:
        """Read the files. Raises ConfigError for unreadable ones."""
        self.of_broker = broker_login(cluster, loops, cells)
        self.of_clients: Authenticator | None = None
        self.failed: FailedLogins | None = None  # set by the owner: records failed logins
        self._cluster = cluster
        self._cells = cells
        self._renewals = Renewals(cluster.name, self.of_broker) if self.of_broker is not None else None
        self._limiter = LogLimiter(log)
        self._ends: dict[int, Callable[[], object]] = {}  # connection number -> cancels its timer and task
        self._expired: Interest | None = None
        self._checked_apart: set[asyncio.Task[None]] = set()  # running checks of renewals' tokens
        self._warn_of_plaintext(cluster)
        self._warn_of_writers(cluster)
        if cluster.authentication is not None:
            place = f"{cluster.name}: authentication"
            try:
                with of_extras(lambda missing: ConfigError([(place, f"it {missing}")])):
                    self.of_clients = self._authenticator(cluster.authentication)
            except (UsersError, tokens.TokenError) as fault:
                raise ConfigError([(place, str(fault))]) from None

    @property
    def answers_clients(self) -> bool:
        """Whether kproxy answers SASL requests of clients; otherwise they pass through."""
        return self.of_broker is not None or self.of_clients is not None

    @staticmethod
    def _warn_of_plaintext(cluster: Cluster) -> None:
        """Warn if PLAIN or OAUTHBEARER sends a reusable secret over an unencrypted connection."""
        reusable = {"PLAIN", "OAUTHBEARER"}
        text = "cluster=%s: %s sends its secret unencrypted %s: add [cluster.%s], or use SCRAM"
        login, authentication = cluster.login, cluster.authentication
        away = [str(address) for address in cluster.bootstrap if not _is_here(address.host)]
        if login is not None and login.mechanism in reusable and cluster.upstream_tls is None and away:
            log.warning(text, cluster.name, login.mechanism, f"to {away[0]}", "upstream_tls")
        if authentication is not None and cluster.tls is None and not _is_here(cluster.listen.host):
            for mechanism in sorted(reusable.intersection(authentication.mechanisms)):
                log.warning(text, cluster.name, mechanism, f"from clients to {cluster.listen}", "tls")

    @staticmethod
    def _warn_of_writers(cluster: Cluster) -> None:
        """Warn of credential files that every user can write to: any of them could then log in as anybody."""
        settings = cluster.authentication
        for path in (settings.users_file, settings.jwks_file) if settings is not None else ():
            with suppress(OSError):  # an unreadable file is a fault, reported where it is read
                if path is not None and path.stat().st_mode & stat.S_IWOTH:
                    text = "cluster=%s: every user of this machine can write to %s, and so log in as anybody: chmod o-w"
                    log.warning(f"{text} %s", cluster.name, path, path)

    def _authenticator(self, settings: Settings) -> Authenticator:
        users = UsersFile(settings.users_file) if settings.users_file is not None else None
        if any(mechanism.startswith("SCRAM") for mechanism in settings.mechanisms):
            import scramp  # noqa: F401 - so that a missing one is reported at the start
        checker = keys = None
        version: Callable[[], tuple[int, ...]] = tuple
        if "OAUTHBEARER" in settings.mechanisms:
            checker = TokenChecker(
                issuer=settings.issuer,
                audience=settings.audience,
                claim=settings.principal_claim,
                skew_s=settings.clock_skew_s,
                client_claim=settings.client_claim,
                clients=settings.allowed_clients,
            )
            if settings.jwks_file is not None:
                load = partial(tokens.read, settings.jwks_file)
                version = partial(files.version, settings.jwks_file)
                checker.use(load())
            else:
                load = partial(tokens.fetch, settings.jwks_url or "", settings.jwks_ca_file)
            keys = Keys(self._cluster.name, checker, load, settings.jwks_refresh_s, version)

        def refresh_users() -> None:
            if users is not None and users.refresh():
                if users.fault:
                    text = "cluster=%s: the users from before stay, since %s"
                    self._limiter.log(logging.ERROR, "users", text, self._cluster.name, users.fault)
                else:
                    log.info("cluster=%s: %d users read from %s", self._cluster.name, len(users.users), users.path)

        async def refresh(newer: bool) -> None:
            refresh_users()
            if keys is not None:
                await keys.fresh(newer)

        def begin(newer: bool) -> None:
            refresh_users()
            if keys is not None:
                keys.begin(newer)

        for mechanism in (*settings.mechanisms, "unknown"):
            self._cells.expect_authentications("client", mechanism, CLIENT_OUTCOMES)
        return Authenticator(
            Checks(settings.mechanisms, users, checker),
            settings.session_lifetime_s,
            settings.failure_delay_s,
            refresh,
            begin,
            partial(self._cells.authenticated, "client"),
        )

    # --- during a connection -----------------------------------------------------------------------------------------

    def filter(self, client: Admitted) -> Filter | None:
        """Return the filter that answers a client's requests to log in; None: they pass to the broker."""
        if self.of_clients is not None and client.session is not None:
            owner = self.of_clients
            apart = partial(self._apart, owner, client.peer.host)
            return RenewLogins(owner.checks, client.session, owner.lifetime_ms, owner.begin, apart)
        if self.of_broker is not None:
            return AnswerLogins(partial(self._login_answered, client))
        return None

    def _apart(self, owner: Authenticator, host: str, work: Callable[[], None], done: Callable[[], None]) -> None:
        """Check a renewal's token like the token of a first login: on the same thread, by address in turn."""
        task = asyncio.get_running_loop().create_task(owner.apart(host, work))
        self._checked_apart.add(task)
        task.add_done_callback(self._checked_apart.discard)
        task.add_done_callback(lambda _: done())

    def _login_answered(self, client: Admitted) -> None:
        self._limiter.log(
            logging.WARNING,
            "login answered",
            "cluster=%s client=%s: it wants to log in, but kproxy has a login of its own at the brokers: let clients "
            "use no SASL (security.protocol=PLAINTEXT or SSL), or have kproxy check logins: [cluster.authentication]",
            self._cluster.name,
            client.peer,
        )

    def begin(
        self,
        relay: Relay,
        client: Admitted,
        login: LoggedIn | None,
        renews: Filter | None,
        all_authorized: Interest,
    ) -> None:
        """Renew kproxy's login and end the client's session in time; called when the relay has started.

        login: kproxy's own, if it must be renewed. renews: the client's filter of logins. all_authorized: the interest
        of expired sessions.
        """
        loop = asyncio.get_running_loop()
        ends: list[Callable[[], object]] = []
        if login is not None and self._renewals is not None:
            task = loop.create_task(self._renewals.keep(relay, client.principal, login))
            task.add_done_callback(_log_defect)
            ends.append(task.cancel)
        if isinstance(renews, RenewLogins) and client.session is not None:
            life = _SessionLife(self, relay, renews, client.session, all_authorized)
            life.lasts(client.session.lifetime_ms)
            ends.append(life.ended)
        if ends:
            self._ends[relay.number] = lambda: [end() for end in ends]

    def ended(self, relay: Relay) -> None:
        """Stop the renewals of a closed relay."""
        end = self._ends.pop(relay.number, None)
        if end is not None:
            end()

    def counts(self, mechanism: str, outcome: str) -> None:
        self._cells.authenticated("client", mechanism, outcome)

    @staticmethod
    def named(session: Session, client: Admitted, now_ns: int) -> None:
        """Report the client id and software that a client sent before its login."""
        if client.session is not None:
            session.client_id = client.session.client_id
        if client.session is not None and client.session.software is not None:
            session.software = client.session.software
            session.events.append(ClientNamed(client.session.client_id, *client.session.software, now_ns))


class _SessionLife:
    """The end of a client's session, and its renewals."""

    def __init__(
        self, owner: Logins, relay: Relay, renews: RenewLogins, session: ClientSession, all_authorized: Interest
    ) -> None:
        self._owner = owner
        self._relay = relay
        self._renews = renews
        self._session = session
        self._interest = relay.session.interest
        self._all_authorized = all_authorized
        self._timer: asyncio.TimerHandle | None = None
        renews.done = self._done

    def lasts(self, lifetime_ms: int) -> None:
        self.cancel()
        if lifetime_ms:
            self._timer = asyncio.get_running_loop().call_later(lifetime_ms / 1000, self._expire)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def ended(self) -> None:
        """Handle the end of the connection, which may happen during a renewal."""
        self.cancel()
        if self._renews.is_renewing:
            self._owner.counts(self._session.mechanism, "disconnected")

    def _expire(self) -> None:
        """Let the next request other than a login end the connection, as at a broker; until then this costs nothing."""
        self._renews.is_expired = True
        self._relay.session.use(self._all_authorized)

    def _done(self, outcome: str, lifetime_ms: int, fault: LoginRefusedError | None) -> None:
        """Apply the outcome of a renewal. The filter calls it within a call of the session."""
        mechanism = self._session.mechanism
        self._owner.counts(mechanism, outcome)
        if fault is not None and self._owner.failed is not None:
            info = self._relay.info
            client = Address(info.client_address, info.client_port)
            text = f"{fault.reason}, in a connection of {self._session.known.name[:80]!r}"
            self._owner.failed.add(client, mechanism, fault.claimed, outcome, text, renewal=True)
        loop = asyncio.get_running_loop()
        if outcome == "renewed":
            self.lasts(lifetime_ms)
            if self._renews.is_expired:
                self._renews.is_expired = False
                loop.call_soon(self._relay.session.use, self._interest)
        elif outcome in ("failed", "mechanism"):
            assert self._owner.of_clients is not None
            loop.call_soon(self._relay.session.use, self._all_authorized)  # until the answer has left
            loop.call_later(self._owner.of_clients.failure_delay_s, _refuse, self._relay)


def _is_here(host: str) -> bool:
    """Whether bytes sent there stay on this machine."""
    address = numeric(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _refuse(relay: Relay) -> None:
    """Close a connection once its pending answers have left."""
    relay.drain("authentication")


def _log_defect(task: "asyncio.Task[None]") -> None:
    """Log a defect that ended a renewal."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a defect of kproxy ended the renewal of a login", exc_info=task.exception())
