"""``rlwatch report RUN``: write the post-mortem of a run, or of a log, to one file."""

from __future__ import annotations

import json
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.cli.console import print_text
from rlwatch.cli.options import (
    MapOption,
    ReadAsOption,
    RunOfLogOption,
    StoreOption,
    TrainerOption,
    examples,
    naming_of,
    no_log_either,
    opened,
    require_directory,
)
from rlwatch.errors import ConfigError

if TYPE_CHECKING:
    from rlwatch.report import RunSummary

EPILOG = examples(
    "rlwatch report math-7b-s3",
    "rlwatch report math-7b-s3 --format md -o post-mortem.md",
    "rlwatch report train.log -o report.html",
    "rlwatch report math-7b-s3 --format space -o space && hf upload me/post-mortem space --repo-type space",
)


LONGEST_TITLE = 60
"""Most characters in the title of a Hugging Face Space."""


class ReportFormat(StrEnum):
    """Form in which a report is written: HTML, Markdown, or a Hugging Face Space."""

    HTML = "html"
    MD = "md"
    SPACE = "space"


def report(
    run: Annotated[str, typer.Argument(help="Run (id, name or unique prefix) or path of a log.")],
    *,
    kind: Annotated[
        ReportFormat,
        typer.Option("--format", help="HTML with charts, Markdown, or a directory for a static Hugging Face Space."),
    ] = ReportFormat.HTML,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Output file (Space: directory); - for stdout. Default: RUN-report.html.",
        ),
    ] = None,
    of_log: RunOfLogOption = None,
    read_as: ReadAsOption = None,
    source: TrainerOption = "",
    mapped: MapOption = None,
    store: StoreOption = None,
) -> None:
    """Write a post-mortem (what happened, causes, actions) as one self-contained file without secrets of the
    configuration.

    The HTML embeds its charts and has no script. Model output is shown as text.
    """
    facts = _of_log(Path(run), of_log, read_as, source, mapped) if Path(run).is_file() else _of_run(run, store)
    from rlwatch.report import html, markdown

    if kind is ReportFormat.SPACE:
        _write_space(output or Path(f"{_file_name(facts.title)}-space"), facts.title, html(facts))
        return
    text = html(facts) if kind is ReportFormat.HTML else markdown(facts)
    if output == Path("-"):
        typer.echo(text, nl=False)
        return
    target = output or Path(f"{_file_name(facts.title)}-report.{kind.value}")
    _write(target, text)
    print_text(f"{target}  ({len(text) // 1024 + 1} KiB)")


def _of_run(reference: str, store: str | None) -> RunSummary:
    from rlwatch.analysis.rows import describe
    from rlwatch.report import facts_of_run

    now = time.time()
    with opened(store) as source:
        with no_log_either(reference):
            info = find_run(source, reference)
        return facts_of_run(source, info.run_id, now=now, status=str(describe(source, info, now)["status"]))


def _of_log(log: Path, run: str | None, read_as: str | None, source: str, mapped: list[str] | None) -> RunSummary:
    from rlwatch.errors import ImportFormatError
    from rlwatch.importers import read_log
    from rlwatch.report import facts_of_report
    from rlwatch.scanner import replay

    runs = read_log(log, run=run, format=read_as, naming=naming_of(mapped))
    if len(runs) != 1:
        names = ", ".join(repr(one.name) for one in runs[:10]) or "none"
        raise ImportFormatError(str(log), f"holds {len(runs)} runs; name one with --run: {names}")
    return facts_of_report(replay(runs[0], source=source), runs[0], now=time.time())


def _file_name(title: str) -> str:
    """Return the last part of a title as a file name: letters, digits, dots and dashes."""
    name = Path(title).name
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in name)[:80].strip(".-") or "run"


def _write_space(target: Path, title: str, page: str) -> None:
    """Write the directory of a static Space. Raises ``ConfigError`` if it would overwrite another README."""
    about, index = target / "README.md", target / "index.html"
    if str(target) == "-":
        raise ConfigError("a Space is a directory of two files; -o - cannot hold it, give -o DIRECTORY")
    if about.exists() and not index.exists():
        raise ConfigError(f"{target} has a README.md and is no Space; give another directory with -o")
    target.mkdir(parents=True, exist_ok=True)
    front = {"title": _file_name(title)[:LONGEST_TITLE], "sdk": "static", "pinned": False}
    header = "".join(f"{name}: {json.dumps(value)}\n" for name, value in front.items())
    _write(about, f"---\n{header}---\n\nThe post-mortem of a training run, written by rlwatch.\n")
    _write(index, page)
    print_text(f"{target}  ({len(page) // 1024 + 1} KiB; review it before publishing: it contains model output)")


def _write(target: Path, text: str) -> None:
    """Write the report atomically. Only the owner may read it, as with a store."""
    require_directory(target)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.touch(mode=0o600)
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
