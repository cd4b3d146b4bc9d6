"""The steps of a run with token records: steps whose gradient spike was localised, and steps with outlier tokens.

Each step is a row of the list, with the shape and colour of its cause, and is described in sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlwatch.records import JSON, NON_FINITE, Event, SpikeBatch

from . import format as fmt
from . import table
from .health import AMBER, BLUE, GREY, VERMILLION, WordStyle
from .tokens import LABELS, NUMBERS, Token

NOT_LOCALISED, FAR_OUT_ONLY, NON_FINITE_ONLY = "not localised", "outlier tokens", "non-finite tokens"

LOOKS = {
    "non-finite": WordStyle("✕", VERMILLION),
    "token ratio": WordStyle("◆", AMBER),
    "sequence ratio": WordStyle("▬", AMBER),
    "reward outlier": WordStyle("★", AMBER),
    "layer": WordStyle("▤", BLUE),
    "importance weight": WordStyle("◇", AMBER),
    "KL term": WordStyle("⌁", AMBER),
    "advantage scale": WordStyle("☆", AMBER),
    "normaliser": WordStyle("÷", AMBER),
    "entropy term": WordStyle("≈", AMBER),
    "another term": WordStyle("+", BLUE),
    "log-prob gradient": WordStyle("∇", BLUE),
    "did not recur": WordStyle("⚡", GREY),
    "unexplained": WordStyle("?", GREY),
    NOT_LOCALISED: WordStyle("◌", GREY),
    NON_FINITE_ONLY: WordStyle("✕", GREY),
    FAR_OUT_ONLY: WordStyle("·", GREY),
}
"""Styles of the causes of :class:`rlwatch.gradloc.report.ExcessFactor` and of the other labels of a step."""


def look(cause: str) -> WordStyle:
    """Return the shape and colour of the cause of a gradient spike, with a default for unknown causes."""
    return LOOKS.get(cause, LOOKS["unexplained"])


Key = tuple[int, int]
"""Attempt and step."""

STEP_COLUMNS = (
    table.TableColumn("step", "right tight"),
    table.TableColumn("gradient norm", "right tight"),
    table.TableColumn("threshold", "right tight wide"),
    table.TableColumn("what", "tight"),
    table.TableColumn("culprits", "right tight"),
    table.TableColumn("largest share", "right tight"),
    table.TableColumn("found", "long middling"),
    table.TableColumn("outlier tokens", "right tight wide"),
)


@dataclass(frozen=True, slots=True)
class LocalisationReport:
    """Result of localising a gradient spike to tokens: an event ``gradient_localised``, as
    :class:`rlwatch.gradloc.report.Localisation`.

    Fields that the event lacks are None or empty. ``cost`` holds ``forwards``, ``backwards`` and ``seconds``; ``worst``
    is the largest share of a culprit token; ``sentences`` holds verdict, cause and cure, each a clause; ``units`` and
    ``cures`` are as :class:`rlwatch.gradloc.report.Unit` and ``Cure``; ``count`` is the number of outlier tokens.
    """

    norm: float | None = None
    threshold: float | None = None
    tokens: int = 0
    method: str = ""
    gap: float | None = None
    complete: bool = False
    cause: str = ""
    message: str = ""
    why_not: str = ""
    notes: tuple[str, ...] = ()
    layers: Mapping[str, float] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    worst: float | None = None
    verdict: str = ""
    sentences: tuple[str, ...] = ()
    units: tuple[Mapping[str, JSON], ...] = ()
    cures: tuple[Mapping[str, JSON], ...] = ()
    count: int = 0
    explained: float | None = None

    @classmethod
    def of(cls, body: Mapping[str, JSON]) -> LocalisationReport:
        """Read the result from the body of an event, ignoring unknown entries, so that a page does not fail on them."""
        notes = body.get("notes")
        return cls(
            norm=number_of(body.get("norm")),
            threshold=number_of(body.get("threshold")),
            tokens=_count(body.get("tokens")),
            method=str(body.get("method") or ""),
            gap=number_of(body.get("gap")),
            complete=body.get("complete") is True,
            cause=str(body.get("cause") or ""),
            message=str(body.get("message") or ""),
            why_not=str(body.get("why_not") or ""),
            notes=tuple(map(str, notes)) if isinstance(notes, list | tuple) else (),
            layers=_numbers(body.get("layers")),
            cost=_numbers(body.get("cost")),
            worst=_worst(body.get("culprits")),
            verdict=str(body.get("verdict") or ""),
            sentences=tuple(str(body[name]) for name in ("statement", "because", "remedy") if body.get(name)),
            units=_tables(body.get("units")),
            cures=_tables(body.get("cures")),
            count=_count(body.get("count")),
            explained=number_of(body.get("explained")),
        )


def _tables(value: JSON) -> tuple[Mapping[str, JSON], ...]:
    listed = value if isinstance(value, list | tuple) else ()
    return tuple(one for one in listed if isinstance(one, Mapping))


def number_of(value: JSON) -> float | None:
    """Return a number from the body of an event as float, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # JSON has integers of any length
        return None


def _count(value: JSON) -> int:
    """Return a count, 0 for anything that is not one."""
    number = number_of(value)
    return int(number) if number is not None and np.isfinite(number) else 0


def _worst(culprits: JSON) -> float | None:
    """Return the largest share of the culprits in the event."""
    listed = culprits if isinstance(culprits, list | tuple) else ()
    shares = [number_of(one.get("share")) for one in listed if isinstance(one, Mapping)]
    return max((share for share in shares if share is not None and np.isfinite(share)), default=None)


def _numbers(value: JSON) -> dict[str, float]:
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {str(name): number for name, entry in pairs if (number := number_of(entry)) is not None}


@dataclass(frozen=True, slots=True)
class TokenStep:
    """One step with token records. ``report`` is None if it was not localised; ``culprits`` None if they are too old
    to be read.

    ``worst`` is the largest share of a culprit token, ``far_out`` the number of outlier tokens.
    """

    attempt: int
    step: int
    report: LocalisationReport | None = None
    culprits: int | None = None
    worst: float | None = None
    far_out: int = 0
    non_finite: bool = False

    @property
    def cause(self) -> str:
        """Cause of the step's token records, a key of :data:`token_looks.LOOKS`."""
        if self.report is None:
            return NON_FINITE_ONLY if self.non_finite else FAR_OUT_ONLY
        return NOT_LOCALISED if self.report.why_not and not self.culprits else self.report.cause or "unexplained"

    @property
    def key(self) -> str:
        """Key of the step in the list: attempt and step."""
        return f"{self.attempt}.{self.step}"


def entries(localised: Iterable[Event], culprits: Sequence[SpikeBatch], far: Sequence[SpikeBatch]) -> list[TokenStep]:
    """Return all steps with token records, newest first; a step that was localised twice has the last report.

    ``localised``: events of localised steps; ``culprits``, ``far``: batches of culprit and outlier tokens.
    """
    reports = {(e.attempt, e.step): LocalisationReport.of(e.body) for e in localised if e.step is not None}
    culprits_at, far_at = _by_step(culprits), _by_step(far)
    keys: set[Key] = {*reports, *culprits_at, *far_at}
    found = [_entry(key, reports.get(key), culprits_at.get(key, []), far_at.get(key, [])) for key in keys]
    return sorted(found, key=lambda entry: (entry.attempt, entry.step), reverse=True)


def _by_step(batches: Sequence[SpikeBatch]) -> dict[Key, list[SpikeBatch]]:
    found: dict[Key, list[SpikeBatch]] = {}
    for batch in batches:
        found.setdefault((batch.attempt, batch.step), []).append(batch)
    return found


def _entry(
    key: Key, report: LocalisationReport | None, culprits: Sequence[SpikeBatch], far: Sequence[SpikeBatch]
) -> TokenStep:
    known = culprits or (report is not None and report.why_not)
    return TokenStep(
        *key,
        report=LocalisationReport() if report is None and culprits else report,
        culprits=sum(map(len, culprits)) if known else None,
        worst=report.worst if report is not None and not culprits else largest_share(culprits),
        far_out=sum(map(len, far)),
        non_finite=any(batch.reason == NON_FINITE for batch in far),
    )


def largest_share(batches: Sequence[SpikeBatch]) -> float | None:
    """Return the largest finite share of a culprit token in ``batches``, or None."""
    shares = [np.asarray(batch.columns["share"], dtype=float) for batch in batches if "share" in batch.columns]
    finite = [share for column in shares for share in column.tolist() if np.isfinite(share)]
    return max(finite, default=None)


def matching(all_entries: Sequence[TokenStep], causes: Sequence[str]) -> list[TokenStep]:
    """Return the steps in ``all_entries`` with one of the chosen causes (empty: all)."""
    return [entry for entry in all_entries if not causes or entry.cause in causes]


def chosen(all_entries: Sequence[TokenStep], step: str | None, attempt: str | None) -> TokenStep | None:
    """Return the step in ``all_entries`` that the page's address names, of the newest attempt unless one is given; None
    if there is none.

    Without a step in the address, return the newest localised step, or else the newest.
    """
    number = numbered(step)
    if number is None:
        return next((entry for entry in all_entries if entry.report is not None), next(iter(all_entries), None))
    tries = [entry for entry in all_entries if entry.step == number]
    wanted = [entry for entry in tries if attempt is None or str(entry.attempt) == attempt]
    return next(iter(wanted or tries), None)


def numbered(step: str | None) -> int | None:
    """Return the step number in an address as int, or None if it is invalid."""
    return int(step) if step is not None and step.isascii() and step.isdecimal() and len(step) < 16 else None


def step_row(entry: TokenStep, shown: TokenStep | None, attempts: int) -> table.TableRow:
    """Return a step as a table row with norm, threshold and cause; the step that is ``shown`` is highlighted.

    ``attempts``: number of attempts of the run.
    """
    report, appearance = entry.report, look(entry.cause)
    norm = "" if report is None else fmt.number(report.norm)
    threshold = "" if report is None else fmt.number(report.threshold)
    return table.TableRow(
        [
            table.text(fmt.step(entry.step), f"attempt {entry.attempt}" if attempts > 1 else ""),
            table.text(norm),
            table.text(threshold, quiet=True),
            table.mark(appearance.shape, appearance.colour, fmt.shorten(entry.cause, 40)),
            table.text("" if entry.culprits is None else fmt.step(entry.culprits)),
            table.text("" if entry.worst is None else fmt.percent(entry.worst)),
            table.text("" if report is None else fmt.shorten(_found(entry, report), 160), quiet=True),
            table.text(fmt.step(entry.far_out) if entry.far_out else "", quiet=True),
        ],
        opens=entry.key,
        chosen=shown is not None and shown.key == entry.key,
    )


def _found(entry: TokenStep, report: LocalisationReport) -> str:
    return report.why_not if entry.cause == NOT_LOCALISED else completeness(report)


METHODS = {
    "fd": "finite differences",
    "richardson": "finite differences, refined",
    "jvp": "forward differentiation",
    "reverse": "differentiation of the backward",
    "bisection": "bisection",
    "trace": "the first value that is not finite",
}
"""Descriptions of the methods of :class:`rlwatch.gradloc.report.Method`."""


def completeness(report: LocalisationReport) -> str:
    """Return ``complete to 0.02%`` or ``incomplete: 7% of the norm is not accounted for``; empty if unknown."""
    if report.gap is None or not np.isfinite(report.gap):
        return ""
    gap = fmt.percent(abs(report.gap))
    if report.complete:
        return f"complete to {gap}"
    return f"incomplete: {gap} of the norm {'too much' if report.gap > 0 else 'is not accounted for'}"


# The tokens of a step in sentences.


def headline(entry: TokenStep, usual: float | None) -> str:
    """Return the headline of a step: ``Step 4 766: gradient norm 12.3 (usual 0.600, threshold 1.90)``."""
    report = entry.report
    begin = f"Step {fmt.step(entry.step)}"
    if report is None:
        return begin
    if report.norm is None:
        return f"{begin}: gradient localised"
    if not math.isfinite(report.norm):
        return f"{begin}: the gradient was {fmt.number(report.norm)}"
    reference = [("usual", usual), ("threshold", report.threshold)]
    known = ", ".join(f"{name} {fmt.number(value)}" for name, value in reference if value is not None)
    return f"{begin}: gradient norm {fmt.number(report.norm)}" + (f" ({known})" if known else "")


def finding(entry: TokenStep, culprits: Sequence[Token]) -> list[str]:
    """Return sentences on a step: the culprit tokens' shares of the norm, or why there are none; then the method."""
    report = entry.report
    if report is None:
        return [_only_far_out(entry)]
    if report.why_not and not culprits:
        return [f"Not localised because {_sentence(report.why_not)}", _cost(entry)]
    found = METHODS.get(report.method, report.method)
    facts = [f"found by {found}" if found else "", completeness(report), _verified(culprits)]
    facts_line = ", ".join(filter(None, facts))
    sentences = [_who(report, culprits), f"{facts_line[:1].upper()}{facts_line[1:]}." if facts_line else ""]
    if report.why_not:
        sentences.append(f"Beyond these, not localised because {_sentence(report.why_not)}")
    return [sentence for sentence in [*sentences, _cost(entry)] if sentence]


def _only_far_out(entry: TokenStep) -> str:
    if not entry.far_out:
        return "No token data for this step."
    return (
        f"Its gradient was not localised. {fmt.plural(entry.far_out, 'token')} were outliers"
        f"{', some of them not finite' if entry.non_finite else ''}."
    )


def _who(report: LocalisationReport, culprits: Sequence[Token]) -> str:
    """Return verdict, cause and cure, a sentence each; for older records the message, or the shares in numbers."""
    if report.sentences:
        return " ".join(_sentence(_capital(text)) for text in report.sentences)
    shares = any(math.isfinite(token.numbers.get("share", math.nan)) for token in culprits)
    if report.message.strip() and (report.cause == "layer" or not shares):
        return _sentence(_capital(report.message))
    return share_words(culprits)


def _capital(text: str) -> str:
    """Capitalise text, unless it begins with the name of a layer."""
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    return text[:1].upper() + text[1:] if first.rstrip(",:").replace("-", "").isalpha() else text


def share_words(culprits: Sequence[Token]) -> str:
    """Return the culprit tokens' share of the gradient norm: ``One token holds 41% of it.`` or ``3 tokens hold 83% of
    it, …``.
    """
    if not culprits:
        return "No token stands out."
    shares = [token.numbers["share"] for token in culprits if math.isfinite(token.numbers.get("share", math.nan))]
    count = fmt.plural(len(culprits), "token")
    if not shares:
        return f"{count} to blame." if len(culprits) > 1 else "One token is to blame."
    if len(culprits) == 1:
        return f"One token holds {fmt.percent(shares[0])} of it."
    along, against = sum(share for share in shares if share > 0), sum(share for share in shares if share < 0)
    sides = f" ({fmt.percent(along)} along it, {fmt.percent(-against)} against)" if against else ""
    return f"{count} hold {fmt.percent(along + against)} of it{sides}, the worst {fmt.percent(max(shares))}."


def share_words_of(share: float) -> str:
    """Return the share of a token as ``41%``, or ``cancels 1.5%`` if it is negative: the token pushes against the
    gradient.

    >>> share_words_of(0.41), share_words_of(-0.015)
    ('41%', 'cancels 1.5%')
    """
    return f"cancels {fmt.percent(-share)}" if share < 0 else fmt.percent(share)


def _verified(culprits: Sequence[Token]) -> str:
    count = sum("own_norm" in token.numbers for token in culprits)
    return f"{fmt.plural(count, 'token')} verified by a backward of their own" if count else ""


def _cost(entry: TokenStep) -> str:
    report = entry.report
    if report is None or not (report.tokens or report.cost):
        return ""
    tokens = f"{fmt.plural(report.tokens, 'token')} in the step" if report.tokens else ""
    passes = [
        fmt.plural(int(report.cost[name]), f"{name.removesuffix('s')} pass", f"{name.removesuffix('s')} passes")
        for name in ("forwards", "backwards")
        if report.cost.get(name) and math.isfinite(report.cost[name])
    ]
    seconds = report.cost.get("seconds")
    took = f"took {fmt.duration(seconds)}" if seconds is not None else ""
    facts_line = "; ".join(filter(None, [tokens, " and ".join(passes), took]))
    return f"{facts_line[:1].upper()}{facts_line[1:]}." if facts_line else ""


def _sentence(text: str) -> str:
    clean = fmt.shorten(text, 400).strip()
    return clean if clean.endswith(".") else f"{clean}."


def place(token: Token) -> str:
    """Return the place of a token, ``sequence 3 · position 812``, with rank and micro-batch unless
    they are the first.
    """
    parts = [f"rank {token.rank}" if token.rank else "", f"micro-batch {token.microbatch}" if token.microbatch else ""]
    return " · ".join([*filter(None, parts), f"sequence {token.sequence}", f"position {fmt.step(token.position)}"])


def exactly(token: Token) -> list[tuple[str, str]]:
    """Return the name and value, to six digits, of every recorded number of ``token``."""
    known = [(name, token.numbers[name]) for name in NUMBERS if name in token.numbers]
    return [(LABELS.get(name, name), exact(value)) for name, value in known]


def exact(value: float) -> str:
    """Return a number as text with six significant digits.

    >>> exact(0.8), exact(-1234.5678), exact(2.5e-7), exact(float("inf"))
    ('0.8', '-1234.57', '2.5e-07', 'Inf')
    """
    return fmt.number(value, 6)


def top_layer(token: Token) -> str:
    """Return the layer with the largest share of the token's gradient, as ``layers.27 62 %``; empty if it was not
    computed.
    """
    if not token.layers:
        return ""
    layer, share = max(token.layers.items(), key=lambda item: item[1])
    return f"{fmt.shorten(layer, 30)} {fmt.percent(share)}"


def in_short(token: Token) -> str:
    """Return share, ratio and main layer of a culprit token on one line: ``share 41%, ratio 148, layers.27 62%``."""
    share, ratio = token.numbers.get("share"), token.numbers.get("ratio")
    facts_line = [] if share is None else [share_words_of(share) if share < 0 else f"share {fmt.percent(share)}"]
    facts_line += [f"ratio {fmt.number(ratio)}"] if ratio is not None else []
    return ", ".join(filter(None, [*facts_line, top_layer(token)]))
