"""The post-mortem as HTML and Markdown: one file, complete, inert whatever a run contains."""

import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.diagnosis import diagnose
from rlwatch.records import Alert, AlertState, Command, CommandStatus, Event, Finding, Severity
from rlwatch.report import RunSummary, html, markdown
from rlwatch.report.gather import Chart, ReportCurve, TimelineEntry
from rlwatch.report.pages import blocks
from rlwatch.wording import for_markdown

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e`|[x](http://evil)\n# h"
FOUND = [
    Finding("d", "mismatch_growth", Severity.CRITICAL, 420, 412, "grew", metric="mismatch/k3"),
    Finding("d", "entropy_collapse", Severity.CRITICAL, 460, 455, "fell"),
    Finding("d", "reward_drop", Severity.CRITICAL, 500, 498, HOSTILE),
]


class Reader(HTMLParser):
    """Tags, attributes and texts of a page, and whether its tags nest."""

    VOID = ("meta", "line", "polyline", "circle")

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open, self.broken = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.broken.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def chart(values=(0.5, 0.4, 0.1), **more):
    steps = tuple(range(400, 400 + 50 * len(values), 50))
    return Chart("policy/entropy", "nats/token", "entropy", ReportCurve(steps, tuple(values), **more), 0.5)


def facts(**changes):
    said = diagnose(FOUND, source="trl/grpo")
    given = {
        "title": "run <b>7</b>",
        "status": "crashed",
        "head": {"project": HOSTILE, "last step": "500"},
        "diagnosis": said,
        "timeline": (
            TimelineEntry(412, "mismatch grew", "critical", 1),
            TimelineEntry(498, HOSTILE, "critical", 2),
            TimelineEntry(499, "x"),
        ),
        "charts": (chart(),),
        "culprits": ({"step": 455, "text": HOSTILE, "share": 0.81, "cause": "token ratio", "token_id": 7},),
        "findings": tuple(FOUND),
        "alerts": (
            Alert(
                "a", "r", "rule", "reward_drop", Severity.CRITICAL, AlertState.FIRING, 498, 500, HOSTILE, fired_at=1.0
            ),
        ),
        "commands": (
            Command("c", "r", "lower-lr", requested_by=HOSTILE, status=CommandStatus.DONE, finished_step=501),
        ),
        "events": (Event("exception", 505, {"error": HOSTILE}),),
        "config": {"optim.lr": "1e-06", "note": HOSTILE},
        "missing": ("staleness: needs staleness/mean",),
        "made_at": "2026-11-20",
    }
    return RunSummary(**(given | changes))


def test_the_page_tells_why_and_what_to_do_in_order():
    """Cause, chain, actions with the trainer's options, evidence and source."""
    text = " ".join(Reader(html(facts())).texts)

    assert text.index("Train-inference mismatch") < text.index("Roll back to the last good") < text.index("Timeline")
    assert "reward fell from 498" in text
    assert "vllm_importance_sampling_mode" in text
    assert "actor_rollout_ref" not in text
    assert "Source: rlwatch, paired toy GRPO runs" in text


def test_every_part_is_there():
    """Timeline, charts, culprits, findings, alerts, commands, configuration, what was not measured."""
    page = html(facts())
    heads = re.findall(r"<h2>(.*?)</h2>", page)

    assert heads == [
        "What happened",
        "What to do",
        "Timeline",
        "Charts",
        "Culprit tokens",
        "Findings",
        "Alerts",
        "Commands",
        "Configuration",
        "Not measured",
    ]
    assert page.count("<svg") == 1
    assert "staleness: needs staleness/mean" in page


def test_the_page_loads_nothing_and_runs_nothing():
    """No script, no address to fetch, and a policy that forbids both."""
    read = Reader(html(facts()))
    names = {name for name, _ in read.attributes}

    assert not {"script", "img", "link", "iframe", "object", "embed", "base", "form", "a"} & set(read.tags)
    assert not {name for name in names if name.startswith("on") or name in ("src", "href", "style")}
    assert any(value == "Content-Security-Policy" for _, value in read.attributes)
    assert any(name == "content" and value.startswith("default-src 'none'") for name, value in read.attributes)
    assert "url(" not in html(facts())
    assert "@import" not in html(facts())


def test_hostile_text_is_shown_as_text_everywhere():
    """Names, messages, tokens, errors, configuration."""
    page = html(facts())

    assert "<script" not in page
    assert "<img" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert page.count("alert(1)") >= 7


def test_tags_nest():
    """A browser need not guess."""
    read = Reader(html(facts()))

    assert read.broken == []
    assert read.open == []


def test_a_healthy_run_has_a_short_report():
    """Nothing to explain, nothing to do."""
    page = html(RunSummary(title="ok", status="finished", charts=(chart(),)))

    assert "No warning or critical findings." in page
    assert "What to do" not in page
    assert "<svg" in page


def test_an_empty_run_is_a_page_too():
    """Not one step."""
    assert "No warning or critical findings" in html(RunSummary(title="", status="running"))
    assert "No warning or critical findings" in markdown(RunSummary(title="", status="running"))


def test_a_guess_gives_no_orders():
    """Where no cause is plausible the advice is behind a fold, and says why."""
    said = diagnose([FOUND[2]], measured=["reward/mean"])
    page = html(facts(diagnosis=said))

    assert "No cause is certain enough to act on" in page
    assert "cause unknown" in page.lower()


def test_advice_that_was_withheld_is_named():
    """No reset in a collapse, and that it was left out."""
    due = Finding("d", "reset_due", Severity.CRITICAL, 950, 900, "due")
    said = diagnose([due, Finding("d", "grad_spike", Severity.WARNING, 945, 940, "spike")])

    assert "No reference reset: gradient spike at the same time" in html(facts(diagnosis=said))
    assert "no reference reset" in markdown(facts(diagnosis=said))


@pytest.mark.parametrize(
    "values",
    [(), (1.0,), (0.0, 0.0), (1e308, -1e308), (5e-324, 1e300), (1e-9, 1.0, 1.0, 1.0, 1e6), (-1.0, 1e-12)],
)
def test_extreme_values_have_finite_pictures(values):
    """No NaN, no infinity and nothing outside of the frame."""
    page = html(facts(charts=(chart(values, bad=((410, "NaN"), (420, "Inf"))),)))
    places = [float(n) for points in re.findall(r'points="([^"]*)"', page) for n in re.split(r"[ ,]", points)]

    assert "nan" not in re.sub(r"(finan|non-finite|NaN)", "", page[page.index("<svg") : page.index("</svg>")])
    assert all(-1 <= place <= 421 for place in places)


def test_a_value_that_is_not_finite_breaks_the_line_and_is_named():
    """Never drawn over."""
    page = html(facts(charts=(chart((0.5, 0.4, 0.3, 0.2), bad=((475, "NaN"),)),)))

    assert page.count("<polyline") == 2
    assert "NaN at step 475" in page


def test_a_spread_of_decades_is_logarithmic():
    """So that everything is seen, not only the spike."""
    flat = html(facts(charts=(chart((1.0,) * 30 + (1e5,)),)))
    lines = re.search(r'points="([^"]*)"', flat).group(1).split()
    low, high = float(lines[0].split(",")[1]), float(lines[-1].split(",")[1])

    assert low - high > 80


def test_onsets_are_numbered_in_chart_and_timeline():
    """The same numbers."""
    page = html(facts())

    assert re.findall(r'class="markno"[^>]*>(\d+)<', page) == ["1", "2"]
    assert re.findall(r'<span class="no">(\d+)</span>', page) == ["1", "2"]


def test_markdown_has_the_same_sections():
    """For an issue or a pull request."""
    text = markdown(facts())

    assert [line for line in text.splitlines() if line.startswith("## ")][:4] == [
        "## What happened",
        "## What to do",
        "## Timeline",
        "## Curves",
    ]
    assert "**Train-inference mismatch** (high confidence)" in text
    assert "`learning_rate`" in text
    assert "█" in text


def test_hostile_text_stays_text_in_markdown():
    """No heading, no link, no image, no HTML, no broken table."""
    text = markdown(facts())

    assert "<script" not in text
    assert "\n# h" not in text
    assert "](http://" not in text
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("| critical")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows if "entropy" in row or "mismatch" in row}) == 1


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_one_line_of_markdown_and_inert_html(text):
    """Whatever a model writes."""
    assert "\n" not in for_markdown(text)
    assert not re.search(r"<[a-zA-Z/!]", for_markdown(text))
    page = html(RunSummary(title="t", status="s", head={"x": text}))
    assert Reader(page).broken == []
    assert re.findall(r"<dd>(.*?)</dd>", page, re.DOTALL)[0].count("<") == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=80))
def test_blocks_draw_any_finite_curve(values):
    """Extremes included, no overflow."""
    drawn = blocks(range(len(values)), values)

    assert set(drawn) <= set("▁▂▃▄▅▆▇█ ")
    assert len(drawn) <= 60
    if max(values) > min(values) and math.isfinite(max(values) - min(values)):
        assert drawn.strip()


def test_long_tables_are_cut_and_say_so():
    """Thousands of findings do not make a page of megabytes."""
    many = tuple(Finding("d", "grad_spike", Severity.WARNING, n, n, "x" * 5000) for n in range(3000))
    page = html(facts(findings=many))

    assert len(page) < 200_000
    assert "2920 more not shown." in page
    assert "2920 more not shown." in markdown(facts(findings=many))
