"""Check the prose of the READMEs and docs/, and the words of the code: ``python docs/prose.py``, part of ``make lint``.

Two rules for pages: no sentence over 40 words, and no word of ``WORDS`` more often than its ceiling. Code, tables,
headings, URLs and generated text are left out. One rule for the code, its comments and docstrings: no word of
``CODE_WORDS`` in more places than its ceiling. Vale downloads its binary at first use; proselint takes no rules from a
project.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 40
WORDS = {
    "tell|tells|telling|told": (0, "report, post, send, distinguish", "says neither who acts nor on what"),
    "nobody|somebody|whoever|anybody": (0, "name the person: the operator, a reader, a user", "hides who acts"),
    "goes by|go by|went by": (0, "uses, reads, depends on", "not a verb of the field"),
    "what is none": (0, "name the thing", "a clause without a noun"),
    "the house|house rules": (0, "the architecture, the package", "a private metaphor"),
    "rooms?": (0, "package, or space of a disk", "a private metaphor"),
    "floors?": (0, "layer", "a private metaphor"),
    "(?<!hugging )faces?": (0, "interface, output", "a private metaphor"),
    "doors?": (0, "extension point, login", "a private metaphor"),
    "knobs?": (0, "hyperparameter, setting", "the field has a word for it"),
    "sureness": (0, "confidence", "the field has a word for it"),
    "says|said": (0, "states, reports, prints, shows", "programs and pages do not speak"),
    "stands": (0, "is, is active, appears", "not a verb of the field"),
    "beside": (0, "next to, with, compared with", "means too many things"),
}
"""Word: how often it may stay, what to write instead, why. A ceiling only falls: lower it when you remove a use."""
CODE_WORDS = {
    "tell|tells|telling|told": (50, "report, post, send, distinguish, findings"),
    "say|says|said": (82, "state, report, print, return, message, text"),
    "nobody|somebody|whoever|anybody": (8, "the operator, a reader, the caller, no process"),
    "stands": (13, "is active, remains, is"),
    "beside": (69, "next to, with, compared with"),
}
"""Word: in how many places of the code it may stay, and what to write instead. A ceiling only falls."""
MOST_NAMED = 8
GENERATED = {
    "reference-cli.md", "reference-settings.md", "detectors.md", "detection.md", "forecast-leaderboard.md",
    "reliability.md", "real-model.md", "rescue.md",
}  # fmt: skip
"""Pages that programs write: their words are in the code."""
BLOCK = re.compile(r"<!-- (?:catalogue|signatures|grants|figures)\b.*?<!-- (?:end|/\w+) -->", re.DOTALL)
END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')]))\s+(?=[^a-z\s])")
MARKDOWN = MarkdownIt("commonmark").enable("table")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) of the paragraphs and list items of a page. Code keeps its backquotes."""
    tokens = MARKDOWN.parse(BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text))
    for before, token in pairwise(tokens):
        if token.type != "inline" or before.type in ("heading_open", "td_open", "th_open"):
            continue
        codes = (f"`{child.content}`" for child in token.children or [] if child.type == "code_inline")
        parts = {"code_inline": "\0", "softbreak": " ", "hardbreak": " "}
        whole = "".join(parts.get(child.type, child.content) for child in token.children or [] if child.type != "image")
        for sentence in END.split(whole):
            words = [re.sub("\0", lambda _, codes=codes: next(codes), word) for word in sentence.split()]
            yield (token.map or [0])[0] + 1, " ".join(words)


def problems(pages: dict[str, str]) -> list[str]:
    """Return one line for each sentence that is too long and for each word above its ceiling, with what to do."""
    found: list[str] = []
    uses: dict[str, list[str]] = {words: [] for words in WORDS}
    for page, text in pages.items():
        for line, sentence in sentences(text):
            length = len(re.findall(r"\S*\w\S*", sentence))
            if length > LONGEST:
                found.append(f"{page}:{line}: {length} words, {LONGEST} are allowed; split it: {sentence}")
            plain = re.sub(r"`[^`]*`", "", sentence)
            for words, at in uses.items():
                at += [
                    f"{page}:{line}: {use[0]!r} in: {sentence}" for use in re.finditer(rf"\b(?:{words})\b", plain, re.I)
                ]
    for words, (ceiling, instead, why) in WORDS.items():
        if len(uses[words]) > ceiling:
            found += [f"{use}\n    write instead: {instead} ({why})" for use in uses[words]]
            if ceiling:
                found.append(f"{words}: {len(uses[words])} uses, {ceiling} are allowed")
        elif len(uses[words]) < ceiling:
            found.append(f"{words}: {len(uses[words])} uses; lower its ceiling in docs/prose.py from {ceiling}")
    return found


def code_problems(sources: dict[str, str]) -> list[str]:
    """Return, for each word above its ceiling in the code, the files that use it most; parts of names count, too."""
    found = []
    for words, (ceiling, instead) in CODE_WORDS.items():
        word = re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.I)
        uses = {path: count for path, text in sources.items() if (count := len(word.findall(text)))}
        if (total := sum(uses.values())) > ceiling:
            most = ", ".join(f"{path} {uses[path]}" for path in sorted(uses, key=lambda path: -uses[path])[:MOST_NAMED])
            found.append(f"{words}: {total} uses in the code, {ceiling} are allowed; write: {instead}. Most: {most}")
    return found


def main() -> int:
    """Print the problems; 1 if there are any."""
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "sample_logs/README.md")]
    paths += sorted(ROOT.glob("examples/*/README.md"))
    paths += [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in GENERATED]
    found = problems({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths})
    kinds = (("rlwatch", "*.py"), ("app", "*.py"), ("app", "*.js"))
    sources = [
        path for folder, kind in kinds for path in (ROOT / folder).rglob(kind) if not path.name.endswith(".min.js")
    ]
    found += code_problems({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sources})
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
