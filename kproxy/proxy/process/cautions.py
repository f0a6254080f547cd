"""Settings that are valid but probably a mistake: readable secrets, ineffective policies and users, bad lag intervals.

None of them prevents a start: `kproxy check` and `kproxy doctor` print them, a start and a reload log them. Each
warning is certain, but the list is not complete, as for rules that never decide (`filters.policy.idle`). It does not
repeat warnings that a start logs by itself. Refuses to know how a warning is shown, and to hold the value of a secret.
"""

import difflib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kproxy.metrics.consumers.lag import UNCONFIRMED_NS
from kproxy.proxy.config.policy import PRINCIPAL_TYPE, Rule, default_of
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.filters.policy.globs import Patterns
from kproxy.proxy.sasl.users import UsersError, read

MIN_ASK_INTERVAL_S = 1.0  # more frequent lag requests are a load of their own: 150 requests a second at 0.001
MAX_COMPARED = 1000  # users to search for a similar name, in 10 ms per name


class Caution(NamedTuple):
    """One warning."""

    place: str
    text: str
    fix: str


def cautions(config: Config) -> Iterator[Caution]:
    """Yield all warnings about settings that have no fault."""
    secrets = [("admin_token_file", config.admin_token_file)]
    if config.admin_tls is not None:
        secrets.append(("admin_tls.key", config.admin_tls.key))
    for cluster in config.clusters:
        secrets += _secrets(cluster)
        yield from _refuses_nothing(cluster)
        yield from _unknown_to_each_other(cluster)
        yield from _lag(cluster)
    for place, path in secrets:
        if path is not None and _is_read_by_all(path):
            yield Caution(place, f"every user of this host may read {path}", f"chmod o= {path}")


def _secrets(cluster: Cluster) -> Iterator[tuple[str, Path | None]]:
    if cluster.authentication is not None:
        yield f"{cluster.name}: authentication.users_file", cluster.authentication.users_file
    if cluster.login is not None:
        yield f"{cluster.name}: login.password_file", cluster.login.password_file
    if cluster.tls is not None:
        yield f"{cluster.name}: tls.key", cluster.tls.key
    if cluster.upstream_tls is not None:
        yield f"{cluster.name}: upstream_tls.key", cluster.upstream_tls.key


def _is_read_by_all(path: Path) -> bool:
    """Whether all users may read it; never for a link: Kubernetes mounts Secrets as links that all users may read."""
    try:
        if path.is_symlink() or not path.stat().st_mode & stat.S_IROTH:
            return False
        return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.absolute().parents)
    except OSError:
        return False


def _refuses_nothing(cluster: Cluster) -> Iterator[Caution]:
    """Warn if there are rules, but neither they nor the default refuse any request."""
    if cluster.read_only or not cluster.policy or any(rule.action == "deny" for rule in cluster.policy):
        return
    for number, rule in enumerate(cluster.policy):
        if rule.keys is None and _is_for_everybody(rule):
            place = f"{cluster.name}: policy[{number}]"
            yield Caution(place, "allows everything to everybody, and no rule denies", "restrict it to a principal")
            return
    if default_of(cluster.policy, cluster.policy_default) == "allow":
        place = f"{cluster.name}: policy_default"
        text = "no rule denies, and what none matches is allowed: the policy refuses nothing"
        yield Caution(place, text, "leave it out, so that only what rules allow passes")


def _is_for_everybody(rule: Rule) -> bool:
    conditions = (rule.version, rule.topic, rule.group, rule.transactional_id, rule.client_id, rule.address)
    everybody = rule.principal is None or f"{PRINCIPAL_TYPE}*" in rule.principal
    return everybody and all(condition is None for condition in conditions)


def _unknown_to_each_other(cluster: Cluster) -> Iterator[Caution]:
    """Warn of principals in rules that match no user, and of users whom no rule allows anything.

    Checked only if every client logs in as one of the users in the file.
    """
    settings = cluster.authentication
    if settings is None or settings.users_file is None or "OAUTHBEARER" in settings.mechanisms:
        return
    if cluster.tls is not None and cluster.tls.client_certificates != "none":
        return
    try:
        users = sorted(f"{PRINCIPAL_TYPE}{name}" for name in read(settings.users_file))
    except UsersError:
        return
    if not users:
        text = f"{settings.users_file} has no user, so nobody can log in"
        yield Caution(
            f"{cluster.name}: authentication.users_file", text, f"kproxy users add {settings.users_file} NAME"
        )
        return
    for number, rule in enumerate(cluster.policy):
        for pattern in rule.principal or ():
            if not any(map(Patterns((pattern,)).match, users)):
                near = difflib.get_close_matches(pattern, users, 1) if len(users) <= MAX_COMPARED else []
                yield Caution(
                    f"{cluster.name}: policy[{number}].principal",
                    f"no user of {settings.users_file} is {pattern}",
                    f"did you mean {near[0]}?" if near else "kproxy users add, or correct the name",
                )
    if not cluster.policy or default_of(cluster.policy, cluster.policy_default) == "allow":
        return
    allowing = [rule.principal for rule in cluster.policy if rule.action == "allow"]
    if None in allowing:
        return
    allowed = Patterns(pattern for principals in allowing for pattern in principals or ())
    unused = [user for user in users if not allowed.match(user)]
    if unused:
        names = ", ".join(unused[:10]) + (", ..." if len(unused) > 10 else "")
        text = f"can log in and are allowed nothing: {names}"
        yield Caution(f"{cluster.name}: policy", text, "add a rule for them, or remove them: kproxy users remove")


def _lag(cluster: Cluster) -> Iterator[Caution]:
    """Warn of a `[cluster.lag]` without effect, as offsets are not read, or one that asks too often or rarely."""
    place = f"{cluster.name}: lag"
    if cluster.detail == "headers":
        if "lag" in cluster.model_fields_set:
            text = '[cluster.lag] has no effect: with detail = "headers" kproxy reads no offsets and asks for none'
            yield Caution(place, text, 'detail = "topics" in [[cluster]]')
    elif 0 < cluster.lag.ask_interval_s < MIN_ASK_INTERVAL_S:
        text = f"a round of questions to each broker every {cluster.lag.ask_interval_s:g} s"
        yield Caution(f"{place}.ask_interval_s", text, "ask_interval_s = 15; 0 asks nothing")
    elif cluster.lag.ask_interval_s * 1e9 > UNCONFIRMED_NS:
        text = "a minute after each round, lag is unknown where no client passes"
        yield Caution(f"{place}.ask_interval_s", text, "ask_interval_s = 15")
