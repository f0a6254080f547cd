"""The filters of a cluster's connections: created once from its settings, then for each connection.

The order (`ClusterFilters.of`): logins and policy decide requests; offered versions are capped; telemetry answers
requests and adds its APIs to the offered ones; addresses are rewritten; answers are searched for those of brokers.
Refuses to know sockets and relays.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kproxy.errors import ConfigError, of_extras
from kproxy.protocol.apis import HEARTBEAT
from kproxy.protocol.schema import schema
from kproxy.proxy.admission.logins import Logins
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.filters.addresses import Addresses, Advertise, FindLeak, LeakCheck
from kproxy.proxy.filters.chain import Chain, Filter
from kproxy.proxy.filters.policy.auditing import Peer
from kproxy.proxy.filters.policy.authorizer import PolicyAuthorizer
from kproxy.proxy.filters.policy.policy import Policy
from kproxy.proxy.filters.policy.topic_names import TopicNames
from kproxy.proxy.filters.relogin import wants as wants_login
from kproxy.proxy.filters.rewrite import cap_versions
from kproxy.proxy.filters.telemetry import ERRORS_OF, TELEMETRY_APIS, AnswerTelemetry, Receiver
from kproxy.proxy.filters.telemetry import wants as wants_telemetry
from kproxy.proxy.filters.versions import Versions
from kproxy.proxy.relay.ends import Admitted
from kproxy.proxy.tasks import Tasks
from kproxy.wire.bodies import DETAILS, Logs
from kproxy.wire.interest import Interest
from kproxy.wire.observing.kept import Kept

Wants = Callable[[int, int], bool]  # (api key, version) -> whether such requests are authorized


class Filters(NamedTuple):
    """The filters of one connection; its metrics and logins know two of them."""

    chain: Chain
    addresses: Addresses | None
    login: Filter | None


class ClusterFilters:
    """Creates the filters of a cluster's connections.

    rewrites: brokers' addresses become kproxy's (`advertise`, `find_leak`); else answers are only searched for them.
    interest: what sessions decode; expired_interest: the same for sessions with an expired login.
    """

    def __init__(
        self,
        worker: Worker,
        cluster: Cluster,
        names: TopicNames,
        logins: Logins | None,
        advertise: Advertise,
        find_leak: FindLeak,
        tasks: Tasks,
        *,
        rewrites: bool,
    ) -> None:
        """Create the shared parts. Raises ConfigError if an extra is missing."""
        self.logins = logins
        self._worker = worker
        self.cluster = cluster
        self._names = names
        self._advertise = advertise
        self._rewrites = rewrites
        self._tasks = tasks
        policy = Policy(cluster, audits=worker.audit is not None)
        self._policy = None if policy.is_empty else policy
        self._caps = policy.caps()
        if policy.is_active:
            worker.metrics.cluster(cluster.name).has_policy(policy.reasons)
        self._telemetry = self._receiver = self._telemetry_receiver()
        self._versions = Versions(self._caps)
        self._leak_check = LeakCheck(find_leak)
        self.kept = self._kept_frames()
        authorizes: Wants | None = None if self._policy is None else self._policy.authorizes
        if self._telemetry is not None:
            authorizes = _either(wants_telemetry, authorizes)
        if logins is not None:
            authorizes = _either(wants_login, authorizes)
        interest = partial(
            Interest,
            rewrite=rewrites,
            brokers=not rewrites,
            details=bool(worker.sinks),  # metrics alone need no groups, and of bodies only those with records
            detail=DETAILS[cluster.detail],
            held=worker.held,
            names=self._policy is not None and self._policy.needs_names,
            kept=self.kept,
            logs=None if self.kept is None else Logs(),
        )
        self.interest = interest(authorizes=authorizes)
        self.expired_interest = interest(authorizes=lambda api_key, version: True)

    def follow(self, former: "ClusterFilters") -> None:
        """Replace the filters of former settings; clients that push metrics to those are passed to these."""
        if former._receiver is None:
            return
        former._receiver.change(self.cluster.telemetry, self._tasks.spawn)
        self._receiver = former._receiver
        if self._telemetry is not None:
            self._telemetry = self._receiver

    def of(self, client: Admitted) -> Filters:
        """Return the filters of a client's connection."""
        login = self.logins.filter(client) if self.logins is not None else None
        addresses = Addresses(self._advertise) if self._rewrites else None
        policy = self._policy_of(client)
        chain = (
            login,
            policy,
            self._versions if policy is None else Versions(self._caps, policy.refused_versions),
            self._telemetry_of(client),
            addresses,
            self._leak_check,
        )
        filters = [each for each in chain if each is not None]
        return Filters(Chain(filters, holds_answers=self._rewrites), addresses, login)

    def before_login(self, version: int, answer: memoryview, host: str, client_id: str | None) -> bytes | None:
        """Return an ApiVersions answer to a client that has not logged in, without versions that no principal may use.

        None: nothing changes. host: the client's.
        """
        if self._policy is None:
            return cap_versions(version, answer, self._caps)
        return cap_versions(version, answer, self._caps, self._policy.before_login(host)(client_id).refused_versions)

    def _telemetry_of(self, client: Admitted) -> AnswerTelemetry | None:
        """Return the filter of the metrics that a client pushes."""
        if self._telemetry is None:
            return None
        software = client.session.software if client.session is not None else None
        telemetry = AnswerTelemetry(self._telemetry, str(client.peer), client.principal, software)
        telemetry.broker_answers = client.broker_takes_telemetry
        return telemetry

    def _policy_of(self, client: Admitted) -> PolicyAuthorizer | None:
        """Return the filter that authorizes a client's requests; None if the listener has no policy."""
        if self._policy is None:
            return None
        worker, name = self._worker, self.cluster.name
        peer = Peer(name, str(client.peer), client.peer.host, client.principal)
        refused = worker.metrics.cluster(name).refused
        return PolicyAuthorizer(self._policy, peer, self.interest, self._names, refused, worker.audit)

    def _telemetry_receiver(self) -> Receiver | None:
        """Return the receiver of metrics that clients push; None: they go to brokers, if at all."""
        settings, name = self.cluster.telemetry, self.cluster.name
        if settings is None:
            return None
        with of_extras(lambda missing: ConfigError([(f"{name}: telemetry", f"it {missing}")])):
            import opentelemetry.proto.metrics.v1.metrics_pb2  # noqa: F401 - so that a missing one is reported at the start
        if settings.answer == "always":  # brokers may offer versions unknown to kproxy
            versions = schema().apis
            self._caps = {**self._caps, **{key: versions[key].request.versions[-1] for key in TELEMETRY_APIS}}
        cells, pushes = self._worker.metrics.cluster(name).takes_pushes(ERRORS_OF)
        return Receiver(name, settings, cells, pushes, self._tasks.spawn, self._worker.now_ns)

    def _kept_frames(self) -> Kept | None:
        """Return which frames are copied for the process that follows groups; None if it does not run."""
        if self.cluster.detail == "headers":
            return None
        from kproxy.insight.knowledge import APIS, ONLY_FAILED  # 1 MB, not needed for headers

        left_out = self._worker.metrics.cluster(self.cluster.name).follow()
        return Kept(APIS, only_failed=ONLY_FAILED, small=(HEARTBEAT,), left_out=left_out)


def _either(one: Wants, other: Wants | None) -> Wants:
    """Combine the predicates of two authorizers for an Interest."""
    return one if other is None else lambda key, version: one(key, version) or other(key, version)
