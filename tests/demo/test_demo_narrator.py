"""Every piece of news is told once, in words, and what others wrote stays text."""

import io
from dataclasses import replace

import pytest
from demo_world import RECIPE, Post, World, command, finding
from rich.console import Console

from rlwatch.demo.checks import DemoCheck
from rlwatch.demo.run import MILESTONE, PIPE_WIDTH, Narrator, console
from rlwatch.records import CommandStatus, Severity


@pytest.fixture
def screen():
    """A console into a string."""
    return Console(file=io.StringIO(), width=200)


def lines(screen):
    return [line.rstrip() for line in screen.file.getvalue().splitlines() if line.strip()]


def told(screen, *looks, posts=()):
    """What is printed about some looks, line by line."""
    narrator = Narrator(screen, RECIPE)
    for facts in looks:
        narrator.narrate(facts, posts)
    return lines(screen)


def test_findings_commands_alerts_and_deliveries_each_get_a_line(screen):
    """With the step, the severity and the words of the store."""
    printed = told(screen, World().facts(), posts=[Post()])

    assert "step   80  info  flat" in printed
    assert "step  235  critical  so it is" in printed
    assert "ann asks for reset-reference: why not" in printed
    assert "step   90  the trainer: done: KL 0.4 -> 0" in printed
    assert "step  240  the trainer: rejected: refused: entropy_collapse since step 212" in printed
    assert "step  235  ALERT critical entropy_collapse: rule rule fires" in printed
    assert "webhook received (signature right): [firing critical] all is lost" in printed


def test_nothing_is_reported_twice(screen):
    """Looking again at the same store is no news."""
    facts = World().facts()

    assert told(screen, facts, facts, posts=[Post()]) == told(
        Console(file=io.StringIO(), width=200), facts, posts=[Post()]
    )


def test_news_come_when_they_are_there(screen):
    """A command is told when asked and again when answered."""
    asked = World(steps=80, death=None, commands=[command(1, CommandStatus.QUEUED, None, "")], alerts=[])
    answered = replace(asked, commands=[command(1, CommandStatus.DONE, 90, "done")])

    first = told(screen, asked.facts())
    both = told(Console(file=io.StringIO(), width=200), asked.facts(), answered.facts())

    assert both == [*first, "step   90  the trainer: done: done"]


def test_a_forged_delivery_is_called_one(screen):
    """Whoever watches must see it."""
    printed = told(screen, World(steps=10, findings=[], commands=[], alerts=[]).facts(), posts=[Post(verified=False)])

    assert printed == ["webhook received (SIGNATURE WRONG): [firing critical] all is lost"]


def test_every_fifty_steps_a_line_says_how_the_run_is(screen):
    """Reward, entropy, KL: medians of the last rows."""
    calm = World(steps=MILESTONE + 3, death=None, findings=[], commands=[], alerts=[])

    assert told(screen, calm.facts()) == ["step   53  reward  0.23  entropy 1.1090  KL 0.400"]


def test_an_empty_run_is_starting(screen):
    """No numbers before there are any."""
    empty = World(steps=0, findings=[], commands=[], alerts=[], events=[], outbox=[])

    assert told(screen, empty.facts()) == []


def test_markup_in_a_message_is_text(screen):
    """A message is what somebody wrote, not layout."""
    facts = World(findings=[finding("note", Severity.INFO, 5, "[bold]loud[/bold] [/] :smile:")], commands=[]).facts()

    assert "step    5  info  [bold]loud[/bold] [/] :smile:" in told(screen, facts)


def test_the_introduction_names_the_slip_and_where_to_look(screen):
    """The viewer is told what will go wrong, and that it is the schedule."""
    Narrator(screen, RECIPE).introduce("sqlite:///runs", "demo-1", "http://127.0.0.1:1")
    text = " ".join(lines(screen))

    assert f"forgotten at step {RECIPE.range_test_step}" in text
    assert "grow by 9% a step" in text
    assert all(word in text for word in ("sqlite:///runs", "demo-1", "http://127.0.0.1:1"))


def test_without_a_dashboard_none_is_promised(screen):
    """No address that nobody serves."""
    Narrator(screen, RECIPE).introduce("sqlite:///runs", "demo-1", None)

    assert "dashboard" not in screen.file.getvalue()


def test_the_checklist_says_yes_and_no_with_the_evidence(screen):
    """Evidence with brackets stays whole."""
    Narrator(screen, RECIPE).conclude(
        [DemoCheck("it rained", True, "wet [very]"), DemoCheck("it shone", False, "dark")]
    )
    yes, no = lines(screen)[-2:]

    assert yes.split()[0] == "yes"
    assert "wet [very]" in yes
    assert no.split()[0] == "NO"
    assert "dark" in no


def test_the_progress_bar_lives_with_the_narrator(screen):
    """Started on entry, gone after exit, also when something raised."""
    narrator = Narrator(screen, RECIPE)
    with pytest.raises(ZeroDivisionError), narrator:
        1 / 0  # noqa: B018

    assert not narrator.progress.live.is_started


def test_a_pipe_gets_wide_lines(monkeypatch):
    """A log file needs no folded cells."""
    monkeypatch.setattr("sys.stdout", io.StringIO())

    assert console().width == PIPE_WIDTH
