"""Messages for files that cannot be read: what they are, and what to give instead."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlwatch.importers.lines import UTF16, Segments, shown
from rlwatch.importers.loop_pairs import is_step, pairs_of
from rlwatch.metrics import foremost, known, like_rewards

EXPORT = "export the metrics to a CSV 'run_id,step,metric,value' and give that"
_WRITE = (
    'log a row a step, as JSON lines {"step": 12, "reward": 0.5} or lines \'step: 12, reward: 0.5\'; or give a pattern '
    f"for its lines (--pattern, docs/watch.md), or {EXPORT}"
)
LONGEST_OF_LINE = 4000
LEAST_CHANGES = 4
_UNPACK = "unpack it first"
_RUN_TABLE = re.compile(rb'(?:\xef\xbb\xbf)?"?Name"?,"?State"?,')
RUNS_NOT_STEPS = (
    "table of runs: one row a run, with its last values and none of its steps; give the history of one run instead "
    "(its .wandb file, or what run.scan_history() returns as a CSV with a column '_step')"
)
_WANDB_SIDECARS = frozenset({"wandb-metadata.json", "wandb-summary.json"})
NO_LOG_OF_WANDB = (
    "is kept by wandb with a run and holds none of its steps; give the run's directory, or its run-ID.wandb"
)
_ERROR = re.compile(rb"^[\w.]{1,200}(?:Error|Exception|Interrupt|Exit)\b[^\n]*", re.MULTILINE)
_HOLES = re.compile(rb"\x00{8,}|\x00+\Z")
_CONTROLS = frozenset(range(32)) - frozenset(b"\t\n\r\x08\x0c\x1b")
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"\x89HDF", "an HDF5 file", EXPORT),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"%PDF", "a PDF", EXPORT),
)
_TEXT: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"<table[^>]{0,200}class=\\?[\"']dataframe|<th>Step</th>"), "a table of a notebook (HTML)"),
    (re.compile(rb"^\s*<(?:!doctype|html)", re.IGNORECASE), "a web page (HTML)"),
)


def named_binary(head: bytes) -> str | None:
    """Return a message with advice if ``head`` begins a binary file of a known, unsupported format; None for other
    files.
    """
    for magic, name, advice in _MAGIC:
        if head.startswith(magic):
            return f"is {name}, which is not supported yet; {advice}"
    return None


def named_text(head: bytes) -> str | None:
    """Return a message with advice if ``head`` begins text of a known, unsupported format; None for other text."""
    if _RUN_TABLE.match(head):
        return f"is a {RUNS_NOT_STEPS}"
    for pattern, name in _TEXT:
        if pattern.search(head):
            return f"looks like {name}, which is not supported yet; {EXPORT}"
    return None


def unknown_format(head: bytes, tried: str) -> str:
    """Return a message for a log whose beginning ``head`` no importer recognised; ``tried`` lists the formats and their
    findings.
    """
    names = _names_of_lines(head)
    return named_text(head) or (none_known(names) if names else f"no known format; {_WRITE} ({tried})")


def none_known(names: Sequence[str]) -> str:
    """Return a message for a log whose metric ``names`` are all unknown to rlwatch, with advice."""
    few = ", ".join(shown(name) for name in names[:5]) or "none"
    likely = next(iter((*like_rewards(names), *foremost(names))), "my_name")
    one = len(names) == 1
    unknown = (
        f"its only metric is not known to rlwatch ({few})"
        if one
        else (f"none of its {len(names)} metrics is known to rlwatch (found {few})")
    )
    return (
        f"{unknown}; name {'its role' if one else 'their roles'} with --map reward={likely} (entropy=, kl=, length=, "
        f"gradient=, loss=), or rename {'it' if one else 'them'}: reward, entropy, kl, grad_norm, loss, or "
        "policy/entropy, policy/kl_ref, reward/mean..."
    )


def _names_of_lines(head: bytes) -> list[str]:
    """Return the names in lines with a step and changing numbers; empty if there are no such lines."""
    last: dict[tuple[str, ...], dict[str, float]] = {}
    changes: Counter[tuple[str, ...]] = Counter()
    segments = Segments()
    for segment in segments.feed(head) + segments.finish():
        found = pairs_of(segment.text) if len(segment.text) <= LONGEST_OF_LINE else {}
        names = tuple(name for name in found if not is_step(name))
        if 0 < len(names) < len(found):
            before = last.setdefault(names, found)
            changes[names] += before != found
            last[names] = found
    likeliest = max(changes, key=lambda names: changes[names], default=())
    return list(likeliest) if changes[likeliest] >= LEAST_CHANGES and not known(likeliest) else []


def is_binary(head: bytes) -> bool:
    """Return True if ``head`` is no text: it holds NUL bytes among others and is not UTF-16 with a byte order mark.

    Blocks of NUL bytes are allowed: a machine that lost power leaves them in a text, or a truncated copy.
    """
    if b"\x00" not in head or head.startswith(UTF16):
        return False
    rest = _HOLES.sub(b"", head)[:4096]
    return b"\x00" in rest or 20 * sum(byte in _CONTROLS for byte in rest) > len(rest)


def is_wandb_sidecar(path: Path) -> bool:
    """Return True for the files of settings and last values that wandb keeps with a run, which hold no steps."""
    return path.name in _WANDB_SIDECARS or (path.name == "config.yaml" and path.parent.name == "files")


def died_early(end: bytes) -> str | None:
    r"""Return a message if ``end``, the end of a log, shows that the program failed before it logged a step; None
    otherwise.

    >>> died_early(b"Loading...\nTraceback (most recent call last):\n  File \"x.py\"\nValueError: no GPU\n")
    'holds no step of a training: the program failed before it logged one, by ValueError: no GPU'
    """
    at = end.rfind(b"Traceback (most recent call last)")
    errors = _ERROR.findall(end, at) if at >= 0 else []
    if not errors:
        return None
    last = shown(errors[-1].decode("utf-8", "replace").strip())[1:-1]
    return f"holds no step of a training: the program failed before it logged one, by {last}"
