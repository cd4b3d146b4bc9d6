"""Words and numbers as a person reads them: pure functions, no printing."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlwatch.records import AlertState, CommandStatus, OutboxStatus, RunInfo, RunState, Severity

if TYPE_CHECKING:
    from rlwatch.control.liveness import Sign

THIN = "\N{NARROW NO-BREAK SPACE}"

SEVERITY_STYLES: Mapping[Severity, str] = {
    Severity.INFO: "dim",
    Severity.WARNING: "yellow",
    Severity.CRITICAL: "bold red",
}
STATUS_STYLES: Mapping[str, str] = {
    "running": "green",
    "stale": "yellow",
    "dead": "bold red",
    "paused": "yellow",
    "finished": "dim",
    "crashed": "bold red",
    AlertState.FIRING.value: "bold red",
    AlertState.PENDING.value: "yellow",
    AlertState.RESOLVED.value: "green",
    CommandStatus.QUEUED.value: "yellow",
    CommandStatus.CLAIMED.value: "yellow",
    CommandStatus.DONE.value: "green",
    CommandStatus.REJECTED.value: "bold red",
    CommandStatus.EXPIRED.value: "red",
    CommandStatus.FAILED.value: "bold red",
    CommandStatus.CANCELLING.value: "yellow",
    CommandStatus.CANCELLED.value: "dim",
    OutboxStatus.SENT.value: "green",
    OutboxStatus.DEAD.value: "bold red",
}


def clean(text: str) -> str:
    r"""``text`` with control characters replaced, so that a name cannot command the terminal.

    >>> clean("run\x1b[31m\tA")
    'run\ufffd[31m A'
    """
    if text.isprintable():
        return text
    return "".join(" " if char == "\t" else _visible(char) for char in text)


def _visible(char: str) -> str:
    # Cc: control, Cf: invisible formatting, among it the marks that reverse the reading direction.
    hidden = char != "\n" and unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co"}
    return "\N{REPLACEMENT CHARACTER}" if hidden else char


def number(value: float | None) -> str:
    """Three significant digits; NaN and the infinities by name; a dash for what was not measured.

    >>> [number(x) for x in (0.123456, 12345.6, float("nan"), float("-inf"), None)]
    ['0.123', '1.23e+04', 'NaN', '-Inf', '-']
    """
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:.3g}"


def step(value: int | None) -> str:
    """A step with narrow spaces between thousands.

    >>> step(12480).replace(THIN, " ")
    '12 480'
    """
    return "-" if value is None else f"{value:,}".replace(",", THIN)


def age(seconds: float | None) -> str:
    """A duration in its one largest unit.

    >>> [age(s) for s in (3, 200, 7300, 260_000, None)]
    ['3 s', '3 min', '2 h', '3 days', '-']
    """
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    for unit, length, most in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172_800.0)):
        if seconds < most:
            return f"{int(seconds / length)} {unit}"
    return f"{int(seconds / 86_400)} days"


def status(run: RunInfo, sign: Sign | None = None) -> str:
    """``running``, ``paused``, ``stale`` (no step), ``dead`` (no sign of its process), ``finished`` or ``crashed``.

    The writer's word, doubted after a silence.
    """
    if run.state is not RunState.RUNNING or sign is None:
        return run.state.value
    if sign.pause is not None:
        return "paused"
    if sign.dead_since is not None:
        return "dead"
    return "running" if sign.silent_s is None else "stale"


def one_line(value: object, most: int = 80) -> str:
    r"""``value`` on one line, cut to ``most`` characters with an ellipsis.

    >>> one_line("a  long\n story", most=8)
    'a long …'
    """
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 1] + "…"
