"""``rlwatch replay FILE --model DIR``: compute a recorded training step again, and compare its values with the
recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import print_json, print_table, print_text
from rlwatch.cli.options import FormatOption, OutputFormat, examples
from rlwatch.errors import ConfigError
from rlwatch.records import JSON
from rlwatch.wording import number, step

if TYPE_CHECKING:
    from rlwatch.gradloc.recording import Figure, RankRecording, Replayed

EPILOG = examples(
    "rlwatch replay steps/step00001200-rank0.npz --model checkpoint-1199",
    "rlwatch replay steps/step00001200-rank*.npz --model checkpoint-1199 --device cuda",
    "rlwatch replay steps/step00001200-rank0.npz --model checkpoint-1199 --format json",
)
MOST_LAYERS = 8
"""Number of layers printed, in addition to those that differ."""


def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files of one recorded step, one per rank.")],
    *,
    model: Annotated[
        Path,
        typer.Option("--model", metavar="DIR", help="Checkpoint directory of the model before that step."),
    ],
    device: Annotated[str, typer.Option("--device", help="Device: cpu, cuda, cuda:1, ...")] = "cpu",
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Recompute a recorded step and compare its gradient norm, layers and token contributions with the recording.

    Exit code 0: they agree as far as rounding goes, 1: they differ, 2: the files or the model cannot be read.
    """
    for needed in ("torch", "transformers"):
        if find_spec(needed) is None:
            raise ConfigError(f"replaying a step needs {needed}; run: pip install {needed}")
    from rlwatch.gradloc.recording import load_model, load_recording
    from rlwatch.gradloc.recording import replay as run_again

    recordings = [load_recording(path) for path in files]
    found = run_again(recordings, load_model(model, recordings[0].dtype, device))
    if output is OutputFormat.JSON:
        print_json(_document(recordings[0], found))
    else:
        _print(recordings[0], found)
    if not found.agrees:
        raise typer.Exit(1)


def _document(recording: RankRecording, found: Replayed) -> dict[str, JSON]:
    return {
        "step": recording.step,
        "agrees": found.agrees,
        "same_parameters": found.same_parameters,
        "gap": found.gap,
        "recorded_gap": recording.figures["gap"],
        "notes": list(found.notes),
        "figures": [
            {"name": f.name, "recorded": f.recorded, "recomputed": f.recomputed, "agrees": f.agrees}
            for f in found.figures
        ],
    }


def _print(recording: RankRecording, found: Replayed) -> None:
    words = {True: "same as the recording", False: "DIFFERENT from the recording", None: "not compared (sharded)"}
    print_text(f"step {step(recording.step)}, {recording.dtype}", style="bold")
    print_text(f"  parameters {words[found.same_parameters]}")
    print_text(f"  gap        recorded {number(recording.figures['gap'])}, recomputed {number(found.gap)}")
    for note in found.notes:
        print_text(f"  note       {note}")
    print_table(
        ("figure", ">recorded", ">recomputed", ""),
        [(f.name, _exact(f.recorded), _exact(f.recomputed), _verdict(f)) for f in shown(found.figures)],
    )
    verdict = "all figures agree" if found.agrees else "figures differ"
    print_text(verdict, style="green" if found.agrees else "bold red")


def shown(figures: Sequence[Figure]) -> list[Figure]:
    """Return the compared values without those of small layers that agree with the recording."""
    shares = [figure for figure in figures if figure.name.startswith("share of ")]
    hidden = {figure.name for figure in shares[MOST_LAYERS:] if figure.agrees}
    return [figure for figure in figures if figure.name not in hidden]


def _verdict(figure: Figure) -> tuple[str, str]:
    if figure.agrees is None:
        return "not compared", "dim"
    return ("agrees", "green") if figure.agrees else ("differs", "bold red")


def _exact(value: float | None) -> str:
    """Format with six digits, to show agreement."""
    return "-" if value is None else f"{value:.6g}"
