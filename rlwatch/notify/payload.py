"""Formatting of a message's payload: as JSON that any receiver can parse, and as text for people."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlwatch.records import JSON


def json_safe(value: Any) -> JSON:
    """Return ``value`` converted to values of strict JSON.

    ``nan``, ``inf``, ``-inf`` become ``"NaN"``, ``"Infinity"``, ``"-Infinity"``; numpy scalars and arrays become
    numbers and lists; anything that JSON cannot express becomes its text.

    >>> json_safe({"kl": float("nan"), "range": (0, float("-inf"))})
    {'kl': 'NaN', 'range': [0, '-Infinity']}
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _words(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(item) for item in value]
    tolist = getattr(value, "tolist", None)
    return json_safe(tolist()) if callable(tolist) else str(value)


def encode(payload: Mapping[str, JSON]) -> bytes:
    """Encode a message's payload as UTF-8 JSON; equal payloads give equal bytes, so that signatures can be compared."""
    text = json.dumps(json_safe(payload), allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")


def _words(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def one_line(text: str) -> str:
    """Return ``text`` without line breaks and control characters, so that it cannot forge a log line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


# The published shape of a message: JSON Schema, draft 2020-12, in alert.schema.json in this directory.

SCHEMA_FILE = "alert.schema.json"


def alert_schema() -> dict[str, JSON]:
    """Return the JSON schema of the body of every webhook message.

    >>> alert_schema()["properties"]["schema_version"]["const"]
    1
    """
    schema: dict[str, JSON] = json.loads(Path(__file__).with_name(SCHEMA_FILE).read_text(encoding="utf-8"))
    return schema


# The texts in a chat channel, an e-mail or on a pager: short, plain, and free of foreign commands.
#
# Parts of a message were written by a model, a log or a configuration. They are shown as plain text that mentions no
# user (``@everyone``), contains no link and formats nothing. The least important part is left out where a service has a
# length limit.

BREAK = "\u200b"
"""A zero-width space: services do not treat text that it separates as a mention, a tag or a link."""

_COMMANDS = re.compile(r"@(?=\w)|<(?=[@!#/a-zA-Z])|\](?=\()|(?<=:)//(?=\S)|\*(?=\*)|~(?=~)|\|(?=\|)|`")
MOST_NUMBERS = 6
MOST_ADVICE = 2
LONGEST_PART = 300
"""Largest number of characters of one part of a message."""


def chat_text(payload: Mapping[str, JSON], message_id: str, limit: int = 4000) -> str:
    """Return the text of a message for a chat channel, in at most ``limit`` bytes of UTF-8.

    ``payload``: contents of the message. First the kind of alert and the run; then its beginning, the evidence, the
    cause and the actions; last the dashboard and the message's id, which is the same when a message comes twice. If
    space is short, the first line and these two remain.
    """
    head, end = headline(payload), list(_end(payload, message_id))
    lines = [shortened(head, max(limit - _size(end) - 1, limit // 3))]
    for line in _body(payload):
        if _size([*lines, line, *end]) <= limit:
            lines.append(line)
    return shortened("\n".join([*lines, *end]), limit)


def headline(payload: Mapping[str, JSON]) -> str:
    """Return one line about the message with these contents (``payload``): severity, kind of alert, run, and step."""
    alert, event = _table(payload, "alert"), str(payload.get("event") or "alert")
    kind = defused(alert.get("kind") or payload.get("text") or "")
    step = f" at step {defused(alert['step'])}" if alert.get("step") is not None else ""
    severity = defused(alert.get("severity") or "").upper()
    return " ".join(part for part in (f"[{event} {severity}]".replace(" ]", "]"), kind + step, _of(payload)) if part)


def shortened(text: str, limit: int) -> str:
    """Return ``text`` in at most ``limit`` bytes of UTF-8, with an ellipsis where it is cut.

    >>> shortened("entropy collapses", 10)
    'entropy…'
    """
    whole = text.encode("utf-8", errors="replace")
    if len(whole) <= limit:
        return whole.decode()
    return whole[: max(limit - 3, 0)].decode(errors="ignore").rstrip() + "…"


def defused(value: JSON, longest: int = LONGEST_PART) -> str:
    """Return ``value`` as one line of plain text that no chat service treats as a mention, link or formatting.

    ``longest``: largest number of characters.

    >>> defused("ask @everyone").replace(BREAK, "|")
    'ask @|everyone'
    """
    text = one_line(str(value))
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return _COMMANDS.sub(lambda match: "'" if match[0] == "`" else match[0] + BREAK, text)


def _of(payload: Mapping[str, JSON]) -> str:
    run = _table(payload, "run")
    whose = "/".join(defused(part) for part in (run.get("project"), run.get("name") or run.get("id")) if part)
    return f"in {whose}" if whose else ""


def _body(payload: Mapping[str, JSON]) -> Iterator[str]:
    """Yield the lines between the first and the last, in order of reading and of importance."""
    alert = _table(payload, "alert")
    if alert.get("message"):
        yield defused(alert["message"])
    yield from _since(alert)
    yield from _evidence(_table(payload, "finding"))
    if payload.get("event") != "resolved":
        yield from _cause(payload)
        yield from _advice(_table(payload, "advice"))
    others = [f"{defused(other.get('kind'))} ({defused(other.get('severity'))})" for other in _tables(payload, "also")]
    if others:
        yield f"Also: {', '.join(others)}"
    if alert.get("reason"):
        yield f"Reason: {defused(alert['reason'])}"


def _since(alert: Mapping[str, JSON]) -> Iterator[str]:
    onset, over = alert.get("onset_step"), alert.get("resolved_step")
    parts = [f"step {defused(onset)}"] if onset is not None else []
    parts += [f"fired {_clock(alert['fired_at'])}"] if alert.get("fired_at") else []
    if parts:
        yield f"Since: {', '.join(parts)}" + (f"; resolved at step {defused(over)}" if over is not None else "")


def _clock(seconds: JSON) -> str:
    try:
        return datetime.fromtimestamp(float(seconds), UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (TypeError, ValueError, OverflowError, OSError):
        return defused(seconds)


def _evidence(finding: Mapping[str, JSON]) -> Iterator[str]:
    numbers = {name: value for name, value in _table(finding, "evidence").items() if _shows(value)}
    shown = [f"{defused(name)} = {_number(value)}" for name, value in list(numbers.items())[:MOST_NUMBERS]]
    if shown:
        yield f"Evidence: {', '.join(shown)}"


def _shows(value: JSON) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 80)


def _number(value: JSON) -> str:
    return f"{value:.4g}" if isinstance(value, float) else defused(value)


def _cause(payload: Mapping[str, JSON]) -> Iterator[str]:
    """Yield lines on the meaning of the alert, its likeliest cause, and alerts that fired before it."""
    advice = _table(payload, "advice")
    meaning = [defused(advice[key]) for key in ("title", "meaning") if advice.get(key)]
    if meaning:
        yield f"Meaning: {': '.join(meaning)}"
    cause = _table(payload, "cause")
    if cause.get("title"):
        what = f"{defused(cause['title'])}: {defused(cause.get('summary'))}"
        yield f"Most likely cause ({defused(cause.get('sure'))}): {what}"
    earlier = [
        f"{defused(e.get('kind'))} since step {defused(e.get('onset_step'))}" for e in _tables(payload, "earlier")
    ]
    if earlier:
        yield f"Earlier alerts: {', '.join(earlier)}"


def _advice(advice: Mapping[str, JSON]) -> Iterator[str]:
    for number, action in enumerate(_tables(advice, "actions")[:MOST_ADVICE], 1):
        options = "; ".join(defused(option) for option in _table(action, "options").values())
        what = f"{defused(action.get('name'))}: {defused(action.get('what'))}"
        yield f"Action {number}: {what}" + (f" ({options})" if options else "")


def _end(payload: Mapping[str, JSON], message_id: str) -> Iterator[str]:
    link = str(_table(payload, "links").get("dashboard") or "")
    if re.fullmatch(r"https?://[^\s<>|()\[\]]+", link):  # ours, and no way out of it
        yield f"Dashboard: {link}"
    yield f"Message {defused(message_id)}"


def _table(of: Mapping[str, JSON], key: str) -> Mapping[str, JSON]:
    value = of.get(key)
    return value if isinstance(value, Mapping) else {}


def _tables(of: Mapping[str, JSON], key: str) -> list[Mapping[str, JSON]]:
    value = of.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, Sequence) else []


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode("utf-8", errors="replace")) + 1 for line in lines)
