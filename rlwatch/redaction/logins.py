"""Passwords where a text gives them without naming them: ``ann:pw@host``, ``mysql -ppw``, netrc, SQL."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from rlwatch.redaction.names import HIDDEN, hides, says

_BEFORE_AT = re.compile(
    r"(?<![\w/@:.%+-])([\w.+-]{1,64}):([^\s/'\"<>,]{1,200})@(?=((?:tcp|udp|unix|cloudsql)\(|[A-Za-z\d][\w-]{0,62})(\.\w|:\d)?)"
)
"""Without a scheme before it, as Go and clients of databases write it."""
_NO_HOST = frozenset({"sha1", "sha256", "sha512", "md5"})
_PLAIN = re.compile(r"[a-z]+|[\d.,vex+%-]+[a-z%]{0,3}|v?\d[\w.]*")
_ORACLE = re.compile(r"((?:jdbc:oracle:\w{1,10}:|\bsqlplus\s+(?:-\S{1,20}\s+){0,3})[\w$#]{1,64}/)([^\s@]{1,200})(?=@)")
_NETRC = re.compile(r"(\blogin\s+\S{1,100}\s+(?:password|passwd|account)\s+)(\S+)")
_SETTING = re.compile(r"(\b(?:requirepass|masterauth)\s+)(\S+)")
_SQL = re.compile(r"(\b(?:IDENTIFIED\s+BY|PASSWORD)\s+)('[^'\n]*'|\"[^\"\n]*\")", re.IGNORECASE)
_SAID = re.compile(
    r"(\b(?:password|passwd|passphrase|passcode|pwd|pw)\b(?:\s+is|\s+was|:)?\s+['\"]?)(?=[^\s'\"]*\d)(?=[^\s'\"]*[A-Za-z])"
    r"([^\s'\"=/:;,]{5,})",
    re.IGNORECASE,
)
_MENTIONED = re.compile(
    r"(\b(?:token|key|secret)\s+['\"]?)(?=[^\s'\"]*\d)(?=[^\s'\"]*[a-z])(?=[^\s'\"]*[A-Z])([\w~+.-]{8,})(?![\w/])"
)
_SET = re.compile(r"(\b(?:setx?|setenv)\s+)([A-Z_][A-Z0-9_]{0,60})(\s+)(\S+)")
_BASIC = re.compile(r"(\bBasic\s+)([A-Za-z0-9+/]{8,}={0,2})(?![\w+/=])")
_CRYPT = re.compile(r"\$(?:apr1|1|2[abxy]|5|6|y|argon2\w{0,2}|scrypt|pbkdf2[\w-]{0,12})\$[^\s:'\",;]{8,}")
_CURL = re.compile(r"(?<!\S)((?:-u|--user)[ =])[^\s:]+:\S+")

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
"""Programs, the option that takes a password, and whether a blank may stand between the two."""


def _option(program: str, option: str, *, blank: bool) -> re.Pattern[str]:
    between = r"(?:=|[^\S\n]+)?" if blank else ""
    return re.compile(rf"((?<![\w.-])(?:{program})\b(?:[^|;&\n]{{0,200}}?\s)-{option}{between})([^\s|;&]+)")


_OPTIONS = tuple(_option(program, option, blank=blank) for program, option, blank in _PROGRAMS)
_HTPASSWD = re.compile(r"((?<![\w.-])htpasswd\s+-\w*b\w*\s+\S{1,200}\s+\S{1,100}\s+)(\S+)")
_LFTP = re.compile(r"((?<![\w.-])lftp\b[^|;&\n]{0,200}?\s-u\s*[^\s,]{1,64},)(\S+)")
_PASS = re.compile(r"(\s-pass(?:in|out)?[ =]pass:)(\S+)")
_SMB = re.compile(
    r"((?<![\w.-])(?:smbclient|rpcclient|net\s+rpc)\b[^|;&\n]{0,200}?\s(?:-U|--user=?)\s*[^\s%]{1,64}%)(\S+)"
)
_PLACED = re.compile(
    r"((?<![\w.-])(?:(?:wandb|vault|comet)\s+login(?:\s+--?[\w-]{1,30})*\s+|rclone\s+obscure\s+"
    r"|rabbitmqctl\s+(?:add_user|change_password)\s+\S{1,64}\s+|poetry\s+config\s+http-basic\.\S{1,64}\s+\S{1,64}\s+"
    r"|mc\s+(?:alias|config\s+host)\s+(?:set|add)\s+\S{1,64}\s+\S{1,200}\s+\S{1,128}\s+"
    r"|xfreerdp\b[^|;&\n]{0,200}?\s/p:))((?!--?[a-z]|\w{1,30}=)[^\s|;&]+)"
)
"""Where the place after the command says it."""
_PIPED = re.compile(
    r"(\becho\s+(?:-n\s+)?)([^\s|;&]+)(?=\s*\|\s*(?:sudo\s+-S|chpasswd|kinit|docker\s+login|openssl)\b)"
)
_HERE = re.compile(r"((?<![\w.-])(?:kinit|passwd|sudo|login|chpasswd)\b[^|;&\n]{0,100}?<<<\s*)(\S+)")
_CONFIGURED = re.compile(
    r"(\b(?:config(?:ure)?)\s+(?:--?)?set\s+(?:-n\s+)?)([\w.-]{1,80})(\s+(?:-v\s+)?)([^\s|;&=-]\S*)"
)
_OF_COMMANDS = (_PASS, _SMB, _LFTP, _HTPASSWD, _PLACED, *_OPTIONS)
_WORTH = re.compile(
    r"@|\s-|password|passw|pwd|\bpw|requirepass|masterauth|Basic|identified|\$|token|secret|\bset|\bkey|login|obscure"
    r"|rabbitmqctl|http-basic|xfreerdp|<<<|sudo|kinit|config",
    re.IGNORECASE,
)


def without_logins(text: str) -> str:
    """``text`` without the passwords that stand where passwords stand."""
    if not _WORTH.search(text):
        return text
    text = _BEFORE_AT.sub(_without_user, text) if "@" in text else text
    text = _CURL.sub(rf"\1{HIDDEN}", text)
    for pattern in (_ORACLE, _NETRC, _SETTING, _SQL, _SAID, _MENTIONED, _PIPED, _HERE, *_OF_COMMANDS):
        text = pattern.sub(_second, text)
    text = _CONFIGURED.sub(_without_set, _SET.sub(_without_set, text))
    return _CRYPT.sub(HIDDEN, _BASIC.sub(_without_basic, text))


def option_of(argv: Sequence[str], word: str) -> str | None:
    """``word``, which follows ``argv``, with its password out, where the program of ``argv`` takes one there."""
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
    hidden = hides(found[2], found[4], says(found[2])) and found[4] != HIDDEN and not found[4].startswith("=")
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
