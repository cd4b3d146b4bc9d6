"""OpenRLHF's console lines."""

from __future__ import annotations

import math

import pytest

from rlwatch.importers import read_log

ROW = "{'policy_loss': -0.01, 'actor_grad_norm': 1.5, 'kl': nan, 'reward': np.float64(0.25), 'mode': 'train'}"


@pytest.mark.parametrize(
    "before",
    [
        "",
        "✨ ",
        "(PPOTrainer pid=77, ip=10.0.0.2) INFO 06-01 10:00:00 ppo_trainer.py:551] ✨ ",
        "\x1b[36m(PPOTrainer pid=77)\x1b[0m Train:  3%|▎| 3/99 [00:10<05:00, 3.1s/it]",
    ],
)
def test_a_line_reads_whatever_stands_before_it(tmp_path, before):
    """The asynchronous trainer prints it without the star."""
    (tmp_path / "a.log").write_text(f"{before}Global step 12: {ROW}\n")
    [run] = read_log(tmp_path / "a.log")

    assert (run.format, run.source) == ("openrlhf-console", "openrlhf")
    assert [record.step for record in run.records] == [12]
    assert repr(run.records[0].metrics) == repr(
        {"policy_loss": -0.01, "actor_grad_norm": 1.5, "kl": math.nan, "reward": 0.25}
    )
    assert [(s.reason, s.lines) for s in run.skipped] == [("'mode' is not a number", (1,))]


def test_bad_steps_and_cut_rows_are_counted(tmp_path):
    """A console log is allowed some bad lines."""
    lines = [
        f"Global step 1: {ROW}",
        f"Global step -1: {ROW}",
        f"Global step 2.5: {ROW}",
        "Global step 3: {'kl': 0.5, 'rew",
    ]
    (tmp_path / "a.log").write_text("\n".join(lines))
    [run] = read_log(tmp_path / "a.log")

    assert [(r.step, len(r.metrics)) for r in run.records] == [(1, 4), (3, 1)]
    assert [s.lines for s in run.skipped[1:]] == [(2,), (3,), (4,)]
