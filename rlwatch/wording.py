"""Formatting of numbers, times and untrusted text for people: one form for the terminal, report, dashboard and alerts.

Numbers look as they do in the messages of findings, so that a figure in a table can be found again in a sentence.
Untrusted text (names of runs, tokens, error messages) can neither control a terminal nor act as markup, and its
invisible characters are shown.
"""

from __future__ import annotations

import math
import re
import time
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from rlwatch.catalogue import entry
from rlwatch.records import JSON

THIN = "\N{NARROW NO-BREAK SPACE}"
"""Separates the thousands of a step, and a number from its unit."""
NOTHING = "-"
"""Text that is shown where nothing was measured."""
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})
"""Unicode categories of invisible characters: control, formatting (with marks of reading direction), ..."""
VOID_ELEMENTS = ("meta", "br", "line", "polyline", "circle")
_AGES = ((1.0, "s", 60.0), (60.0, "min", 3600.0), (3600.0, "h", 86400.0), (86400.0, "d", math.inf))
"""Seconds in a unit, its name, and the seconds that make one of the next unit."""
_COMMANDS = {
    "lower-lr": "lower learning rate",
    "raise-lr": "raise learning rate",
    "set-kl-coef": "set KL coefficient",
    "set-clip": "set clip range",
    "set-grad-clip": "set gradient clipping",
    "set-entropy-coef": "set entropy coefficient",
    "set-is-correction": "set importance correction",
}
"""Texts for commands whose names leave something out; kinds of findings have their texts in the catalogue."""


LETTERS = ((3, 6, "k"), (6, 9, "M"))
"""For each letter the powers of ten that it covers: the first, which it means, and the end."""
SMALLEST = -4
"""Least power of ten that is written without an exponent."""


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text with ``digits`` significant digits; k and M are thousands and millions.

    A whole part of one digit more is still written in full. Halves are rounded to even, as Python does. NaN and the
    infinities have names; None is a dash. ``app/numbers.js`` follows this rule, and a test compares both.

    >>> [number(x) for x in (0.0213456, 999.9, 1234.0, 12483.0, 2.5e6, 3e9, -0.00002, 0.0)]
    ['0.0213', '1000', '1234', '12.5k', '2.5M', '3e+09', '-2e-05', '0']
    >>> [number(x) for x in (float("nan"), float("inf"), float("-inf"), None)]
    ['NaN', 'Inf', '-Inf', '-']
    """
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    return _number(value, math.copysign(1.0, value), digits)


@lru_cache(maxsize=256)
def _number(value: float, side: float, digits: int) -> str:
    """Return a finite number as text, cached: a finding that lasts has the same numbers in many rows."""
    sign = "-" if side < 0 else ""
    shown, power = _rounded(abs(value), digits + 1)
    if power != digits:
        shown, power = _rounded(abs(value), digits)
        for first, end, letter in LETTERS:
            if max(first, digits + 1) <= power < end:
                return f"{sign}{_plain(shown, power - first)}{letter}"
    if SMALLEST <= power < LETTERS[-1][1]:
        return sign + _plain(shown, power)
    return f"{sign}{_plain(shown, 0)}e{power:+03d}"


def _rounded(size: float, digits: int) -> tuple[str, int]:
    """Return the first ``digits`` digits of a number, and the power of ten of the first one."""
    shown, _, power = f"{size:.{digits - 1}e}".partition("e")
    return shown.replace(".", ""), int(power)


def _plain(shown: str, power: int) -> str:
    """Return digits, the first at the place of 10 to the ``power``, without zeros at the end of a fraction."""
    if power < 0:
        return "0." + "0" * (-power - 1) + (shown.rstrip("0") or "0")
    whole, fraction = shown[: power + 1].ljust(power + 1, "0"), shown[power + 1 :].rstrip("0")
    whole = f"{int(whole):,}".replace(",", THIN) if len(whole) > 4 else whole
    return f"{whole}.{fraction}" if fraction else whole


def step(value: int | None) -> str:
    r"""Return a step number as exact text, with narrow spaces between thousands; a dash for None.

    >>> step(12480), step(None)
    ('12\u202f480', '-')
    """
    return NOTHING if value is None else f"{value:,}".replace(",", THIN)


def plural(count: int, one: str, many: str = "") -> str:
    r"""Return a count with its noun in the right number, such as ``1 run`` or ``2 runs``.

    ``one``: the singular. ``many``: an irregular plural; empty: ``one`` with an s.

    >>> plural(1, "run"), plural(1200, "run")
    ('1 run', '1\u202f200 runs')
    """
    return f"{step(count)} {one if count == 1 else many or one + 's'}"


def percent(share: float | None) -> str:
    """Return a share (1 is all) as a percentage with three significant digits; a dash for None.

    >>> percent(0.4136), percent(1.0), percent(float("nan")), percent(None)
    ('41.4%', '100%', 'NaN', '-')
    """
    if share is None or not math.isfinite(share):
        return number(share)
    return f"{number(100 * share)}%"


def chance(value: float | None) -> str:
    """Return a forecast probability (0..1) as a whole percentage, never 0 % or 100 %; a dash for None.

    >>> chance(0.734), chance(0.002), chance(0.999), chance(None)
    ('73%', '<1%', '>99%', '-')
    """
    if value is None or not math.isfinite(value):
        return number(value)
    if not 0.01 <= value <= 0.99:
        return "<1%" if value < 0.5 else ">99%"
    return f"{value:.0%}"


def duration(seconds: float | None) -> str:
    r"""Return a length of time, given in seconds, as text in its largest unit; a dash for None, NaN and infinities.

    >>> duration(0.034), duration(38), duration(2460), duration(260_000), duration(None)
    ('34\u202fms', '38\u202fs', '41\u202fmin', '3\u202fd', '-')
    """
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if round(seconds * 1000) < 1000:
        return f"{max(0.0, seconds) * 1000:.0f}{THIN}ms"
    if round(seconds, 1) < 10:
        return f"{seconds:.1f}{THIN}s".replace(".0", "")
    size, unit = next((size, unit) for size, unit, end in _AGES if round(seconds / size) * size < end)
    return f"{seconds / size:.0f}{THIN}{unit}"


def age(then: float | None, now: float) -> str:
    r"""Return the time from ``then`` to ``now`` (Unix seconds) as text: "now" if clocks disagree, a dash without
    ``then``.

    >>> age(1000.0, 1180.0), age(1000.0, 999.0), age(None, 5.0)
    ('3\u202fmin ago', 'now', '-')
    """
    if not then or not math.isfinite(then):
        return NOTHING
    elapsed = now - then
    return "now" if elapsed < 1 else f"{duration(round(elapsed) if elapsed < 10 else elapsed)} ago"


def moment(ts: float | None) -> str:
    """Return date and time in UTC for Unix seconds; a dash where the time is not known."""
    if not ts or not math.isfinite(ts) or not 0 < ts < 2e11:
        return NOTHING
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ts))


def local_moment(ts: float) -> str:
    """Return date and time, to the minute, in this machine's time zone for Unix seconds: for times that users set."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(ts))


def words(kind: str) -> str:
    """Return the name of a kind of finding, event or command as words within a sentence.

    >>> words("entropy_collapse"), words("gradient_localised"), words("lower-lr")
    ('entropy collapse', 'gradient localised', 'lower learning rate')
    """
    return _COMMANDS.get(kind) or entry(kind).label


def cell(value: JSON) -> str:
    """Return any value of a table as text: numbers by :func:`number`, booleans in lower case, a dash for None.

    >>> cell(True), cell(None), cell(0.25), cell("text")
    ('true', '-', '0.25', 'text')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return number(value) if value is None or isinstance(value, float) else str(value)


def nearest(name: str, known: Iterable[str], most: int = 1, alike: float = 0.6) -> list[str]:
    """Return at most ``most`` of the ``known`` names that resemble ``name``, the most similar first.

    Case does not count, and ``_`` equals ``-``. ``alike`` in [0, 1]: the smallest ratio of matching characters; 1: only
    the same name.

    >>> nearest("lower_lr", ["lower-lr", "pause", "stop"]), nearest("kl", ["reward"])
    (['lower-lr'], [])
    """
    from difflib import get_close_matches

    plain: dict[str, str] = {}
    for one in known:
        plain.setdefault(one.lower().replace("_", "-"), one)
    return [plain[one] for one in get_close_matches(name.lower().replace("_", "-"), plain, most, alike)]


def meant(name: str, known: Iterable[str], most: int = 2, alike: float = 0.6) -> str:
    """Return a question that suggests up to ``most`` ``known`` names after a wrong ``name``; empty if none is similar.

    ``alike`` as for :func:`nearest`.

    >>> meant("tlr", ["trl", "verl"]), meant("x", ["trl"])
    ('; did you mean trl?', '')
    """
    near = nearest(name, known, most, alike)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def cut(text: str, most: int) -> str:
    """Return ``text``, cut to ``most`` characters with an ellipsis where it is longer.

    >>> cut("a long story", 8)
    'a long …'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def one_line(value: object, most: int = 80) -> str:
    r"""Return ``value`` as text on one line, cut to ``most`` characters.

    >>> one_line("a  long\n story", most=8)
    'a long …'
    """
    return cut(" ".join(str(value).split()), most)


def sentence(text: str) -> str:
    """Return ``text`` with a capital letter at its beginning and a full stop; an empty text remains empty."""
    return text[:1].upper() + text[1:].removesuffix(".") + "." if text else ""


def visible(text: str) -> str:
    r"""Return ``text`` with a replacement for each invisible character; line ends and tabs stay.

    >>> visible("a\x1b[2J\u202eb")
    'a\ufffd[2J\ufffdb'
    """
    if text.isprintable():
        return text
    return "".join("\N{REPLACEMENT CHARACTER}" if _hidden(char) else char for char in text)


def _hidden(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in HIDDEN


def for_terminal(text: str) -> str:
    r"""Return ``text`` without characters that control a terminal; a tab, which would shift a table, becomes a space.

    >>> for_terminal("run\x1b[31m\tA")
    'run\ufffd[31m A'
    """
    return visible(text).replace("\t", " ")


def for_markdown(text: str) -> str:
    r"""Return ``text`` as one line of Markdown that is rendered as exactly this text.

    >>> for_markdown("a|b <script> [x](http://y) # *z*\nline")
    'a\\|b &lt;script&gt; \\[x\\](http\\://y) \\# \\*z\\* line'
    """
    shown = visible(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]#|~!])|(?<=\w)(:)(?=//)", lambda found: f"\\{found.group()}", shown)


class Markup(str):
    """HTML or SVG made by :func:`el`; any other string is text, and is escaped, also in a template of jinja2."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def el(tag: str, *children: str, cls: str = "", **attributes: str | float) -> Markup:
    """Return an HTML element ``<tag>`` with ``children``; plain strings are escaped.

    ``cls``: its class. ``attributes``: ``_`` in a name becomes ``-``; those with an empty value are left out.

    >>> el("b", "<script>", cls="x", data_step=3)
    '<b class="x" data-step="3">&lt;script&gt;</b>'
    """
    given = {"class": cls, **{name.replace("_", "-"): value for name, value in attributes.items()}}
    written = "".join(f' {name}="{_escaped(str(value))}"' for name, value in given.items() if value != "")
    if tag in VOID_ELEMENTS and not children:
        return Markup(f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{''.join(map(_text, children))}</{tag}>")


def joined(*children: str) -> Markup:
    """Return the HTML pieces ``children`` one after another; plain strings are escaped."""
    return Markup("".join(map(_text, children)))


def code_in(text: str) -> Markup:
    """Return ``text`` as HTML in which parts in backticks are marked as code.

    >>> code_in("`beta=0.0` drops <it>")
    '<code>beta=0.0</code> drops &lt;it&gt;'
    """
    parts = re.split(r"`([^`]+)`", text)
    return joined(*(el("code", part) if place % 2 else part for place, part in enumerate(parts)))


def _text(child: str) -> str:
    return str(child) if isinstance(child, Markup) else _escaped(child)


def _escaped(text: str) -> str:
    from html import escape  # with a table of entities, which training does not need

    return escape(visible(text), quote=True)
