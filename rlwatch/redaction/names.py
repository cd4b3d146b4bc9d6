"""Recognition of secrets by the name of a value and, if the name is ambiguous, by its shape.

A name is certainly that of a secret (``db_pw``), possibly (``sort_key``), or not. Under a certain name every value is
hidden, except for those that cannot be secret: a flag, the name of a variable, an empty value. Under an ambiguous name
the value decides: ``conversation_id`` is a column, ``k9f8Kq2Zt`` is a key.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise

from rlwatch.patterns import lazy_pattern

HIDDEN = "[redacted]"


class Suspicion(IntEnum):
    """Likelihood that a value is a secret, judged by its name: ``NOTHING`` < ``MAYBE`` < ``SURE``."""

    NOTHING = 0
    MAYBE = 1
    SURE = 2


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = lazy_pattern(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = _words(
    "password passwords passwd passwds pswd psswd passwrd pword passphrase passphrases passcode passcodes passkey "
    "secret secrets scrt credential credentials cred creds apikey apikeys authorization bearer cookie cookies jwt "
    "userpass refreshtoken hubtoken authkey psk sessionid sessid csrf csrftoken xsrf xsrftoken otp totp "
    "mnemonic htpasswd pgpass passwort kennwort motdepasse mdp senha contrasena wachtwoord haslo lozinka"
)
"""Words that mark a secret anywhere in a name, unless its last word is one of ``_ABOUT``."""
_GLUED = lazy_pattern(
    r".*(?:password|passwd|passphrase|apikey|apitoken|authtoken|accesstoken|accesskey|secretkey|privatekey|sessid|sessionid|"
    r"clientsecret|csrftoken)s?"
    r"|(?:db|user|root|admin|smtp|imap|mysql|redis|pg|sql|mongo|ftp|proxy|mail|ldap|ssh|sudo|svc|mqtt|http|rds|wifi|"
    r"login|bind|key|store|keystore|vault|my|app|su)(?:pass|pw|pwd)"
    r"|(?:npm|hf|hub|bot|api|auth|access|refresh|id|github|gitlab|slack)token"
)
"""Names in which two words are written as one (``pgpassword``)."""
_ELSEWHERE = lazy_pattern("密码|密碼|口令|密钥|密鑰|秘钥|パスワード|비밀번호|пароль", re.IGNORECASE)
_KEYS = _words(
    "api access secret private auth ssh signing sign encryption encrypt decryption decrypt cipher crypto aes des rsa "
    "ecdsa fernet tls ssl hmac master shared service account storage subscription app consumer deploy license "
    "licence activation wandb hf huggingface openai anthropic azure aws gcp google gemini deepseek dashscope serper "
    "serpapi tavily jina cohere mistral together groq fireworks openrouter swanlab comet clearml neptune mlflow e2b "
    "daytona modal github gitlab gpg pgp admin client routing integration ingest ingestion write webhook judge grader "
    "verifier llm rm server vllm sglang sandbox vault kms stripe twilio sendgrid mailgun datadog dd sentry pagerduty "
    "opsgenie pushover notion slack bot push functions function host embedding embeddings search scraper telemetry "
    "hub team org backup recovery unseal jwt saml sso oidc idp pki ldap wireguard wg vpn wifi wpa ngrok "
    "cloudflare heroku vercel supabase firebase algolia mapbox qdrant pinecone weaviate elastic minio "
    "runpod replicate novita siliconflow moonshot kimi zhipu minimax volcengine ark hunyuan xai perplexity nvidia ngc "
    "langsmith langfuse helicone scale labelbox brave bing exa firecrawl browserbase exec executor execution "
    "interpreter runner gateway inference cloud bedrock bailian sagemaker broker telegram email mailer sms crawler "
    "retriever reranker rerank cookie symmetric"
)
"""Words before ``key`` and ``keys`` of a service."""
_COLUMNS = _words(
    "cache sort group dedup partition index primary foreign hash etag unique object prompt label image data sample row "
    "video audio file dataset document"
)
"""Words before ``key`` that make it a key of data: its value may be a hash, and need not belong to an address."""
_TOKENS = _words(
    "api access auth hf hub huggingface bearer refresh session secret private personal github gitlab git bot slack "
    "discord telegram deploy ci job upload push npm pypi oauth sas csrf xsrf user id security aws azure gcp wandb "
    "read write admin service account login device registry docker webhook app client x"
)
"""Words before ``token`` and ``tokens`` of a service."""
_TEXT_TOKENS = _words(
    "pad bos eos unk mask sep cls image img video audio vision speech think thinking start end stop begin "
    "special additional extra max min num per first last next new prev step reward response prompt placeholder "
    "delimiter tool system assistant answer answers eot eom eod sot boi eoi by logprob action obs observation "
    "target source draft split decoder encoder forced suppress separator newline padding cutoff fim prefix "
    "suffix middle latent good bad space query yes no true memory register class boundary"
)
"""Words before ``token`` of a vocabulary."""
_LOGINS = _words("basic proxy http https redis rediscli smtp registry docker npm sasl imap")
_PATS = _words("gh github gitlab git ado azure personal user my hub")
_PASSES = _words(
    "forward backward first second third last next prev single multi one two n num number compiler fusion render "
    "optimization per each full test tests must should did high low band fast slow val eval train by"
)
"""Words before ``pass`` that is no password."""
_CODES = _words("recovery backup verification access auth otp unlock security pin invite mfa sms")
_ABOUT = _words(
    "path paths file filename files dir directory env var variable name names type types mode method enabled disabled "
    "scheme url uri host port column columns field format id ids level count counts length len limit size budget "
    "ratio mean sum sock socket expiry expires ttl provider class fn func function backend strategy strength "
    "threshold weight prob rate regex regexp pattern policy policies rule rules algorithm alg algo required "
    "helper manager store source sources ref refs reference scope scopes issuer audience lifetime interval timeout "
    "retries version location bucket samesite domain jar scanning found detected present set given protected hint "
    "dim dropout loss metric template prompt question header_name side tier quota age created updated at label"
)
"""Last words of names whose values describe a secret without being one."""
_FLAGS = _words(
    "n num number no has have is are use uses used using enable disable allow allows require requires show hide with "
    "without skip check max min total count detect scan"
)
"""First words of names whose values are counts or flags."""
_JUST_TEXT = _words("value string str header plain text")
_HOOKS = _words("webhook webhooks url urls uri address endpoint id")
_CALLED = frozenset(
    tuple(name.split("_"))
    for name in _words("url uri endpoint base base_url base_uri api_base api_url api_version user username account")
)
"""Words after the name of a service for its address or account: with ``tool_url``, ``tool_key`` is a secret."""
_OF_A_SERVICE = _CALLED - {("url",), ("uri",), ("base",), ("user",), ("username",), ("account",)}
"""The same for a lone ``key``: data have addresses and users, too."""


@lru_cache(maxsize=4096)
def suspicion(name: str) -> Suspicion:
    """Return the likelihood that values under the name ``name`` are secrets.

    >>> [suspicion(name).name for name in ("hub_token", "judge.pw", "sort_key", "n_passwords", "eos_token_id")]
    ['SURE', 'SURE', 'MAYBE', 'MAYBE', 'NOTHING']
    """
    if _ELSEWHERE.search(name):
        return Suspicion.SURE
    words = words_of(name)
    if "webhook" in words and words[-1] in _HOOKS:
        return Suspicion.SURE
    if words[-1] in _ABOUT:
        return Suspicion.SURE if words[-3:] in (["access", "key", "id"],) else Suspicion.NOTHING
    secret = [word for word in words if word in _ALWAYS or _GLUED.fullmatch(word)]
    found = Suspicion.SURE if secret else _last(words)
    if len(words) > 1 and secret == words[:1] and secret[0].startswith("cookie"):
        found = Suspicion.MAYBE  # ``cookie_banner``
    return min(found, Suspicion.MAYBE) if len(words) > 1 and words[0] in _FLAGS else found


def names_a_secret(name: str) -> bool:
    """Return whether values under ``name`` are certainly secrets, except for flags and references.

    >>> [names_a_secret(name) for name in ("hub_token", "accessToken", "x-api-key", "eos_token_id", "input_key")]
    [True, True, True, False, False]
    """
    return suspicion(name) is Suspicion.SURE


def opened_by_keys(names: Iterable[str]) -> frozenset[str]:
    """Return those of ``names`` that are keys of a service whose address or account is also among ``names``.

    >>> sorted(opened_by_keys(["tool_url", "tool_key", "prompt_key"])), sorted(opened_by_keys(["endpoint", "key"]))
    (['tool_key'], ['key'])
    """
    all_words = {name: tuple(words_of(name)) for name in names}
    there = frozenset(all_words.values())
    return frozenset(
        name
        for name, words in all_words.items()
        if words[-1] in ("key", "keys")
        and (len(words) == 1 or words[-2] not in _COLUMNS)
        and any((*words[:-1], *called) in there for called in (_CALLED if len(words) > 1 else _OF_A_SERVICE))
    )


def words_of(name: str) -> list[str]:
    """Return the words of a name in small letters, without endings such as ``str``; ``pass word``
    counts as one word.
    """
    words = [word.lower() for word in _WORD.findall(name[-200:])] or [""]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _JUST_TEXT):
        words.pop()
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "pass" and word in ("word", "words", "phrase", "code", "key"):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _last(words: list[str]) -> Suspicion:
    """Return the suspicion from the last word of a name and the one before it."""
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("key", "keys"):
        return Suspicion.SURE if before in _KEYS else Suspicion.NOTHING if before == "public" else Suspicion.MAYBE
    if last in ("token", "tokens", "tok", "tkn"):
        if before in _TEXT_TOKENS or words == ["tok"]:
            return Suspicion.NOTHING
        return Suspicion.SURE if before in _TOKENS or words == ["token"] else Suspicion.MAYBE
    if last in ("pass", "pw", "pwd"):
        if last == "pass" and before in _PASSES:
            return Suspicion.NOTHING
        return Suspicion.MAYBE if words in (["pass"], ["pwd"]) else Suspicion.SURE
    if last in ("auth", "oauth", "pat", "sas", "sig", "signature", "salt", "sid"):
        return (
            Suspicion.SURE
            if before in (_PATS if last == "pat" else _LOGINS) and last in ("pat", "auth")
            else Suspicion.MAYBE
        )
    if last in ("code", "codes", "phrase", "phrases"):
        return (
            Suspicion.SURE
            if before in (_CODES if last.startswith("code") else ("seed", "recovery"))
            else Suspicion.NOTHING
        )
    holds = {"tokens", "keys"} & set(words[:-1])
    return Suspicion.MAYBE if holds and words[0] in holds else Suspicion.NOTHING


# --- what the value adds ---------------------------------------------------------------------------------------------

_NOTHING = _words("none null nil true false auto yes no on off enabled disabled default unset n/a")
_SPECIAL = lazy_pattern(r"<[^<>\s]{1,60}>|\[[A-Z_0-9]{1,30}\]|</?\w+>")
_REFERENCE = lazy_pattern(
    r"env:\S*|\$\{?[A-Z_][A-Z0-9_]*\}?|\$\{.*|\{\{.*|%[A-Z_]+%|!(?:vault|secret|env|ref|sub)\b.*|\*+|x{3,}|\.{3}"
    r"|<[a-z _-]+>"
)
"""References to a secret, and placeholders for one."""
_PATH = lazy_pattern(
    r"(?:~/|\.{1,2}/|/(?:etc|home|root|var|opt|mnt|tmp|usr|run|data|work\w*|secrets|srv|Users|nfs)\b)[^\s]*"
)
_A_NUMBER = lazy_pattern(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?%?")
_PART = lazy_pattern(r"[A-Za-z0-9]+")
_ONE_WORD = lazy_pattern(r"[a-z]{2,16}(?:_[a-z]{1,16}){0,2}")
_HASH = lazy_pattern(r"(?:[0-9a-f]{32,128}|[0-9A-F]{32,128}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})")
_PASSWORDS = lazy_pattern(r"pass|pw|pin|code|otp", re.IGNORECASE)


_USED_IN_PROSE = ("token", "tokens", "key", "keys", "auth")


def is_a_word(name: str) -> bool:
    """Return whether a name is also a word of ordinary texts, before a colon or in a list: ``each token: of``."""
    return suspicion(name) is Suspicion.MAYBE or words_of(name)[-1] in _USED_IN_PROSE


def is_hash(text: str) -> bool:
    """Return whether ``text`` is a digest or an id in hexadecimal digits."""
    return bool(_HASH.fullmatch(text))


def hides(name: str, text: str, how: Suspicion) -> bool:
    """Return whether the value ``text`` under ``name`` is a secret, given the suspicion ``how`` that
    the name raises.
    """
    text = text.strip()
    if how is Suspicion.NOTHING or text.lower() in _NOTHING or text == HIDDEN or _REFERENCE.fullmatch(text):
        return False
    words = words_of(name)
    if how is Suspicion.SURE:
        if words[-1] in ("token", "tokens") and (
            _SPECIAL.fullmatch(text) or (len(words) == 1 and _ONE_WORD.fullmatch(text))
        ):
            return False
        if words[-1] in ("auth", "key", "keys") and _PATH.fullmatch(text):
            return False
        return not (_A_NUMBER.fullmatch(text) and len(words) == 1 and words[0] in _USED_IN_PROSE)
    return _maybe_hides(words, text)


def _maybe_hides(words: list[str], text: str) -> bool:
    last = words[-1]
    if last in ("key", "keys") and len(words) > 1 and words[-2] in _COLUMNS and is_hash(text):
        return False
    if last in ("token", "tkn") and _NO_TOKEN_OF_TEXT.fullmatch(text):
        return True
    if (last == "auth" or words == ["key"]) and text and "://" not in text and not _NAMED.fullmatch(text):
        return not any(known.fullmatch(text) for known in (_SPECIAL, _A_NUMBER, _PATH))
    plain = _PATH.match(text) or _A_NUMBER.fullmatch(text)
    return looks_opaque(text) or (words in (["pass"], ["pwd"]) and not plain)


def hides_number(name: str, how: Suspicion) -> bool:
    """Return whether a number under ``name`` is a password or a PIN; other numbers are never secret (``max_tokens``).

    ``how``: the suspicion that the name raises.
    """
    return how is Suspicion.SURE and bool(_PASSWORDS.search(name))


_NO_TOKEN_OF_TEXT = lazy_pattern(r"(?!<|\[)(?:(?=\S*\d)(?=\S*[A-Za-z])[^\s{}]{6,}|[!-~]{9,})")
"""Texts that are no token of a vocabulary: longer, or with digits."""
_NAMED = lazy_pattern(r"[A-Za-z]+(?:[_\-./@ ,]+[A-Za-z0-9]+)*")
_HEX_KEY = lazy_pattern(r"[0-9a-f]{16,}|[0-9A-F]{16,}")
_SPOKEN = lazy_pattern(r"(?:[A-Z]?[a-z]{2,}+|[A-Z]{2,4}+(?![a-z]))++\d{0,4}|[vV]?\d{1,4}[a-zA-Z]?")
"""One part of a name, words written together: ``LiveCodeBench``, ``v5``."""
_SYMBOLS = frozenset("!&#%?~=+")
_GROUPED = lazy_pattern(r"(?:[A-Za-z0-9]{4,8}-){2,}[A-Za-z0-9]{4,8}|(?:[A-Za-z0-9]{3}-){3,}[A-Za-z0-9]{3}")
"""Groups of equal length, as in keys that are copied by hand."""
_PUNCTUATED = lazy_pattern(r"(?=[^$%]*[A-Za-z])(?=\S*\d)[\w$.@-]*(?:[!#&]|(?<=\w)\$)[\w!#&$%@.^*-]*")
"""Words with a digit and a mark that no name has."""
_LONGEST = 200
_CHANGES = 0.42
"""Smallest share of neighbouring characters of different kinds in random text; names have at most 0.3."""


def looks_opaque(text: str) -> bool:
    """Return whether ``text`` is a jumble of letters and digits, unlike words, columns, paths and numbers.

    >>> [looks_opaque(text) for text in ("conversation_id", "qwen2p5_7b", "eval/aime24/pass@1", "k9f8Kq2Ztx")]
    [False, False, False, True]
    """
    if len(text) < 6 or _SPECIAL.fullmatch(text) or _PATH.match(text) or "://" in text or not text.isascii():
        return False
    if len(text.split()) > 1 or text[0] == "$" or any(letter in text for letter in "{}<>\\|"):
        return False
    parts = _PART.findall(text)
    if _is_grouped(text, parts) or (8 <= len(text) <= _LONGEST and _PUNCTUATED.fullmatch(text)):
        return True
    if all(map(_SPOKEN.fullmatch, parts)):
        return False
    if _HEX_KEY.fullmatch(text) or (_SYMBOLS & set(text) and _kinds(parts) == 3 and len(text) >= 8):
        return not text.isdecimal()
    pairs = [pair for part in parts for pair in pairwise(part)]
    changes = sum(kind_of(one) != kind_of(other) for one, other in pairs)
    short = max(map(len, parts)) >= 8 and _kinds(parts) == 3 and changes >= 0.6 * len(pairs)
    return short or (len(pairs) >= 9 and max(map(len, parts)) >= 8 and changes >= _CHANGES * len(pairs))


def _is_grouped(text: str, parts: list[str]) -> bool:
    mixed = sum(len({kind_of(letter) for letter in part}) > 1 for part in parts)
    return bool(_GROUPED.fullmatch(text)) and len(set(map(len, parts))) == 1 and mixed >= 2 and _kinds(parts) > 1


def _kinds(parts: list[str]) -> int:
    return len({kind_of(letter) for part in parts for letter in part})


def kind_of(letter: str) -> str:
    """Return the kind of a character: ``0`` for digits, ``a`` for small letters, ``A`` for all others."""
    return "0" if letter.isdigit() else "a" if letter.islower() else "A"


# Passwords in texts that do not name them: ``ann:pw@host``, ``mysql -ppw``, netrc, SQL.


_BEFORE_AT = lazy_pattern(
    r"(?<![\w/@:.%+-])([\w.+-]{1,64}):([^\s/'\"<>,]{1,200})@(?=((?:tcp|udp|unix|cloudsql)\(|[A-Za-z\d][\w-]{0,62})(\.\w|:\d)?)"
)
"""A login without a scheme before it, as Go and clients of databases write it."""
_NO_HOST = frozenset({"sha1", "sha256", "sha512", "md5"})
_PLAIN = lazy_pattern(r"[a-z]+|[\d.,vex+%-]+[a-z%]{0,3}|v?\d[\w.]*")
_ORACLE = lazy_pattern(
    r"((?:jdbc:oracle:\w{1,10}:|\bsqlplus\s+(?:-\S{1,20}\s+){0,3})[\w$#]{1,64}/)([^\s@]{1,200})(?=@)"
)
_NETRC = lazy_pattern(r"(\blogin\s+\S{1,100}\s+(?:password|passwd|account)\s+)(\S+)")
_SETTING = lazy_pattern(r"(\b(?:requirepass|masterauth)\s+)(\S+)")
_SQL = lazy_pattern(r"(\b(?:IDENTIFIED\s+BY|PASSWORD)\s+)('[^'\n]*'|\"[^\"\n]*\")", re.IGNORECASE)
_PASSWORD_IN_PROSE = lazy_pattern(
    r"(\b(?:password|passwd|passphrase|passcode|pwd|pw)\b(?:\s+is|\s+was|:)?\s+['\"]?)(?=[^\s'\"]*\d)(?=[^\s'\"]*[A-Za-z])"
    r"([^\s'\"=/:;,]{5,})",
    re.IGNORECASE,
)
_TOKEN_IN_PROSE = lazy_pattern(
    r"(\b(?:token|key|secret)\s+['\"]?)(?=[^\s'\"]*\d)(?=[^\s'\"]*[a-z])(?=[^\s'\"]*[A-Z])([\w~+.-]{8,})(?![\w/])"
)
_SET = lazy_pattern(r"(\b(?:setx?|setenv)\s+)([A-Z_][A-Z0-9_]{0,60})(\s+)(\S+)")
_BASIC = lazy_pattern(r"(\bBasic\s+)([A-Za-z0-9+/]{8,}={0,2})(?![\w+/=])")
_CRYPT = lazy_pattern(r"\$(?:apr1|1|2[abxy]|5|6|y|argon2\w{0,2}|scrypt|pbkdf2[\w-]{0,12})\$[^\s:'\",;]{8,}")
_CURL = lazy_pattern(r"(?<!\S)((?:-u|--user)[ =])[^\s:]+:\S+")

_PROGRAMS: tuple[tuple[str, str, bool], ...] = (
    (r"sshpass", "p", True),
    (r"(?:docker|podman|helm|oras|crane|az|oc|cf|npm|ibmcloud)\s+(?:registry\s+|auth\s+)?login", "p", True),
    (r"cqlsh|beeline|twine\s+upload|useradd|usermod", "p", True),
    (r"openssl\s+(?:enc|aes[\w-]{0,20}|camellia[\w-]{0,20}|des[\w-]{0,20})", "[kK]", True),
    (r"sqlcmd|bcp|osql|tsql", "P", True),
    (r"ssh-keygen", "[NP]", True),
    (r"snmp(?:walk|get|getnext|set|bulkget|bulkwalk|trap|table)", "[AX]", True),
    (r"(?:https?|xh)(?=\s)", "a", True),
    (r"redis-cli|valkey-cli", "a", True),
    (r"ldap(?:search|modify|add|delete|whoami|passwd|compare)", "w", True),
    (r"mosquitto_(?:pub|sub)|ipmitool|zip|unzip|htpasswd\s+-b", "P", True),
    (r"mongo(?:sh|dump|restore|import|export)?", "p", True),
    (r"mysql\w{0,10}|mariadb[\w-]{0,10}|mycli|7z[arz]?", "p", False),
    (r"(?:un)?rar", "h?p", False),
)
"""Programs, their option for a password, and True if a blank may separate the option from the password."""


def _option(program: str, option: str, *, blank: bool) -> re.Pattern[str]:
    between = r"(?:=|[^\S\n]+)?" if blank else ""
    return lazy_pattern(rf"((?<![\w.-])(?:{program})\b(?:[^|;&\n]{{0,200}}?\s)-{option}{between})([^\s|;&]+)")


_OPTIONS = tuple(_option(program, option, blank=blank) for program, option, blank in _PROGRAMS)
_HTPASSWD = lazy_pattern(r"((?<![\w.-])htpasswd\s+-\w*b\w*\s+\S{1,200}\s+\S{1,100}\s+)(\S+)")
_LFTP = lazy_pattern(r"((?<![\w.-])lftp\b[^|;&\n]{0,200}?\s-u\s*[^\s,]{1,64},)(\S+)")
_PASS = lazy_pattern(r"(\s-pass(?:in|out)?[ =]pass:)(\S+)")
_SMB = lazy_pattern(
    r"((?<![\w.-])(?:smbclient|rpcclient|net\s+rpc)\b[^|;&\n]{0,200}?\s(?:-U|--user=?)\s*[^\s%]{1,64}%)(\S+)"
)
_PLACED = lazy_pattern(
    r"((?<![\w.-])(?:(?:wandb|vault|comet)\s+login(?:\s+--?[\w-]{1,30})*\s+|rclone\s+obscure\s+"
    r"|rabbitmqctl\s+(?:add_user|change_password)\s+\S{1,64}\s+|poetry\s+config\s+http-basic\.\S{1,64}\s+\S{1,64}\s+"
    r"|mc\s+(?:alias|config\s+host)\s+(?:set|add)\s+\S{1,64}\s+\S{1,200}\s+\S{1,128}\s+"
    r"|xfreerdp\b[^|;&\n]{0,200}?\s/p:))((?!--?[a-z]|\w{1,30}=)[^\s|;&]+)"
)
"""Commands that take a password at a fixed place."""
_PIPED = lazy_pattern(
    r"(\becho\s+(?:-n\s+)?)([^\s|;&]+)(?=\s*\|\s*(?:sudo\s+-S|chpasswd|kinit|docker\s+login|openssl)\b)"
)
_HERE = lazy_pattern(r"((?<![\w.-])(?:kinit|passwd|sudo|login|chpasswd)\b[^|;&\n]{0,100}?<<<\s*)(\S+)")
_CONFIGURED = lazy_pattern(
    r"(\b(?:config(?:ure)?)\s+(?:--?)?set\s+(?:-n\s+)?)([\w.-]{1,80})(\s+(?:-v\s+)?)([^\s|;&=-]\S*)"
)
_OF_COMMANDS = (_PASS, _SMB, _LFTP, _HTPASSWD, _PLACED, *_OPTIONS)
_WORTH = lazy_pattern(
    r"@|\s-|password|passw|pwd|\bpw|requirepass|masterauth|Basic|identified|\$|token|secret|\bset|\bkey|login|obscure"
    r"|rabbitmqctl|http-basic|xfreerdp|<<<|sudo|kinit|config",
    re.IGNORECASE,
)
_SEPARATED = lazy_pattern(r"[\s@$<=]")
"""One of these characters is part of everything that the patterns above match; most names of metrics have none."""


def without_logins(text: str) -> str:
    """Return ``text`` with passwords hidden that follow a login, a command's option or a word for a password."""
    if not (_SEPARATED.search(text) and _WORTH.search(text)):
        return text
    text = _BEFORE_AT.sub(_without_user, text) if "@" in text else text
    text = _CURL.sub(rf"\1{HIDDEN}", text)
    for pattern in (_ORACLE, _NETRC, _SETTING, _SQL, _PASSWORD_IN_PROSE, _TOKEN_IN_PROSE, _PIPED, _HERE, *_OF_COMMANDS):
        text = pattern.sub(_second, text)
    text = _CONFIGURED.sub(_without_set, _SET.sub(_without_set, text))
    return _CRYPT.sub(HIDDEN, _BASIC.sub(_without_basic, text))


def option_of(argv: Sequence[str], word: str) -> str | None:
    """Return ``word`` with the password in it hidden, if a program takes a password there; else None.

    ``argv``: words of the command line before ``word``.
    """
    if not argv:
        return None
    line = " ".join((*argv, word))
    head = line[: len(line) - len(word)]
    for pattern in _OF_COMMANDS:
        for found in pattern.finditer(line):
            if found.end(2) == len(line) and found.start(2) >= len(head):
                return line[len(head) : found.start(2)] + HIDDEN
    return None


def _second(found: re.Match[str]) -> str:
    return found[0] if found[2].strip("'\"") in ("", HIDDEN) else found[1] + HIDDEN


def _without_set(found: re.Match[str]) -> str:
    hidden = hides(found[2], found[4], suspicion(found[2])) and found[4] != HIDDEN and not found[4].startswith("=")
    return "".join(found.groups()[:3]) + HIDDEN if hidden else found[0]


def _without_user(found: re.Match[str]) -> str:
    _, secret, host, further = found.groups()
    here = further is not None or host.endswith("(")
    plain = re.fullmatch(r"[\d.]+", secret) or (not here and (_PLAIN.fullmatch(secret) or "=" in secret))
    if secret == HIDDEN or host in _NO_HOST or plain:
        return found[0]
    return f"{HIDDEN}@"


def _without_basic(found: re.Match[str]) -> str:
    try:
        held = base64.b64decode(found[2] + "=" * (-len(found[2]) % 4), validate=True).decode()
    except ValueError:
        return found[0]
    return f"{found[1]}{HIDDEN}" if ":" in held and held.isprintable() else found[0]
