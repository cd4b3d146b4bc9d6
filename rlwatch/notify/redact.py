"""Keeping addresses and secrets out of what people and files get to see.

The path of a webhook address is its password (Slack, Discord, Teams), so a whole address is a secret except
for its scheme and host.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

HIDDEN = "[redacted]"
_SHORTEST = 4
"""Shorter fragments of an address are words everybody uses, not secrets."""


def redact_url(url: str) -> str:
    """Scheme and host only.

    >>> redact_url("https://user:pw@hooks.example.com:8443/services/T0/B1/abc?key=1")
    'https://hooks.example.com:8443/[redacted]'
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return HIDDEN
    if not host:
        return HIDDEN
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{f':{port}' if port else ''}/{HIDDEN}"


class Redactor:
    """Blacks out the given secrets, and every secret part of the given addresses, in text.

    >>> Redactor(urls=["https://h/T0K3N"], secrets=["hush!"]).text("no hush! at /T0K3N, https://h/T0K3N")
    'no [redacted] at /[redacted], https://h/[redacted]'
    """

    def __init__(self, *, urls: Iterable[str] = (), secrets: Iterable[str] = ()) -> None:
        whole = [url for url in urls if url]
        found = {secret for secret in secrets if secret}
        for url in whole:
            found |= {part for part in _parts(url) if len(part) >= _SHORTEST}
        self._replacements = [(url, redact_url(url)) for url in whole]
        self._replacements += [(part, HIDDEN) for part in sorted(found, key=len, reverse=True)]

    def text(self, text: str) -> str:
        """``text`` without them."""
        for secret, shown in self._replacements:
            text = text.replace(secret, shown)
        return text

    def error(self, error: BaseException) -> str:
        """An exception as type and message, without them."""
        words = str(error).strip()
        return self.text(f"{type(error).__name__}: {words}" if words else type(error).__name__)

    def __repr__(self) -> str:
        return f"Redactor({len(self._replacements)} secrets)"


def _parts(url: str) -> set[str]:
    try:
        split = urlsplit(url)
    except ValueError:
        return {url}
    pieces = [split.username or "", split.password or "", split.path.strip("/"), split.query, split.fragment]
    pieces += split.path.split("/")
    pieces += [value for pair in split.query.split("&") for value in pair.split("=")[1:]]
    return {form for piece in pieces if piece for form in (piece, unquote(piece))}
