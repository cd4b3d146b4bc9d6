"""The diagnosis in `scan` and `show`: why, how sure, in which order, and what to do first."""

from pathlib import Path

from cli_helpers import NOW, Invoke, strict

from rlwatch.cli.view_text import print_diagnosis
from rlwatch.diagnosis import diagnose
from rlwatch.records import Finding, RunInfo, Severity, StepRecord
from rlwatch.store.url import open_store


def found(kind, onset, severity=Severity.CRITICAL, message=""):
    return Finding("d", kind, severity, onset + 9, onset, message)


CRASH = [found("mismatch_growth", 412), found("reward_drop", 498, message="reward fell\x1b[31m")]


def test_the_likeliest_cause_comes_with_its_evidence_and_the_first_actions(capsys):
    """In time order, with the trainer's option names and how strong the evidence for each action is."""
    print_diagnosis(diagnose(CRASH, source="verl"))
    text = capsys.readouterr().out

    assert "most likely: Train-inference mismatch (high confidence" in text
    assert text.index("step     412") < text.index("step     498") < text.index("What to do, in order")
    assert "1. Roll back to the last good snapshot (measured)" in text
    assert "actor_rollout_ref.actor.optim.lr" in text
    assert "vllm_enable_sleep_mode" not in text


def test_control_characters_of_a_message_are_inert(capsys):
    """A message may hold anything."""
    print_diagnosis(diagnose(CRASH))

    assert "\x1b" not in capsys.readouterr().out


def test_everything_can_be_asked_for(capsys):
    """All actions; at first only a few."""
    said = diagnose(CRASH)
    print_diagnosis(said)
    few = capsys.readouterr().out
    print_diagnosis(said, everything=True)

    assert "and 8 more" in few
    assert f"{len(said.causes[0].actions)}. " in capsys.readouterr().out


def test_a_healthy_run_and_remarks_say_nothing(capsys):
    """No news."""
    print_diagnosis(diagnose([]))
    print_diagnosis(diagnose([found("clip_uninformative", 2, Severity.INFO)]))

    assert capsys.readouterr().out == ""


def test_where_no_cause_can_be_named_it_says_so(capsys):
    """And gives no orders."""
    print_diagnosis(diagnose([found("reward_drop", 90)], measured=["reward/mean"]))
    text = capsys.readouterr().out

    assert "cause unknown" in text
    assert "Not measured: trainer-engine mismatch" in text
    assert "What to do" not in text


def test_show_tells_the_cause_of_a_stored_run(tmp_path: Path, invoke: Invoke) -> None:
    """As text with the first actions, with --findings with all, and as JSON."""
    writer = open_store(tmp_path / "runs").open_run(RunInfo("r1", source="verl", created_at=NOW))
    writer.write([StepRecord(1, {"reward": 0.5}, NOW, seq=1), *CRASH])
    writer.close()
    text, everything = (
        invoke("show", "r1", "--store", tmp_path / "runs", *more).stdout for more in ((), ("--findings",))
    )
    document = strict(invoke("show", "r1", "--store", tmp_path / "runs", "--format", "json").stdout)

    assert "most likely: Train-inference mismatch (high confidence" in text
    assert "and 8 more" in text
    assert "10. " in everything
    assert document["diagnosis"]["causes"][0]["kind"] == "mismatch_growth"
    assert "verl" in document["diagnosis"]["causes"][0]["actions"][0]["options"]


def test_show_says_nothing_of_causes_where_nothing_was_found(tmp_path: Path, invoke: Invoke) -> None:
    """And its JSON says that nothing was."""
    open_store(tmp_path / "runs").open_run(RunInfo("r0", created_at=NOW)).close()

    assert "Diagnosis" not in invoke("show", "r0", "--store", tmp_path / "runs").stdout
    document = strict(invoke("show", "r0", "--store", tmp_path / "runs", "--format", "json").stdout)
    assert document["diagnosis"]["summary"] == "nothing was found"
