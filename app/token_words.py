"""What was found of a step's tokens, in sentences (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import format as fmt
from .token_rows import LABELS, NUMBERS, Token
from .token_steps import METHODS, Entry, Report, completeness


def headline(entry: Entry, usual: float | None) -> str:
    """``Step 4 766: gradient norm 12.3 (usual 0.600, threshold 1.90)``."""
    report = entry.report
    begin = f"Step {fmt.step(entry.step)}"
    if report is None:
        return begin
    if report.norm is None:
        return f"{begin}: gradient localised"
    if not math.isfinite(report.norm):
        return f"{begin}: the gradient was {fmt.number(report.norm)}"
    beside = [("usual", usual), ("threshold", report.threshold)]
    known = ", ".join(f"{name} {fmt.number(value)}" for name, value in beside if value is not None)
    return f"{begin}: gradient norm {fmt.number(report.norm)}" + (f" ({known})" if known else "")


def finding(entry: Entry, culprits: Sequence[Token]) -> list[str]:
    """Who holds how much of the norm, or why nobody is named; then how that was found."""
    report = entry.report
    if report is None:
        return [_only_far_out(entry)]
    if report.why_not and not culprits:
        return [f"Not localised because {_sentence(report.why_not)}", _cost(entry)]
    found = METHODS.get(report.method, report.method)
    facts = [f"found by {found}" if found else "", completeness(report), _verified(culprits)]
    told = ", ".join(filter(None, facts))
    sentences = [_who(report, culprits), f"{told[:1].upper()}{told[1:]}." if told else ""]
    if report.why_not:
        sentences.append(f"Beyond these, not localised because {_sentence(report.why_not)}")
    return [sentence for sentence in [*sentences, _cost(entry)] if sentence]


def _only_far_out(entry: Entry) -> str:
    if not entry.far_out:
        return "Nothing is recorded about the tokens of this step."
    return (
        f"Its gradient was not localised. {fmt.plural(entry.far_out, 'token')} were far out"
        f"{', some of them not finite' if entry.non_finite else ''}."
    )


def _who(report: Report, culprits: Sequence[Token]) -> str:
    """In numbers; where there are none, or no token is to blame, in the words of the localisation."""
    shares = any(math.isfinite(token.numbers.get("share", math.nan)) for token in culprits)
    if report.message.strip() and (report.cause == "layer" or not shares):
        name = not report.message.split(maxsplit=1)[0].isalpha()  # a layer is called as it is called
        return _sentence(report.message if name else report.message[:1].upper() + report.message[1:])
    return blame(culprits)


def blame(culprits: Sequence[Token]) -> str:
    """``One token holds 41 % of it.`` · ``3 tokens hold 83 % of it, the worst 41 %.``"""
    if not culprits:
        return "No token stands out."
    shares = [token.numbers["share"] for token in culprits if math.isfinite(token.numbers.get("share", math.nan))]
    count = fmt.plural(len(culprits), "token")
    if not shares:
        return f"{count} to blame." if len(culprits) > 1 else "One token is to blame."
    if len(culprits) == 1:
        return f"One token holds {fmt.percent(shares[0])} of it."
    return f"{count} hold {fmt.percent(sum(shares))} of it, the worst {fmt.percent(max(shares))}."


def _verified(culprits: Sequence[Token]) -> str:
    count = sum("own_norm" in token.numbers for token in culprits)
    return f"{fmt.plural(count, 'token')} verified by a backward of their own" if count else ""


def _cost(entry: Entry) -> str:
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
    told = "; ".join(filter(None, [tokens, " and ".join(passes), took]))
    return f"{told[:1].upper()}{told[1:]}." if told else ""


def _sentence(text: str) -> str:
    clean = fmt.shorten(text, 400).strip()
    return clean if clean.endswith(".") else f"{clean}."


def place(token: Token) -> str:
    """``sequence 3 · position 812``, and the rank and micro-batch where they are not the first."""
    parts = [f"rank {token.rank}" if token.rank else "", f"micro-batch {token.microbatch}" if token.microbatch else ""]
    return " · ".join([*filter(None, parts), f"sequence {token.sequence}", f"position {fmt.step(token.position)}"])


def exactly(token: Token) -> list[tuple[str, str]]:
    """Name and value, six digits, of every number known of ``token``."""
    known = [(name, token.numbers[name]) for name in NUMBERS if name in token.numbers]
    return [(LABELS.get(name, name), exact(value)) for name, value in known]


def exact(value: float) -> str:
    """Six significant digits, without zeros that say nothing.

    >>> exact(0.8), exact(-1234.5678), exact(2.5e-7), exact(float("inf"))
    ('0.8', '−1\u202f234.57', '2.5e−7', 'Inf')
    """
    mantissa, e, power = fmt.number(value, 6).partition("e")
    return (mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa) + e + power


def top_layer(token: Token) -> str:
    """``layers.27 62 %``; empty where its own gradient was not taken."""
    if not token.layers:
        return ""
    layer, share = max(token.layers.items(), key=lambda item: item[1])
    return f"{fmt.shorten(layer, 30)} {fmt.percent(share)}"


def in_short(token: Token) -> str:
    """``share 41 %, ratio 148, layers.27 62 %``: a culprit on one line."""
    share, ratio = token.numbers.get("share"), token.numbers.get("ratio")
    told = [f"share {fmt.percent(share)}"] if share is not None else []
    told += [f"ratio {fmt.number(ratio)}"] if ratio is not None else []
    return ", ".join(filter(None, [*told, top_layer(token)]))
