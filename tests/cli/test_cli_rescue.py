"""rescue: a policy rehearsed on a recorded run, and the ledger of one that acted."""

from __future__ import annotations

from pathlib import Path

from cli_helpers import Invoke, strict

import rlwatch


def record(store: Path, *, collapses: bool) -> None:
    """A run that climbs to .7 and, perhaps, loses all of it at 110; with the entries of a rescue."""
    with rlwatch.init(store=store, name="night") as run:
        for step in range(1, 161):
            reward = 0.02 if collapses and step >= 110 else 0.3 + 0.4 * min(step / 60, 1.0) + 0.01 * (step % 3)
            run.log({"reward": reward, "entropy": 1.0 if reward > 0.3 else 2.5, "grad_norm": 1.0}, step=step)
        if collapses:
            body = {"policy": "rescue", "stage": "watching", "why": "reward_drop since step 110", "outcome": "dry run"}
            run.event("rescue", 118, **body, evidence={"level": 0.7, "last_good": 100})
            report = {"summary": "weights are those after step 100"}
            run.event("command", 120, command="rollback", args={"to": "last-good"}, by="policy:rescue", report=report)
            run.event("command", 130, command="pause", args={}, by="ann", report={})


def test_a_rehearsal_shows_what_would_have_been_done(tmp_path: Path, invoke: Invoke) -> None:
    """Held, restored, and the steps that were trained in vain."""
    record(tmp_path, collapses=True)

    said = invoke("rescue", "rehearse", "night", "--store", tmp_path).stdout
    found = strict(invoke("rescue", "rehearse", "night", "--store", tmp_path, "--format", "json").stdout)

    assert "rollback" in said
    assert "without it the run went on for" in said
    assert [act["do"] for act in found["acts"]] == ["hold", "rollback"]
    assert found["wasted"] is True


def test_a_sound_run_is_left_alone(tmp_path: Path, invoke: Invoke) -> None:
    """One line each."""
    record(tmp_path, collapses=False)

    assert "no rescue would have begun" in invoke("rescue", "rehearse", "night", "--store", tmp_path).stdout
    assert "no rescue began" in invoke("rescue", "ledger", "night", "--store", tmp_path).stdout


def test_the_ledger_lists_decisions_and_commands_of_the_policy_alone(tmp_path: Path, invoke: Invoke) -> None:
    """With why and evidence; what a person sent is in `audit`."""
    record(tmp_path, collapses=True)

    said = invoke("rescue", "ledger", "night", "--store", tmp_path).stdout
    entries = strict(invoke("rescue", "ledger", "night", "--store", tmp_path, "--format", "json").stdout)

    assert "watching (dry run)" in said
    assert [(entry["step"], entry["what"]) for entry in entries] == [
        (118, "watching (dry run)"),
        (120, "rollback to=last-good"),
    ]
    assert entries[1]["evidence"] == "weights are those after step 100"
