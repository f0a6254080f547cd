"""Kafka's own examples of `ssl.principal.mapping.rules`, from its tests and its documentation."""

import pytest

from kproxy.proxy.tls.principals import MAX_SUBJECT, PrincipalRules

DUKE = "CN=Duke,OU=ServiceUsers,O=Org,C=US"


@pytest.mark.parametrize(
    ("rules", "subject", "principal"),
    [
        ("DEFAULT", DUKE, DUKE),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/,DEFAULT", DUKE, "Duke"),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L , DEFAULT", DUKE, "duke"),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/U", DUKE, "DUKE"),
        (
            r"RULE:^CN=(.*?), *OU=(.*?), *O=(.*?), *L=(.*?), *ST=(.*?), *C=(.*?)$/$1@$2/L",
            "CN=Duke,OU=JavaSoft,O=Sun Microsystems,L=L,ST=S,C=US",
            "duke@javasoft",
        ),
        ("RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/L,DEFAULT", "OU=x,cn=Some.Body", "some.body"),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/,RULE:^CN=(.*?),OU=Admin.*$/$1@admin/", "CN=a,OU=Admins,O=o", "a@admin"),
        ("RULE:^CN=(.*?),.*$/$1@$2/", "CN=a,O=b", "a@$2"),  # a group that is not there stays as it is
        (r"RULE:^CN=(.*?),.*$/host\/$1/", "CN=a,O=b", "host/a"),
        ("RULE:^CN=(.*?),OU=Nobody$/$1/", DUKE, None),
    ],
)
def test_rules(rules, subject, principal):
    assert PrincipalRules(rules).principal(subject) == (None if principal is None else f"User:{principal}")


@pytest.mark.parametrize(
    "rules", ["", "default", "RULE:^CN=(.*?)$", "RULE:^CN=(/$1/", "DEFAULT;DEFAULT", "RULE:a/b/L,x"]
)
def test_an_invalid_rule_is_refused(rules):
    with pytest.raises(ValueError):
        PrincipalRules(rules)


def test_a_subject_is_tried_once_and_not_at_all_where_it_is_too_long(monkeypatch):
    """Kafka's example of six groups takes the fifth power of a subject's length if it does not match."""
    rules = PrincipalRules(r"RULE:^CN=(.*?), *OU=(.*?), *O=(.*?), *L=(.*?), *ST=(.*?), *C=(.*?)$/$1@$2/L,DEFAULT")
    tried = []
    monkeypatch.setattr(rules, "_rules", [lambda subject: tried.append(subject) or subject])
    assert [rules.principal(DUKE) for _ in range(3)] == [f"User:{DUKE}"] * 3 and tried == [DUKE]
    assert rules.principal("CN=" + r"\,OU=\,O=\,L=\,ST=" * 1000) is None and tried == [DUKE]
    assert rules.principal("o" * MAX_SUBJECT) is not None
