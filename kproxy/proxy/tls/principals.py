"""Maps a client certificate's subject to its principal, by the rules of Kafka's `ssl.principal.mapping.rules`.

Rules are separated by commas and tried in order: DEFAULT takes the subject unchanged, RULE:PATTERN/REPLACEMENT/ takes
subjects that PATTERN matches completely, and a final /L or /U makes the result lower or upper case. A subject that no
rule takes has no principal. The pattern of Kafka's own example takes time by the fifth power of a subject's length, so
anyone who can get a certificate signed could stop the event loop: hence MAX_SUBJECT characters per subject, and a cache
of REMEMBERED results. Refuses to know certificates.
"""

import re
from collections.abc import Callable
from functools import lru_cache

MAX_SUBJECT = 768  # characters; most parts of a name have at most 64 (X.520)
REMEMBERED = 256

# Kafka's syntax (SslPrincipalMapper): a slash in a pattern or a replacement is escaped.
_RULE = re.compile(r"\s*(?:(DEFAULT)|RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?))\s*(?:,\s*|$)")
_GROUP = re.compile(r"\\(.)|\$(\d)", re.DOTALL)

Rule = Callable[[str], str | None]


class PrincipalRules:
    """Parsed rules. Raises ValueError for an invalid rule, with its text."""

    def __init__(self, text: str) -> None:
        self._rules: list[Rule] = []
        at = 0
        while at < len(text.rstrip()):
            match = _RULE.match(text, at)
            if match is None:
                raise ValueError(f"{text[at : at + 60]!r} is neither DEFAULT nor RULE:PATTERN/REPLACEMENT/[LU]")
            default, pattern, replacement, case = match.groups()
            self._rules.append(_itself if default else _rule(pattern, replacement, case))
            at = match.end()
        if not self._rules:
            raise ValueError("no rule")
        self._remembered = lru_cache(REMEMBERED)(self._principal)

    def principal(self, subject: str) -> str | None:
        """Return "User:" and the result of the first rule that takes the subject; None: none does, or it is long."""
        return self._remembered(subject) if len(subject) <= MAX_SUBJECT else None

    def _principal(self, subject: str) -> str | None:
        for rule in self._rules:
            name = rule(subject)
            if name is not None:
                return f"User:{name}"
        return None


def _itself(subject: str) -> str:
    return subject


def _rule(pattern: str, replacement: str, case: str) -> Rule:
    try:
        compiled = re.compile(pattern)
    except re.error as fault:
        raise ValueError(f"{pattern!r} is no regular expression: {fault}") from None

    def filled(match: re.Match[str]) -> str:
        def one(found: re.Match[str]) -> str:
            if found[1] is not None:
                return found[1]
            number = int(found[2])
            return (match[number] or "") if number <= compiled.groups else found[0]

        return _GROUP.sub(one, replacement)

    def rule(subject: str) -> str | None:
        if compiled.fullmatch(subject) is None:
            return None
        name = compiled.sub(filled, subject)
        return name.lower() if case == "L" else name.upper() if case == "U" else name

    return rule
