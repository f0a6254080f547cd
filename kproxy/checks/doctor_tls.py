"""Examines the certificates of a cluster: those of the settings, and those presented by brokers.

OpenSSL's own refusals appear when connections are made; this module checks the rest: how long certificates remain
valid, and whether they have the names that clients get. Refuses to verify chains, and to open connections.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kproxy.addresses import numeric
from kproxy.checks.findings import Report
from kproxy.errors import Malformed
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.tls.certificates import Certificate, is_for, read, read_pem

SOON_S = 14 * 24 * 3600


def examine_files(cluster: Cluster, report: Report) -> None:
    """Examine every certificate that the settings name: our own, and the CAs."""
    subject = f"cluster {cluster.name}"
    for setting, path in _files(cluster):
        try:
            found = read_pem(path.read_bytes())
        except (OSError, Malformed) as fault:
            text = getattr(fault, "strerror", None) or str(fault)
            report.error("tls", f"{subject}: {setting} {path}", f"cannot be read: {text}", "give a file of PEM")
            continue
        for certificate in found:
            _validity(certificate, f"{subject}: {setting} {path}", report)
    if cluster.tls is not None:
        _names(cluster, subject, report)


def examine_shown(der: bytes, subject: str, report: Report) -> None:
    """Examine the certificate that a broker has presented."""
    try:
        _validity(read(der), subject, report)
    except Malformed as fault:
        report.warn(
            "tls", subject, f"its certificate cannot be read: {fault}", "please report it, with the certificate"
        )


def _files(cluster: Cluster) -> Iterator[tuple[str, Path]]:
    if cluster.tls is not None:
        for number, pair in enumerate((cluster.tls, *cluster.tls.certificates)):
            yield ("tls.certificate" if number == 0 else f"tls.certificates[{number - 1}]"), pair.certificate
        if cluster.tls.ca is not None:
            yield "tls.ca", cluster.tls.ca
    if cluster.upstream_tls is not None:
        for setting, path in (("certificate", cluster.upstream_tls.certificate), ("ca", cluster.upstream_tls.ca)):
            if path is not None:
                yield f"upstream_tls.{setting}", path


def _validity(certificate: Certificate, subject: str, report: Report) -> None:
    left_s = certificate.not_after - time.time()
    whose = f"the certificate of {certificate.subject or 'no subject'}"
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(certificate.not_after))
    if left_s <= 0:
        report.error("tls", subject, f"{whose} expired at {until}", "renew it; is the clock of this host right?")
    elif left_s < SOON_S:
        found = f"{whose} expires at {until}, in {left_s / 86400:.1f} days"
        report.warn("tls", subject, found, "renew it: kproxy takes a changed file without a restart")
    else:
        report.ok("tls", subject, f"{whose} is valid until {until}")


def _names(cluster: Cluster, subject: str, report: Report) -> None:
    """Check that one of our certificates is for each name that clients get."""
    assert cluster.tls is not None
    held: list[Certificate] = []
    for pair in (cluster.tls, *cluster.tls.certificates):
        try:
            held += read_pem(pair.certificate.read_bytes())[:1]
        except (OSError, Malformed):
            return  # reported for the file
    advertised = [
        cluster.advertised.rpartition(":")[0].strip("[]").format(id=0, host="{host}", port=0),
        *cluster.sni_bootstrap,
    ]
    for name in dict.fromkeys(advertised):
        name = str(numeric(name) or name)  # in the notation of certificates
        if "{" in name or any(is_for(certificate, name) for certificate in held):
            continue
        found = f"no certificate is for {name}, which clients are told; there are: {_listed(held)}"
        fix = "clients that verify host names refuse it: get a certificate with that name, or another advertise"
        report.error("tls", f"{subject}: tls", found, fix)


def _listed(certificates: Iterable[Certificate]) -> str:
    names = [name for certificate in certificates for name in certificate.names]
    return ", ".join(names[:8]) or "none with a name"
