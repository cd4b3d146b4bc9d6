"""Removal of secrets from values before they are stored or shown; the result is plain JSON.

A secret is recognised in three ways. By its **name**, however it is spelt and nested (``hub_token``, ``accessToken``,
``--api-key X`` in a command line, ``password='x'`` in an object's text). By its **shape**, in any text: known prefixes
(``hf_``, ``ghp_``, ``AKIA`` ...), the parts of an address besides its host, private keys, random letters. And by its
**value**: environment variables of this process whose names mark a secret, and the addresses and secrets of its alert
channels.

The table of prefixes follows the documentation of the services, and the rules of gitleaks and detect-secrets. Neither
tool is used here: this code runs in a trainer, which needs only numpy, and both tools look for keys in source code,
where ``max_tokens`` is rare and a commit's hash suspicious. Prompts and completions are data and are not changed.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

from rlwatch.error_boundary import call_or
from rlwatch.errors import ConfigError
from rlwatch.patterns import lazy_pattern
from rlwatch.records import JSON
from rlwatch.redaction.names import (
    HIDDEN,
    Suspicion,
    hides,
    hides_number,
    is_a_word,
    is_hash,
    kind_of,
    names_a_secret,
    opened_by_keys,
    option_of,
    suspicion,
    without_logins,
    words_of,
)

MAX_TEXT = 2000
"""Largest number of characters of a text that are kept."""
MOST_VALUES = 20_000
DEEPEST = 40
MOST_TAGS = 1000
MOST_IN_ARRAY = 1000
MOST_WORDS = 30
"""Number of words of a command given as a list that are searched for a program's option."""
MOST_BITS = 1024
"""Largest number of bits of a whole number; a longer one is no setting, and json refuses to write it."""
_SHORTEST = 4
"""Number of characters below which a fragment of an address is a common word, not a secret."""


def _set_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IN_QUERY = _set_of("sig signature key code sign")

# --- by shape --------------------------------------------------------------------------------------------------------

_BEGINNINGS = (
    r"hf_[A-Za-z0-9]{20,}",  # Hugging Face
    r"api_org_[A-Za-z0-9]{20,}",
    r"gh[pousr]_[A-Za-z0-9]{20,}",  # GitHub
    r"github_pat_\w{20,}",
    r"gl(?:pat|dt|ptt|rt|ft|soat|cbt|imt|agent)-[\w-]{16,}",  # GitLab
    r"sk-[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic, DeepSeek, OpenRouter, DashScope
    r"(?:xox[a-z]|xapp)-[\w.-]{10,}",  # Slack
    r"(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}",  # AWS
    r"AIza[\w-]{30,}",  # Google
    r"ya29\.[\w-]{20,}",
    r"GOCSPX-[\w-]{20,}",
    r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?",  # JSON web token
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[\w-]{30,}",
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    r"whsec_[A-Za-z0-9+/=]{16,}",
    r"SG\.[\w-]{16,}\.[\w-]{16,}",  # SendGrid
    r"do[opr]_v1_[0-9a-f]{32,}",  # DigitalOcean
    r"r8_[A-Za-z0-9]{30,}",  # Replicate
    r"gsk_[A-Za-z0-9]{20,}",  # Groq
    r"nvapi-[\w-]{20,}",  # NVIDIA
    r"xai-[A-Za-z0-9]{20,}",
    r"pplx-[A-Za-z0-9]{20,}",  # Perplexity
    r"tgp_v1_[\w-]{20,}",  # Together
    r"wandb_v\d_\w{20,}",
    r"dckr_pat_[\w-]{16,}",
    r"dapi[0-9a-f]{32}(?:-\d)?",  # Databricks
    r"hv[sbr]\.[\w-]{20,}",  # Vault
    r"LTAI[A-Za-z0-9]{12,}",  # Alibaba
    r"AKID[A-Za-z0-9]{28,}",  # Tencent
    r"lin_api_[A-Za-z0-9]{20,}",
    r"shp(?:at|ca|pa|ss)_[0-9a-f]{32}",  # Shopify
    r"key-[0-9a-f]{32}",  # Mailgun
    r"[0-9a-f]{32}-us\d{1,2}",  # Mailchimp
    r"\d{8,10}:AA[\w-]{32,}",  # Telegram
    r"[MNO][A-Za-z\d_-]{23,27}\.[\w-]{6}\.[\w-]{27,}",  # Discord
    r"AGE-SECRET-KEY-1[A-Z0-9]{40,}",
    r"tskey-[a-z]+-[\w-]{16,}",  # Tailscale
)
_KNOWN = lazy_pattern(rf"(?<![A-Za-z0-9])(?:{'|'.join(_BEGINNINGS)})")
_PRIVATE_KEY = lazy_pattern(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.DOTALL
)
_USER = lazy_pattern(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,30})://([^\s/?#'\"<>]+)@(?=[^\s@])")
_USER_WITH_SLASH = lazy_pattern(r"(?<=://)[^\s/:@'\"]{0,200}:(?!\d+/)[^\s@'\"]{1,200}@(?=[\w.\-\[])")
_QUERY = lazy_pattern(r"(?<=[?&;])([\w.%-]{1,80})=([^&\s#'\"<>]+)")
_ADDRESS = lazy_pattern(r"https?://[^\s'\"<>]+")
_HOOK = lazy_pattern(r"(?:^|[^A-Za-z0-9])(?:web)?hooks?(?![A-Za-z0-9])|//api\.telegram\.org/", re.IGNORECASE)
_HEADER = lazy_pattern(
    r"\b((?:proxy-)?authorization|(?:set-)?cookie)(['\"]?\s*[:=]\s*)(?:['\"][^'\"\n]*['\"]?|[^'\"\n]+)", re.IGNORECASE
)
_SCHEME = lazy_pattern(r"\b(Bearer)\s+(?=\S*[\d._~+/=-])[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_ASSIGNMENT = lazy_pattern(r"(?<![\w.\-])(-{0,2})([A-Za-z_][\w.\-]{0,80})(['\"]?\s*(?:=>|[=:])\s*|\s+(?!-))(?=\S)")
_ELEMENT = lazy_pattern(r"<([A-Za-z][\w.-]{0,60})>([^<>]+)<(?=/)")
_VALUE = lazy_pattern(
    r"\[redacted\]|\{[^{}\s'\"][^{}\n'\"]*\}|'(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?|[^\s,;&'\")\]}]+"
)
_WORTH_A_LOOK = lazy_pattern(r"[A-Za-z0-9+/_=-]{20,}")
_COMMON_PAIRS = _set_of(
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi "
    "ri ro ic ne ea ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec pr no ct us ac ot il tr ly nc "
    "et ut ss so rs un lo wa ge ie wh ee wi em ad ol rt po we na ul ni ts mo ow pa im mi ai sh ir su id os iv "
    "ia am fi ci vi pl ig tu ev ld ry mp fe bl ab gh ty op sa ay ex"
)


def redacted(text: str, *, most: int = 5 * MAX_TEXT) -> str:
    """Return ``text`` with every secret replaced by ``[redacted]``, cut at ``most`` characters.

    >>> redacted("GET https://ann:s3cret@h/x?sig=ab12&n=1 failed, HF_TOKEN=abc --lr 1e-6")
    'GET https://[redacted]@h/x?sig=[redacted]&n=1 failed, HF_TOKEN=[redacted] --lr 1e-6'
    """
    return _without_secrets(text, most, own_secrets())


_clean: set[str] = set()
_MOST_CLEAN = 100_000


def clean_names(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping ``named`` with secrets in its keys removed; the same object if it is a dict without any.

    >>> clean_names({"loss": 1.0, "http://ann:s3cret@h/loss": 2.0})
    {'loss': 1.0, 'http://[redacted]@h/loss': 2.0}
    """
    if type(named) is dict and _clean.issuperset(named):  # the fast path for each row of a training
        return named
    return {clean_name(name) if type(name) is str else name: value for name, value in named.items()}


def clean_name(name: str) -> str:
    """Return the name of a metric or an event without secrets; random letters remain, as they may be
    the id of a task.
    """
    if name in _clean:
        return name
    kept = _without_secrets(name, max(5 * MAX_TEXT, len(name)), own_secrets(), drawn=False)
    if kept == name and len(_clean) < _MOST_CLEAN:
        _clean.add(name)
    return kept


def _without_secrets(text: str, most: int, known: Sequence[str], *, drawn: bool = True) -> str:
    text = text[: most + MAX_TEXT // 4]  # a secret that the cut goes through is still recognised
    for secret in known:
        text = text.replace(secret, HIDDEN)
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    if "://" in text:
        text = _ADDRESS.sub(lambda found: redact_url(found[0]) if _HOOK.search(found[0]) else found[0], text)
        text = _USER_WITH_SLASH.sub(f"{HIDDEN}@", _USER.sub(_without_user, text))
    text = _QUERY.sub(_without_query, text)
    text = without_logins(_ELEMENT.sub(_without_content, text))
    text = _SCHEME.sub(rf"\1 {HIDDEN}", _HEADER.sub(rf"\1\2{HIDDEN}", text))
    text = _KNOWN.sub(HIDDEN, text)
    text = _without_assigned(text)
    if drawn:
        text = _WORTH_A_LOOK.sub(lambda found: HIDDEN if is_random(found[0]) else found[0], text)
    return text[:most]


def _without_user(found: re.Match[str]) -> str:
    """Hide the user part of an address; a user name alone is no secret, except in http (``https://TOKEN@host``)."""
    only_a_name = ":" not in found[2] and found[1].lower() not in ("http", "https")
    return found[0] if only_a_name or found[2] == HIDDEN else f"{found[1]}://{HIDDEN}@"


def _qualified(owner: str, name: str) -> str:
    """Return a lone ``key``, ``pass`` or ``token`` with its owner (``wandb.key``) if that is more suspicious."""
    whole = f"{owner}.{name}"
    more = suspicion(whole) > suspicion(name) or (suspicion(whole) is Suspicion.SURE and is_a_word(name))
    return whole if owner and len(words_of(name)) == 1 and more else name


def _without_content(found: re.Match[str]) -> str:
    return f"<{found[1]}>{HIDDEN}<" if names_a_secret(found[1]) else found[0]


def _without_query(found: re.Match[str]) -> str:
    last = found[1].lower().rsplit("-", 1)[-1]
    secret = last in _IN_QUERY or last == "credential" or names_a_secret(found[1])
    return f"{found[1]}={HIDDEN}" if secret else found[0]


def _without_assigned(text: str) -> str:
    """Hide values assigned to names of secrets: ``KEY=x``, ``key: 'x'``, ``--key x``. Values may assign again."""
    parts, at = [], 0
    while found := _ASSIGNMENT.search(text, at):
        flag, name, sign = found.groups()
        how = suspicion(name) if flag or sign.strip() else Suspicion.NOTHING
        value = _VALUE.match(text, found.end()) if how is not Suspicion.NOTHING else None
        if value is None or not _is_assigned(name, sign, value[0], how):
            parts.append(text[at : found.end()])
            at = found.end()
            continue
        parts.append(text[at : found.end()] + HIDDEN)
        at = value.end()
    return "".join([*parts, text[at:]])


_PATTERN = lazy_pattern(r"[(\[^.\\][^'\"]*[\\*+?|\]^].*|[\[(^\\].*")
"""Texts that are regular expressions."""


def _is_assigned(name: str, sign: str, value: str, how: Suspicion) -> bool:
    """True if a secret is assigned, not words after ``each token:``, a pattern, or ``end_token=</s>``."""
    quoted, value = value[:1] in "'\"", value.strip("'\" ")
    prose = not quoted and sign.strip() == ":" and is_a_word(name) and not _HAS_DIGIT(value)
    return not prose and not _PATTERN.fullmatch(value) and hides(name, value, how)


_HAS_DIGIT = re.compile(r"\d").search


_LABELS = _set_of(
    "name id ids uuid job run exp experiment trial sweep commit revision sha hash digest checksum etag fingerprint tag "
    "image path dir directory file model checkpoint ckpt adapter dataset version regex pattern template"
)


def _is_a_label(name: str) -> bool:
    """True for names of identifiers and paths, whose values may look random without being secret."""
    return words_of(name)[-1] in _LABELS


_MOMENT = lazy_pattern(
    r"(?:20\d{2}[-_]?[01]\d[-_]?[0-3]\d|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[0-3]\d)"
    r"(?:[T_-]?[0-2]\d[-_h:]?[0-5]\d(?:[-_m:]?[0-5]\ds?)?Z?)?"
)


def is_random(text: str) -> bool:
    """Return whether ``text`` looks like random letters, as a key does; hashes and names do not.

    In random text of 20 or more digits, small and capital letters, the kind changes between 0.6 of all neighbours (0.3
    in names), and 0.2 of neighbouring letters are pairs common in English (0.6 in names).

    >>> is_random("f8Kq2ZtV1rX7bLw9Dq-Qm3Ns"), is_random("Qwen2ForCausalLMWithValueHead-lr1e6-bs512")
    (True, False)
    """
    pieces = re.findall(r"[A-Za-z0-9]+", _MOMENT.sub("-", text))
    letters = "".join(pieces)
    if len(letters) < 20 or len({kind_of(letter) for letter in letters}) < 3 or is_hash(text):
        return False
    if max(map(len, pieces)) < 12:
        return False  # a name of many parts
    pairs = [pair for piece in pieces for pair in pairwise(piece)]
    changes = sum(kind_of(one) != kind_of(other) for one, other in pairs) / len(pairs)
    common = [(one + other).lower() in _COMMON_PAIRS for one, other in pairs if (one + other).isalpha()]
    return changes >= 0.36 and sum(common) <= 0.42 * len(common)


def redact_url(url: str) -> str:
    """Return only scheme, host and port of an address: the path of a webhook's address is its password (Slack,
    Discord, Teams).

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


# --- by value --------------------------------------------------------------------------------------------------------

_own: set[str] = set()
_environment: tuple[float, tuple[str, ...]] = (-math.inf, ())
LOOKED_S = 1.0
"""Seconds between two scans of the environment for secrets."""


def remember(secret: str) -> None:
    """Recognise ``secret``, an address or a key that this process uses, in any text from now on."""
    _own.update(_recognisable(secret))


def own_secrets() -> tuple[str, ...]:
    """Return the secrets in this process's environment and of its alert channels, the longest first."""
    global _environment
    if time.monotonic() >= _environment[0]:
        with suppress(KeyError, RuntimeError):  # another thread changes it at this moment
            found = tuple({form for pair in os.environ.items() for form in _of_variable(*pair)})
            _environment = (time.monotonic() + LOOKED_S, found)
    return tuple(sorted({*_environment[1], *_own}, key=len, reverse=True))


def _look_again() -> None:
    global _environment
    _environment = (-math.inf, _environment[1])


def _of_variable(name: str, value: str) -> Iterator[str]:
    if not value.startswith(("/", "~", ".")) and hides(name, value, suspicion(name)):
        yield from _recognisable(value)
    elif "://" in value and "@" in value:  # a proxy's, say
        try:
            yield from _recognisable(urlsplit(value).password or "")
        except ValueError:
            return


def _recognisable(secret: str) -> Iterator[str]:
    """Yield the forms of a secret to search for: itself, and the secret parts of an address; no short or plain word."""
    forms = {secret, unquote(secret)}
    if "://" in secret:
        forms |= {part for part in _parts(secret) if len(part) >= 12 or any(map(str.isdigit, part))}
    for form in forms:
        plain_word = form.isalpha() and (form.islower() or form.istitle()) and len(form) < 16
        if len(form) >= 8 and not plain_word and form != "://":
            yield form


class Redactor:
    """Hides given secrets, and every secret part of given addresses, in text.

    Parameters
    ----------
    urls
        Addresses, of which only scheme and host are shown.
    secrets
        Secrets.

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
        """Return ``text`` with the secrets hidden."""
        for secret, shown in self._replacements:
            text = text.replace(secret, shown)
        return text

    def error(self, error: BaseException) -> str:
        """Return the type and the message of an exception as text, with the secrets hidden."""
        message = str(error).strip()
        return self.text(f"{type(error).__name__}: {message}" if message else type(error).__name__)

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


# --- values of any kind ----------------------------------------------------------------------------------------------


def recordable(config: object) -> dict[str, JSON]:
    """Return a training configuration as it may be stored: plain JSON without secrets.

    Parameters
    ----------
    config
        A mapping, namespace, dataclass or OmegaConf container, arbitrarily nested; None is an empty one.

    Returns
    -------
    dict
        Values that JSON cannot express become their ``repr``, cut at 2000 characters. A value that contains itself, is
        nested 40 deep, comes after 20,000 others or raises is replaced by a description in angle brackets.

    Raises
    ------
    ConfigError
        If ``config`` has no names and values.

    Examples
    --------
    >>> recordable({"lr": 1e-6, "hub_token": "hf_x"})
    {'lr': 1e-06, 'hub_token': '[redacted]'}
    """
    if config is None:
        return {}
    as_dict = next((name for name in ("to_dict", "model_dump") if callable(getattr(type(config), name, None))), "")
    if as_dict and not _is_named(config):
        config = _converted(config, as_dict)
    if not _is_named(config):
        raise ConfigError(
            "config must have names and values (a dict, a dataclass, a namespace, OmegaConf), got "
            f"{type(config).__name__}; give for example vars(args)"
        )
    _look_again()
    kept = _Plain().value("", config)
    return kept if isinstance(kept, dict) else {"config": kept}


def _converted(config: object, method: str) -> object:
    """Return ``config.to_dict()``, as configs of transformers, ml_collections and pydantic are no mappings."""

    def refused(error: Exception) -> object:
        raise ConfigError(
            f"config cannot be read: {method}() of {type(config).__name__} raised {type(error).__name__}; give a dict"
        ) from None

    return call_or(lambda: getattr(config, method)(), refused)  # noqa: PLW0108  (asking for the method may raise)


def plain(body: Mapping[str, object]) -> dict[str, JSON]:
    """Return the body of a user's event as it may be stored: plain JSON without secrets.

    Like :func:`recordable`, but with texts of up to 10,000 characters.
    """
    kept = _Plain(most=5 * MAX_TEXT).value("", body)
    return kept if isinstance(kept, dict) else {}


class _Unread:
    """Placeholder for a value that raised when it was read."""

    def __init__(self, error: Exception) -> None:
        self.kind = type(error).__name__


class _Plain:
    """Conversion of a user's values to JSON. Their exceptions are suppressed, other than ``BaseException``."""

    def __init__(self, most: int = MAX_TEXT) -> None:
        self._most = most
        self._left = MOST_VALUES
        self._within: list[int] = []
        self._known = own_secrets()

    def value(self, name: str, value: object, *, secret: Suspicion = Suspicion.NOTHING) -> JSON:
        """Return the JSON of ``value`` under ``name``; ``secret`` is the suspicion inherited from its container."""
        self._left -= 1
        secret = max(secret, suspicion(name))
        return call_or(
            lambda: self._any(name, value, secret=secret),
            lambda error: f"<{type(value).__name__}, which cannot be read: {type(error).__name__}>",
        )

    def _any(self, name: str, value: object, *, secret: Suspicion) -> JSON:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return self._number(name, value, secret=secret)
        if isinstance(value, str):
            return self._text(name, str.__str__(value), secret=secret)
        if isinstance(value, Enum):
            return self.value(name, value.value, secret=secret)
        named = _is_named(value)
        items = None if named else _items(value)
        if not named and items is None:
            return self._other(name, value, secret=secret)
        if id(value) in self._within:
            return f"<{type(value).__name__} that contains itself>"
        if len(self._within) >= DEEPEST:
            return f"<{type(value).__name__}, nested too deeply>"
        self._within.append(id(value))
        try:
            return (
                self._mapping(name, value, secret=secret) if items is None else self._list(name, items, secret=secret)
            )
        finally:
            self._within.pop()

    def _other(self, name: str, value: object, *, secret: Suspicion) -> JSON:
        scalar = _scalar(value)
        if scalar is not None:
            return self._any(name, scalar, secret=secret)
        if callable(getattr(type(value), "tolist", None)):
            return self._array(name, value, secret=secret)
        shown = bytes(value[: 2 * self._most]) if isinstance(value, bytes | bytearray) else value
        return self._text(name, repr(shown), secret=secret)

    def _array(self, name: str, value: Any, *, secret: Suspicion) -> JSON:
        """Return a small array of numpy or torch as a list, a large one as its shape; never wait for a device."""
        if not getattr(value, "is_cpu", True):
            return f"<{type(value).__name__} of shape {tuple(value.shape)} on {value.device}>"
        if math.prod(value.shape) <= MOST_IN_ARRAY:
            return self.value(name, value.tolist(), secret=secret)
        return f"<{type(value).__name__} of shape {tuple(value.shape)}>"

    def _number(self, name: str, value: int | float, *, secret: Suspicion) -> JSON:
        """Return a number for JSON, or a placeholder for a numeric password."""
        if isinstance(value, int) and hides_number(name, secret):
            return HIDDEN
        if isinstance(value, int) and int.bit_length(value) > MOST_BITS:
            return f"<a whole number of {int.bit_length(value)} bits>"
        return float.__float__(value) if isinstance(value, float) else int.__int__(value)

    def _text(self, name: str, text: str, *, secret: Suspicion) -> str:
        text = text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
        if not hides(name, text, secret):
            return _without_secrets(text, self._most, self._known, drawn=not _is_a_label(name))
        return redact_url(text) if "://" in text and "hook" in name.lower() else HIDDEN

    def _mapping(self, owner: str, value: object, *, secret: Suspicion) -> dict[str, JSON]:
        kept: dict[str, JSON] = {}
        named = ""
        entries = list(islice(_entries(value), MOST_VALUES + 1))
        opened = opened_by_keys(_name(key) for key, _ in entries)
        for key, get in entries:
            if self._left <= 0:
                kept["..."] = f"<more than {MOST_VALUES} values>"
                break
            name = self._text("", _name(key), secret=Suspicion.NOTHING)
            held = call_or(get, _Unread)  # OmegaConf's ??? raises
            if type(held) is _Unread:  # a value may lie about its class, or raise
                kept[name] = f"<cannot be read: {held.kind}>"
                continue
            if name.lower() in ("name", "key") and isinstance(held, str):
                named = held  # {"name": "HF_TOKEN", "value": ...}, as Kubernetes and Ray write it
            within = max(secret, suspicion(named)) if name.lower() == "value" else secret
            within = Suspicion.SURE if name in opened else within
            kept[name] = self.value(_qualified(owner, name), held, secret=within)
        return kept

    def _list(self, name: str, items: Iterable[object], *, secret: Suspicion) -> list[JSON]:
        kept: list[JSON] = []
        before, argv = "", list[str]()
        for item in items:
            if self._left <= 0:
                kept.append(f"<more than {MOST_VALUES} values>")
                break
            # an option and its value, or a name and its value
            flag = before.startswith("-") and isinstance(item, str) and not item.startswith("-")
            pair = len(kept) == 1 and before and (suspicion(before) is Suspicion.MAYBE or not is_a_word(before))
            owner = before.lstrip("-") if flag or pair else ""
            shown = option_of(argv, item) if isinstance(item, str) and len(argv) < MOST_WORDS else None
            kept.append(
                shown or self.value(owner if suspicion(owner) is not Suspicion.NOTHING else name, item, secret=secret)
            )
            before = item if isinstance(item, str) and len(item) <= 100 and "=" not in item else ""
            argv = [*argv, item] if isinstance(item, str) and len(item) <= 100 else []
        return kept


def _is_named(value: object) -> bool:
    """True if the type of ``value`` has names and values; the object itself may lie, or raise."""
    kind = type(value)
    return issubclass(kind, (Mapping, *_namespaces())) or (is_dataclass(kind) and not issubclass(kind, type))


def _namespaces() -> tuple[type, ...]:
    """Return the namespace types, argparse's only if it is imported already: importing it would slow the start."""
    argparse = sys.modules.get("argparse")
    return (SimpleNamespace,) if argparse is None else (SimpleNamespace, argparse.Namespace)


def _entries(value: Any) -> Iterator[tuple[object, Callable[[], object]]]:
    """Yield names, and functions that return their values: each may raise on its own (OmegaConf's ``???``)."""
    if isinstance(value, dict):
        yield from ((key, partial(dict.__getitem__, value, key)) for key in dict.keys(value))
    elif isinstance(value, Mapping):
        yield from ((key, partial(_item, value, key)) for key in islice(iter(value), MOST_VALUES + 1))
    elif isinstance(value, _namespaces()):
        held = object.__getattribute__(value, "__dict__")
        yield from ((key, partial(dict.__getitem__, held, key)) for key in list(held))
    else:
        yield from ((one.name, partial(getattr, value, one.name)) for one in fields(value))


def _item(mapping: Mapping[Any, object], key: object) -> object:
    return mapping[key]


def _items(value: object) -> Iterable[object] | None:
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, Sequence) and not isinstance(value, memoryview | range | bytes | bytearray):
        return islice(iter(value), MOST_VALUES + 1)
    return None


def _scalar(value: object) -> int | float | None:
    """Return a number of numpy as Python's; None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        found = value.item()
        return found if isinstance(found, int | float) else None
    return None


def _name(key: object) -> str:
    return call_or(lambda: str.__str__(key) if isinstance(key, str) else str(key), lambda _: f"<{type(key).__name__}>")


def tags_of(tags: object) -> tuple[str, ...]:
    """Return a run's tags as they may be stored, without secrets: None gives none, a single text gives one tag.

    Raises
    ------
    ConfigError
        If ``tags`` is no list of texts.
    """
    if tags is None:
        return ()
    kind = type(tags)
    given: Any = (tags,) if issubclass(kind, str) else tags
    if not issubclass(kind, Iterable) or issubclass(kind, Mapping | bytes):
        raise ConfigError(f"tags must be a list of texts, as in tags=['math', '7b'], got {kind.__name__}")

    def refused(error: Exception) -> list[Any]:
        raise ConfigError(
            f"tags must be a list of texts, as in tags=['math', '7b']; {kind.__name__} raised {type(error).__name__}"
        ) from None

    found = call_or(lambda: list(islice(given, MOST_TAGS)), refused)
    wrong = next((type(tag) for tag in found if not issubclass(type(tag), str | int | float)), None)
    if wrong is not None:
        raise ConfigError(f"tags must be a list of texts, as in tags=['math', '7b']; one is a {wrong.__name__}")
    return tuple(redacted(str(tag), most=MAX_TEXT // 4) for tag in found)
