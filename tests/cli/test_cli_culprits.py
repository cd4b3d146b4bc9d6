"""``rlwatch show --spikes``: culprits first, then far-out tokens, in as many columns as there is room for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import NOW, Invoke, strict

from rlwatch import open_store
from rlwatch.cli.console import columns_that_fit
from rlwatch.cli.show import culprit_rows, localisations, spike_rows
from rlwatch.records import CULPRITS, FAR_OUT, LOCALISED, RESPONSES, Event, RunInfo, SpikeBatch, StepRecord

BODY = {
    "norm": 7.97,
    "threshold": 0.8,
    "method": "fd",
    "gap": -4.8e-05,
    "complete": True,
    "cause": "token ratio",
    "why_not": "",
    "notes": ["the router was replayed"],
    "message": "one token at position 1017 of sequence 3 contributes 88% of the gradient norm",
    "culprits": [{"position": 1017}],
    "cost": {"forwards": 2, "backwards": 6, "seconds": 0.214},
}


def culprits(step: int = 12, rank: int = 0, **changes: Any) -> SpikeBatch:
    """Two culprits, the second not verified."""
    columns: dict[str, Any] = {
        "microbatch": np.array([1, 0]),
        "sequence": np.array([3, 0]),
        "position": np.array([1017, 12]),
        "token_id": np.array([2982, 46]),
        "logp": np.array([-4.86, -4.03]),
        "old_logp": np.array([-9.89, -8.97]),
        "ratio": np.array([153.0, 140.0]),
        "advantage": np.array([-1.29, math.nan]),
        "entropy": np.array([4.1, 4.09]),
        "contribution": np.array([29.7, -3.94]),
        "share": np.array([0.876, -0.116]),
        "cause": ["token ratio", "reward outlier"],
        "why": ["ratio", "advantage"],
        "verified": np.array([1, 0]),
        "own_norm": np.array([32.5, 0.0]),
        "layers": [json.dumps({"lm_head": 0.2, "model.layers.17": 0.8}), "{}"],
    }
    return SpikeBatch(step, columns | changes, reason=CULPRITS, rank=rank)


RESPONSE = SpikeBatch(12, {"position": np.arange(300), "contribution": np.full(300, 99.0)}, reason=RESPONSES)
FAR = SpikeBatch(11, {"token_id": np.array([5, 6]), "screen": np.array([0.5, 9.0])}, reason=FAR_OUT)


def shown(tmp_path: Path, invoke: Invoke, *items: Any) -> tuple[str, Any]:
    """What ``show --spikes`` prints of a run with these, as text and as JSON."""
    writer = open_store(tmp_path / "runs").open_run(RunInfo("r", created_at=NOW))
    writer.write([StepRecord(1, {"entropy": 1.0}, seq=1), *items])
    writer.close()
    arguments = ("show", "r", "--spikes", "--store", tmp_path / "runs")
    return invoke(*arguments).stdout, strict(invoke(*arguments, "--format", "json").stdout)


def test_culprits_come_before_far_out_tokens_and_responses_are_not_listed(tmp_path: Path, invoke: Invoke) -> None:
    """What is to blame first; a response is no spike."""
    text, document = shown(tmp_path, invoke, FAR, RESPONSE, culprits())

    assert [row["token_id"] for row in document["spikes"]] == [2982, 46, 6, 5]
    assert text.index("Culprit tokens") < text.index(" 2982 ") < text.index(" 46 ") < text.index("Outlier tokens")
    assert "99" not in text


def test_a_culprit_has_its_numbers_its_class_and_its_layer(tmp_path: Path, invoke: Invoke) -> None:
    """Shares as percentages of the norm; an own norm and a layer only where they were verified."""
    lines = shown(tmp_path, invoke, culprits())[0].splitlines()
    first, second = (next(line for line in lines if f" {token} " in line) for token in (2982, 46))

    assert first.split() == [
        "12", "3", "1017", "2982", "token", "ratio", "87.6%", "29.7", "32.5", "153", "-1.29", "-4.86", "-9.89", "4.1",
        "layers.17", "80%", "ratio",
    ]  # fmt: skip
    assert second.split()[4:9] == ["reward", "outlier", "-11.6%", "-3.94", "-"]
    assert "NaN" in second


def test_as_json_every_column_is_there(tmp_path: Path, invoke: Invoke) -> None:
    """Layers as an object; NaN by name."""
    row = shown(tmp_path, invoke, culprits())[1]["spikes"][1]

    assert row["advantage"] == "NaN"
    assert row["layers"] == {}
    assert set(culprits().columns) | {"step", "rank", "reason"} == set(row)


def test_what_a_localisation_said_is_a_line_with_details(tmp_path: Path, invoke: Invoke) -> None:
    """Norm, cause, method and gap; the sentence; what it cost."""
    text, document = shown(tmp_path, invoke, culprits(), Event(LOCALISED, 12, BODY, seq=2))

    assert "step 12: gradient norm 7.97 (threshold 0.8), token ratio; by fd, gap -4.8e-05, complete\n" in text
    assert "\n  one token at position 1017 of sequence 3 contributes 88%" in text
    assert "\n  note: the router was replayed" in text
    assert "\n  cost: 2 forwards, 6 backwards, 0.214 s" in text
    assert document["localisations"] == [{"step": 12, **BODY}]


def test_verdict_cause_and_cure_have_a_line_each(tmp_path: Path, invoke: Invoke) -> None:
    """And what else would have helped, how many tokens stand out, and who holds which part of the norm."""
    told = {
        "verdict": "response", "statement": "sequence 4 makes 97% of the gradient norm",
        "because": "its advantage is 60", "remedy": "with advantages clipped at 2 the norm goes from 412 to 1.3",
        "cures": [{"action": "with advantages clipped at 2", "after": 1.3}, {"action": "masked", "after": 1.2}],
        "count": 12, "explained": 1.0,
        "units": [{"name": "sequence 4", "share": 0.97}, {"name": "all others", "share": 0.03}],
    }  # fmt: skip
    text, _ = shown(tmp_path, invoke, culprits(), Event(LOCALISED, 12, BODY | told, seq=2))

    assert "response: token ratio" in text
    assert "Verdict: sequence 4 makes 97% of the gradient norm\n  Cause: its advantage is 60\n  Cure: with adv" in text
    assert "or masked to 1.2" in text
    assert "12 tokens stand out, those recorded hold 100% of what is unusual" in text
    assert "shares of the norm: sequence 4 97%, all others 3%" in text
    assert BODY["message"] not in text


def test_of_a_trace_the_chain_is_shown(tmp_path: Path, invoke: Invoke) -> None:
    """Which links were broken, the first one first."""
    body = {"norm": math.nan, "method": "trace", "trace": {"chain": ["parameters", "logp", "gradients"]}}
    text, _ = shown(tmp_path, invoke, Event(LOCALISED, 9, body, seq=2))

    assert "\n  not finite, in order of time: parameters, logp, gradients\n" in text


def test_why_tokens_were_not_localised_is_said(tmp_path: Path, invoke: Invoke) -> None:
    """And then no cause is given, and no method."""
    body = {"norm": math.nan, "threshold": None, "cause": "unexplained", "why_not": "the passes were not kept"}
    text, _ = shown(tmp_path, invoke, Event(LOCALISED, 9, body, seq=2))

    assert "step 9: gradient norm NaN\n  not localised: the passes were not kept\n" in text
    assert "Culprits" not in text


def test_an_event_of_another_writer_may_lack_anything(tmp_path: Path, invoke: Invoke) -> None:
    """Or know more."""
    text, _ = shown(tmp_path, invoke, Event(LOCALISED, None, {"more": 1, "culprits": None, "cost": None}, seq=2))

    assert "step -: gradient norm -\n" in text


def test_ranks_are_shown_where_there_are_several(tmp_path: Path, invoke: Invoke) -> None:
    """One rank needs no column."""
    assert " rank " not in shown(tmp_path / "one", invoke, culprits(), FAR)[0]
    assert " rank " in shown(tmp_path / "two", invoke, culprits(), culprits(rank=3))[0]


def test_texts_are_quoted_on_one_line(tmp_path: Path, invoke: Invoke) -> None:
    """A line break is a token, and no command to the terminal."""
    text, _ = shown(tmp_path, invoke, culprits(text=["\n\n", "\x1b[31m"], before=["a", ""], after=["", "b"]))

    assert r"'\n\n' 2982" in text
    assert r"'\x1b[31m' 46" in text


def test_the_newest_step_leads_and_order_within_it_is_kept() -> None:
    """Localisation ranks them by more than one column."""
    rows = culprit_rows([culprits(3), culprits(8), RESPONSE, FAR])

    assert [(row["step"], row["position"]) for row in rows] == [(8, 1017), (8, 12), (3, 1017), (3, 12)]
    assert len(culprit_rows([culprits()] * 40)) == 50
    assert spike_rows([culprits(), RESPONSE]) == []


def test_the_newest_localisations_lead() -> None:
    """Other events are none."""
    events = [Event(LOCALISED, step, {}, seq=step) for step in range(1, 4)]

    assert [found["step"] for found in localisations([*events, Event("note", 9)], most=2)] == [3, 2]


ROWS = [["1", "aaaa", "bb", "cccccc"], ["20", "a", "b", "c"]]
HEADERS = (">step", "long", ">x", "wide")


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (100, [0, 1, 2, 3]),
        (24, [0, 1, 2, 3]),
        (23, [0, 1, 3]),
        (21, [0, 1, 3]),
        (19, [0, 2, 3]),
        (10, [0, 2]),
        (0, [0]),
    ],
)
def test_a_terminal_gets_the_most_important_columns_it_has_room_for(width: int, shown: list[int]) -> None:
    """Each with two blanks; a narrow one may fit where a more important one does not."""
    assert columns_that_fit(HEADERS, ROWS, ["step", "wide", "long", "absent"], width) == shown


def test_wide_characters_take_two_cells() -> None:
    """As terminals show them."""
    assert columns_that_fit(("a", "b"), [["日本", "x"]], [], 9) == [0, 1]
    assert columns_that_fit(("a", "b"), [["日本", "x"]], [], 8) == [0]
