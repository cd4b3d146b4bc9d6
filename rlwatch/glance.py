"""A summary of one run as a piece of HTML: for notebooks (Jupyter, VS Code, Colab), and for the head of a report.

The HTML has no script and makes no request; all data are escaped text. Its styles apply only inside the piece. Colours
come with their own background, so that a dark page can show a light piece.
"""

from __future__ import annotations

from rlwatch.diagnosis import Action, Diagnosis
from rlwatch.view import RunView
from rlwatch.wording import Markup, code_in, el, joined, sentence, step, words

LIGHT = """--ink:#1b1b1b; --soft:#626262; --paper:#ffffff; --card:#f6f7f8; --rule:#dfe2e5; --line:#0072B2;
  --warn:#B36B00; --bad:#C2410C; --good:#00704f; --link:#0b5cad;"""
DARK = """--ink:#e8e8e8; --soft:#a3a3a3; --paper:#141618; --card:#1d2023;
  --rule:#33373b; --line:#56B4E9; --warn:#E69F00; --bad:#ff7a45; --good:#3ecf9f; --link:#7ab8ff;"""
"""Colours, by the names that :data:`RULES` use."""
RULES = """p { margin:.4rem 0; max-width:80ch; }
.soft { color:var(--soft); font-size:.87rem; } .status { font-weight:600; }
.critical { color:var(--bad); } .warning { color:var(--warn); } .good { color:var(--good); }
.cause { background:var(--card); border-left:4px solid var(--line); padding:.8rem 1rem; border-radius:4px; }
.cause.strong { border-color:var(--bad); } .cause.plausible { border-color:var(--warn); }
.cause .name { font-size:1.1rem; font-weight:600; }
ol.do { padding-left:1.4rem; } ol.do > li { margin:.7rem 0; } ol.do b { font-weight:600; }
.badge { font-size:.75rem; border:1px solid var(--rule); border-radius:3px; padding:0 .35rem; margin-left:.4rem;
  color:var(--soft); white-space:nowrap; }
.badge.measured { color:var(--good); border-color:currentColor; }
.opt { display:block; font-size:.87rem; margin-top:.15rem; } .opt .who { color:var(--soft); margin-right:.4rem; }
code, .token { font:.85em/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; background:var(--card);
  padding:.05em .3em; border-radius:3px; overflow-wrap:anywhere; white-space:pre-wrap; }
.cause code { background:var(--paper); }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-size:.87rem; }
th { text-align:left; color:var(--soft); font-weight:500; }
th, td { padding:.28rem .7rem .28rem 0; border-bottom:1px solid var(--rule); vertical-align:top; }
td { overflow-wrap:anywhere; } td.n, th.n { text-align:right; white-space:nowrap; overflow-wrap:normal; }
td.w { overflow-wrap:normal; } td.what { min-width:16rem; }
.charts { display:grid; grid-template-columns:repeat(auto-fill,minmax(320px,1fr)); gap:1rem 1.4rem; }
figure { margin:0; } figcaption { font-size:.9rem; font-weight:600; overflow-wrap:anywhere; }
figcaption span { font-weight:400; color:var(--soft); font-size:.8rem; margin-left:.4rem; }
svg { width:100%; height:auto; display:block; }
svg text { font:10px system-ui,sans-serif; fill:var(--soft); }
svg .grid { stroke:var(--rule); stroke-width:1; }
svg .line { fill:none; stroke:var(--line); stroke-width:1.4; stroke-linejoin:round; }
svg .dot { fill:var(--line); } svg .level { stroke:var(--soft); stroke-dasharray:2 3; }
svg .bad { stroke:var(--bad); stroke-width:2; } svg .badword { fill:var(--bad); }
svg .mark { stroke:var(--soft); stroke-dasharray:4 3; } svg .mark.critical { stroke:var(--bad); }
svg .mark.warning { stroke:var(--warn); } svg .markno { font-weight:600; fill:var(--ink); }
details > summary { cursor:pointer; color:var(--link); margin:.5rem 0; }"""
"""Styles of causes, actions, tables and charts."""
SCOPE = "rlwatch-run"
STYLE = (
    f".{SCOPE} {{ {LIGHT} background:var(--paper); color:var(--ink); padding:.6rem .8rem; max-width:1080px;"
    ' font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif; }\n'
    f"@media (prefers-color-scheme: dark) {{ .{SCOPE} {{ {DARK} }} }}\n.{SCOPE} {{ {RULES} }}"
)
MOST_FINDINGS = 20
"""Largest number of findings that are shown: the newest ones."""


def framed(*children: str) -> str:
    """Return the HTML pieces ``children`` in one ``div`` together with its styles."""
    return el("div", el("style", Markup(STYLE)), *children, cls=SCOPE)


def glance(view: RunView) -> Markup:
    """Return a summary of a run as HTML: name, verdict, likeliest cause, recommended actions, and the
    newest findings.
    """
    verdict = view.verdict
    level = "good" if verdict.urgency is None else verdict.urgency.value
    found = list(view.findings[-MOST_FINDINGS:])[::-1]
    body = [
        el(
            "tr",
            table_cell("td", step(finding.step), True),
            table_cell("td", finding.severity.value, False),
            table_cell("td", words(finding.kind), False),
            table_cell("td", finding.message, False),
        )
        for finding in found
    ]
    headers = [table_cell("th", text, text == "step") for text in ("step", "severity", "what", "seen")]
    more = len(view.findings) - len(found)
    label = f"{len(found)} findings, newest first" + (f" ({more} older)" if more else "")
    table = el("table", el("thead", el("tr", *headers)), el("tbody", *body))
    return joined(
        el("div", el("b", view.name or view.run_id), cls="name"),
        el("p", view.headline, cls=f"status {level}"),
        el("p", verdict.text, cls="soft"),
        cause_block(view.explanation),
        actions_block(view.explanation),
        el("details", el("summary", label), el("div", table, cls="scroll")) if found else Markup(),
    )


# Why and what to do, as HTML.

FEW_ACTIONS = 4
"""Number of actions shown at once; further ones are in a collapsed section."""
SEES = {
    "measured": "measured by rlwatch on small paired runs",
    "published": "published in a paper",
    "reported": "reported in issues and logs",
    "folklore": "common practice without evidence",
}


def cause_block(diagnosis: Diagnosis) -> Markup:
    """Return the likeliest cause of a run's findings as HTML, with its confidence and reasons; or why none can be
    named.
    """
    if not diagnosis.causes:
        none = el("p", "No warning or critical findings.")
        return none if diagnosis.gap is None else el("div", none, el("p", sentence(diagnosis.gap.text), cls="soft"))
    first = diagnosis.causes[0]
    if not diagnosis.enough:
        return el("div", el("p", sentence(diagnosis.why_not)), cls="cause weak")
    return el(
        "div",
        el("div", f"{first.title} ", el("span", first.sure.words, cls="badge"), cls="name"),
        el("p", sentence(first.summary)),
        el("p", f"{first.sure.words.capitalize()}: {first.why}.", cls="soft"),
        cls=f"cause {first.sure.value}",
    )


def actions_block(diagnosis: Diagnosis) -> Markup:
    """Return the recommended actions against the likeliest cause as HTML, in order; empty if there are none.

    If no cause is certain enough, the actions are in a collapsed section.
    """
    if not diagnosis.causes or not diagnosis.causes[0].actions:
        return Markup()
    first = diagnosis.causes[0]
    withheld = el("p", sentence(first.withheld), cls="warning") if first.withheld else Markup()
    rest = [*map(_action, first.actions[FEW_ACTIONS:])]
    more = (
        el("details", el("summary", f"{len(rest)} more"), el("ol", *rest, cls="do", start=FEW_ACTIONS + 1))
        if rest
        else Markup()
    )
    order = joined(withheld, el("ol", *map(_action, first.actions[:FEW_ACTIONS]), cls="do"), more)
    if diagnosis.enough:
        return order
    fold = el("summary", "No cause is certain enough to act on. Common responses to the first finding:")
    return el("details", fold, order)


def _action(action: Action) -> Markup:
    lines = [
        el("span", el("span", trainer, cls="who"), code_in(text), cls="opt") for trainer, text in action.options.items()
    ]
    return el(
        "li",
        el("b", action.name),
        el("span", action.strength.value, cls=f"badge {action.strength.value}", title=SEES[action.strength.value]),
        el("div", action.what),
        *lines,
        el("div", f"{action.evidence} Source: {action.source}.", cls="soft"),
    )


# A cell of a table.

WORD = 16
"""Length in letters up to which a word is not broken over two lines."""
LEVELS = ("critical", "warning")


def table_cell(tag: str, text: str, numeric: bool) -> Markup:
    """Return a cell of an HTML table; severities are coloured and short words are not broken.

    Parameters
    ----------
    tag
        ``"th"`` or ``"td"``.
    text
        Content, which is escaped.
    numeric
        Whether the cell is aligned to the right.
    """
    level = text if tag == "td" and text in LEVELS else ""
    word = "w" if len(text) <= WORD and " " not in text else ""
    return el(tag, text, cls="n" if numeric else f"{level} {word}".strip())
