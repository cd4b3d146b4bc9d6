"""Search for runs by name, tags, notes and settings.

A run must match all terms of a query. ``lr=3e-5``, ``beta>0``, ``model~qwen``, ``tag=paper`` compare a setting (by its
path or the end of it) or one of :data:`FIELDS`; any other term is searched in all texts. ``-`` before a term negates
it, quotes keep words together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlwatch.compare import ABSENT
from rlwatch.compare.configs import settings
from rlwatch.records import JSON, ORIGIN, RunInfo

FIELDS = ("id", "name", "project", "trainer", "host", "tag", "note")
SAME: tuple[frozenset[str], ...] = (
    frozenset({"lr", "learning_rate"}),
    frozenset({"beta", "kl_coef", "kl_loss_coef", "kl_coefficient", "init_kl_coef"}),
    frozenset({"batch_size", "train_batch_size", "per_device_train_batch_size"}),
    frozenset({"model", "model_name", "model_name_or_path", "model_path", "path"}),
)
"""Sets of names that different trainers use for one setting."""

_TERM = re.compile(r'(-?)((?:[^\s"]|"[^"]*"?)+)')
_COMPARED = re.compile(r"([\w./-]+?)\s*(!=|<=|>=|=|<|>|~)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SearchDocument:
    """Searchable facts of a run: fields by name, settings by path, and everything as one text in lower case."""

    fields: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, JSON]
    text: str

    def values(self, key: str) -> list[JSON]:
        """Return the values of the field ``key``, or of every setting with that name, under any trainer's name for
        it.
        """
        if key in self.fields:
            return list(self.fields[key])
        alike = next((names for names in SAME if key in names), frozenset({key}))
        return [value for path, value in self.settings.items() if _ends(path.casefold(), alike)]


def _ends(path: str, names: frozenset[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def facts_of(run: RunInfo) -> SearchDocument:
    """Return the searchable facts of a run, with secrets removed."""
    given = {one.name: one.values[0] for one in settings([run.config]) if one.values[0] is not ABSENT}
    notes = run.curation.notes
    fields = {
        "id": (run.run_id,),
        "name": tuple(dict.fromkeys((run.name, run.curation.logged_name))),
        "project": (run.project,),
        "trainer": (run.source,),
        "host": (run.host,),
        "tag": run.tags,
        "note": (notes,),
    }
    texts = [text for values in fields.values() for text in values]
    own = ((name, value) for name, value in given.items() if not name.startswith(f"{ORIGIN}."))
    pairs = [f"{name}={value if isinstance(value, str) else _plain(value)}" for name, value in own]
    return SearchDocument(fields, given, "\n".join((*texts, *pairs)).casefold())


def _plain(value: JSON) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """A parsed search query, which can be matched with many runs.

    ``terms``: for each term, True if it is negated, and the test that it makes.

    >>> run = RunInfo("r1", name="seed3", tags=("paper",), config={"actor": {"optim": {"lr": 3e-5}}})
    >>> [SearchQuery.parse(text).fits(facts_of(run)) for text in ("lr=0.00003 tag=paper", "lr>1e-4", "SEED -paper")]
    [True, False, False]
    """

    terms: tuple[tuple[bool, Callable[[SearchDocument], bool]], ...] = ()

    @classmethod
    def parse(cls, text: str) -> SearchQuery:
        """Return the parsed query. It never raises: a malformed term is searched literally."""
        found = [(minus == "-", _term(term.replace('"', ""))) for minus, term in _TERM.findall(text)]
        return cls(tuple(found))

    def fits(self, facts: SearchDocument, more: str = "") -> bool:
        """Return True if a run matches every term of the query.

        ``facts``: the run's searchable facts. ``more``: further text of the run to search.
        """
        if more:
            facts = SearchDocument(facts.fields, facts.settings, f"{facts.text}\n{more.casefold()}")
        return all(fits(facts) is not inverted for inverted, fits in self.terms)


def _term(text: str) -> Callable[[SearchDocument], bool]:
    plain = text.casefold()
    compared = _COMPARED.fullmatch(text)
    if compared is None or not compared[3].strip():
        return lambda facts: plain in facts.text
    key, how, wanted = compared[1].casefold(), compared[2], compared[3].strip()
    if how == "!=":
        return lambda facts: bool(values := facts.values(key)) and not any(_is(value, "=", wanted) for value in values)
    return lambda facts: any(_is(value, how, wanted) for value in facts.values(key)) or plain in facts.text


def _is(value: JSON, how: str, wanted: str) -> bool:
    text = value if isinstance(value, str) else _plain(value)
    if how == "~":
        return wanted.casefold() in text.casefold()
    one, other = _number(text), _number(wanted)
    if how == "=":
        if one is not None and other is not None:
            return math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
        return text.casefold() == wanted.casefold()
    if one is None or other is None:
        return False
    return {"<": one < other, "<=": one <= other, ">": one > other, ">=": one >= other}[how]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def matching(runs: Sequence[RunInfo], text: str) -> list[RunInfo]:
    """Return the runs that match the search query ``text``; all of them for an empty one."""
    query = SearchQuery.parse(text)
    return [run for run in runs if not query.terms or query.fits(facts_of(run))]
