"""Are the right knobs blamed? Every run of the corpus that failed of a planted cause, scanned as a log and diagnosed.

    python -m benchmarks.forecast fetch --out build/corpus --from FOLDER_OR_URL
    python benchmarks/causes.py build/corpus --out build/causes.csv    # about 15 minutes on one core
    python benchmarks/causes.py benchmarks/forecast/sample             # the runs that the repository keeps

A run's planted knobs are those that its fault turned, as its recipe wrote them down: most faults turn the learning rate
too, so that they break a run at all. Two ways to be right are counted: ``planted`` names any of them, ``main`` the one
the recipe is named after. What is called a symptom ("entropy rose; trigger unknown") is right of neither
and counted as ``symptom``, and so is a run without a cause that is at least plausible, as ``unknown``. ``wrong`` is a
cause that is none of the planted knobs, ``wrong strong`` one that is called strong as well; ``late`` is a first answer
that begins after the first critical onset. Two answers are of no one knob: updates that were too large are right of any
knob that sizes an update, a reward that fell by itself of the reward function and of the data.

Beside what ``rlwatch scan`` says: the same findings diagnosed without knobs (``findings only``), with footprints but
nothing that is logged of a knob (``nothing logged``), and whoever always says ``learning rate``.

Weights of the ranking were chosen with the misses on the first recipes in view (``read``); those of the others, and of
all of TRL, nobody read (``unread``). Which footprints there are was chosen by a table of all recipes.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlwatch.diagnosis import ChangeSource, Confidence, Diagnosis, KnobTracker, Nature, diagnose
from rlwatch.forecast.tables import read_runs
from rlwatch.records import Finding, Severity, StepRecord
from rlwatch.scanner import scan

LABELS = Path(__file__).parent / "forecast" / "corpus-labels.csv"
FAILED = ("event", "early")
"""Classes of runs that failed; a fault that came to nothing has no cause to name."""
READ_UP_TO = "nan_batch"
"""The last of the recipes, in alphabetical order, whose misses were read while weights were chosen."""
LOWEST_RATE = 1.5
"""Times the learning rate from which a fault is said to have turned it."""

KNOBS: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("lr", "lr_factor", "schedule", "learning rate"),
    "kl_coefficient": ("beta", "kl", "reference_noise", "reference_reset", "kl weight"),
    "weight_sync": ("stale", "engine staleness"),
    "rollout_engine": (
        "engine", "noise", "fresh_noise", "temperature", "end_bias", "share", "truncation", "old", "engine noise",
        "engine temperature",
    ),
    "clip_range": ("clip", "clip_low", "clip_high", "grad_clip", "clip range"),
    "entropy_bonus": ("entropy", "entropy weight"),
    "advantages": ("advantage", "advantage_shift", "positive_weight", "negative_weight", "positive advantages"),
    "reward_function": (
        "partial", "right", "length_bonus", "filler_bonus", "format_bonus", "magic", "flipped", "stuck", "wrong_key",
        "reward sign", "random reward", "constant reward", "length reward", "format reward",
    ),
    "data": ("task", "k", "extra", "digits", "distinct", "prompts", "group", "hard data", "narrow data"),
    "optimiser": ("trainable", "mu", "minibatches"),
    "numerics": (
        "loss_scale", "skip_nonfinite", "half_entropy", "advantage_eps", "bad_batch", "half gradients", "lost weight",
    ),
}  # fmt: skip
"""Knob of the catalogue -> knobs of the testbed, and kinds of faults of the TRL runs."""
KNOB_OF = {name: knob for knob, names in KNOBS.items() for name in names}

SEVERAL: Mapping[str, frozenset[str]] = {
    "update_size": frozenset({"learning_rate", "clip_range", "optimiser", "weight_sync", "kl_coefficient"}),
    "environment": frozenset({"reward_function", "data"}),
}
"""Answer that is of no one knob -> the knobs of which it is right."""

MAIN: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("lr_constant", "lr_step", "lr_ramp", "lr_spike"),
    "clip_range": ("no_clip", "clip_switch"),
    "advantages": ("negative_weight", "advantage_shift", "advantage_uncentred", "positive_only", "negative_only"),
    "weight_sync": ("stale_level", "stale_growing"),
    "rollout_engine": (
        "mismatch_level", "mismatch_drift", "mismatch_fresh", "quantised", "temperature", "one_engine", "end_banned",
    ),
    "entropy_bonus": ("entropy_up", "entropy_down"),
    "kl_coefficient": ("kl_k1", "kl_k3", "kl_sign", "reference_drift"),
    "numerics": ("fp16_overflow", "fp16_skip", "log_zero", "nan_batch", "zero_division", "lost_weight"),
    "reward_function": (
        "hack_magic", "hack_filler", "hack_length", "hack_format", "sign_flip", "verifier_stuck", "verifier_noisy",
        "verifier_random", "wrong_key", "impossible", "length_collapse", "nan_batch",
    ),
    "data": ("data_hard", "data_narrow"),
}  # fmt: skip
"""Knob of the catalogue -> recipes named after it; a NaN reward is of the reward function and of numerics."""


@dataclass(frozen=True)
class Planted:
    """The knobs that a run's fault turned, and those of them that its recipe is named after."""

    all: frozenset[str]
    main: frozenset[str]


def planted(recipe: str, config: Mapping[str, Any]) -> Planted:
    """By the run's record."""
    if "changes" in config:
        base = config["knobs"]
        turned = {
            KNOB_OF[name]
            for change in config["changes"]
            for name, value in change["knobs"].items()
            if base[name] != value and not (name == "lr_factor" and value < LOWEST_RATE)
        }
    else:
        turned = {
            KNOB_OF[fault["kind"]]
            for fault in config["faults"]
            if not (fault["kind"] == "learning rate" and fault["strength"] < LOWEST_RATE)
        }
        turned |= {"clip_range"} if config["epsilon"] > 1 else set()
    name = recipe.removeprefix("trl_")
    main = {knob for knob, recipes in MAIN.items() if name in recipes} or turned  # a switch of several is all of them
    return Planted(frozenset(turned | main), frozenset(main))


@dataclass(frozen=True)
class Said:
    """An answer: knobs of the causes in order ("" where a cause is of none), none where no cause is plausible."""

    knobs: tuple[str, ...] = ()
    strong: bool = False
    symptom: bool = False
    late: bool = False

    @property
    def first(self) -> str:
        """Of the likeliest cause."""
        return self.knobs[0] if self.knobs else ""

    @property
    def named(self) -> tuple[str, ...]:
        """The first three knobs named."""
        return tuple(dict.fromkeys(knob for knob in self.knobs if knob))[:3]

    def first_of(self, knobs: frozenset[str]) -> bool:
        """True if the likeliest cause is one of ``knobs``."""
        return bool({self.first, *SEVERAL.get(self.first, ())} & knobs)

    def names(self, knobs: frozenset[str]) -> bool:
        """True if one of the first three is."""
        return any({knob, *SEVERAL.get(knob, ())} & knobs for knob in self.named)


def said(diagnosis: Diagnosis, findings: Sequence[Finding]) -> Said:
    """By a diagnosis."""
    if not diagnosis.enough:
        return Said()
    critical = [finding.onset_step for finding in findings if finding.severity is Severity.CRITICAL]
    first = diagnosis.causes[0]
    return Said(
        tuple(cause.knob for cause in diagnosis.causes),
        first.sure is Confidence.STRONG,
        diagnosis.nature is Nature.SYMPTOM,
        bool(critical) and first.onset_step > min(critical),
    )


def answers(rows: Sequence[tuple[int, dict[str, float]]]) -> dict[str, Said]:
    """Of each way to answer."""
    report = scan([StepRecord(step, metrics) for step, metrics in rows])
    tracker = KnobTracker()
    until = max((finding.step for finding in report.findings), default=0)
    for step, metrics in rows:
        if step <= until:
            tracker.update(step, metrics)
    footprints = [turn for turn in tracker.turns if turn.source in (ChangeSource.INFERRED, ChangeSource.MOVED)]
    found, starts = report.findings, {1: rows[0][0]}
    unlogged = diagnose(found, starts=starts, turns=footprints, measured=report.metrics)
    return {
        "rlwatch scan": said(report.diagnosis, found),
        "nothing logged": said(unlogged, found),
        "findings only": said(diagnose(found, starts=starts), found),
        "learning rate": Said(("learning_rate",)),
    }


COUNTED = (
    "unknown", "symptom", "planted 1", "planted 3", "main 1", "main 3", "wrong", "strong", "wrong strong", "late",
)  # fmt: skip


def counted(answer: Said, truth: Planted) -> dict[str, bool]:
    """What an answer counts as."""
    return {
        "unknown": not answer.knobs,
        "symptom": answer.symptom,
        "planted 1": answer.first_of(truth.all),
        "planted 3": answer.names(truth.all),
        "main 1": answer.first_of(truth.main),
        "main 3": answer.names(truth.main),
        "wrong": bool(answer.knobs) and not answer.symptom and not answer.first_of(truth.all),
        "strong": answer.strong,
        "wrong strong": answer.strong and not answer.symptom and not answer.first_of(truth.all),
        "late": answer.late,
    }


def judged(corpus: Path) -> Iterable[dict[str, Any]]:
    """One row a run and way to answer."""
    table = read_runs(corpus)
    outcomes = {row["run"]: row["class"] for row in csv.DictReader(LABELS.open(encoding="utf-8"))}
    known = {row["run"]: row for file in corpus.glob("*-runs.parquet") for row in pq.read_table(file).to_pylist()}
    wanted = [
        i for i, run in enumerate(table.runs) if outcomes.get(run) in FAILED and known[run]["family"] != "healthy"
    ]
    for i in wanted:
        run = table.runs[i]
        recipe = known[run]["recipe"]
        truth = planted(recipe, json.loads(known[run]["config"]))
        for way, answer in answers(list(table.stream(i))).items():
            yield {
                "run": run,
                "recipe": recipe,
                "half": "read" if recipe <= READ_UP_TO else "unread",
                "way": way,
                "planted": " ".join(sorted(truth.all)),
                "said": " ".join(knob or "-" for knob in answer.knobs),
                **{name: int(value) for name, value in counted(answer, truth).items()},
            }


def shares(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Lines of a table: shares by ``key`` and way."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row[key], row["way"]].append(row)
    head = f"| {key} | runs | way | {' | '.join(COUNTED)} |"
    lines = [head, f"|{'---|' * (len(COUNTED) + 3)}"]
    for (name, way), of_it in groups.items():
        told = (f"{sum(row[each] for row in of_it) / len(of_it):.2f}" for each in COUNTED)
        lines.append(f"| {name} | {len(of_it)} | {way} | {' | '.join(told)} |")
    return lines


def main() -> None:
    """Judge, print the tables, write the answers."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("corpus", type=Path, help="folder of shards, or the sample")
    options.add_argument("--out", type=Path, help="write every answer to this CSV")
    given = options.parse_args()
    rows = []
    for row in judged(given.corpus):
        rows.append(row)
        if len(rows) % 100 == 0:
            print(f"{len(rows)} answers", flush=True)
    if given.out:
        with given.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    whole = [row | {"half": "all"} for row in rows]
    print("\n".join(shares([*whole, *rows], "half")))
    ours = [row for row in rows if row["way"] == "rlwatch scan"]
    print("\n".join(["", *shares(ours, "recipe")]))
    wrong = Counter(row["recipe"] for row in ours if row["wrong strong"])
    print(f"\nwrong strong claims: {dict(wrong) or 'none'}")


if __name__ == "__main__":
    main()
