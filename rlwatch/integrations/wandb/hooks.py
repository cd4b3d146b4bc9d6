"""The functions of wandb that are looked at while they are mirrored, all of them public."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from zlib import crc32

from rlwatch.integrations.tee.handle import Tee
from rlwatch.integrations.wandb.mirror import WandbMirror
from rlwatch.integrations.wandb.send_back import SendBack
from rlwatch.integrations.wandb.steps import Steps
from rlwatch.records import RunState
from rlwatch.run import Run
from rlwatch.seam import guarded

# Parameters are named as wandb names them: they may be given by name.
LOG, FINISH, EXIT, DEFINE = "log", "finish", "__exit__", "define_metric"


class Hooks:
    """Looks at what wandb's runs are told, and mirrors it through a :class:`Tee`.

    wandb's own functions are called first (their errors pass, and are not mirrored), once, with what they were given.
    """

    def __init__(self, tee: Tee[WandbMirror], wandb: Any, *, step_metric: str | None, send_back: bool) -> None:
        self.seam = tee.seam
        self._tee = tee
        self._step_metric = step_metric
        self._send_back = send_back
        self._steps: dict[str, Steps] = {}
        self._wandb = wandb
        self._log = run_class(wandb).log
        for kind in _run_classes(run_class(wandb)):
            self._look_at(kind)
        for name in (LOG, DEFINE):
            self._rebind(name)
        self._adopt(wandb.run)
        tee.patches.passing(wandb, "init", self._adopt)

    def _look_at(self, kind: type) -> None:
        patches = self._tee.patches
        own = vars(kind)
        if LOG in own:
            patches.around(kind, LOG, before=self._will_log, after=self._logged)
        if DEFINE in own:
            patches.around(kind, DEFINE, after=self._defined)
        if FINISH in own:
            patches.around(kind, FINISH, before=self._will_finish)
        if EXIT in own:
            patches.around(kind, EXIT, before=self._will_exit)

    def _rebind(self, name: str) -> None:
        """``wandb.log`` was bound to the current run's method when that run began."""
        theirs = getattr(getattr(self._wandb, name, None), "__self__", None)
        if theirs is not None:
            self._tee.patches.replace(self._wandb, name, getattr(theirs, name))

    @guarded
    def _adopt(self, theirs: Any) -> None:
        """Before 0.23 a disabled run had functions of its own, put on the instance."""
        patches, own = self._tee.patches, vars(theirs) if theirs is not None else {}
        if LOG in own and getattr(own[LOG], "__wrapped__", None) is None:
            bound = self._wandb.log is own[LOG]
            patches.around(
                theirs,
                LOG,
                before=partial(self._will_log, theirs),
                after=lambda seen, *args, **kwargs: self._logged(seen, theirs, *args, **kwargs),
            )
            patches.around(theirs, FINISH, before=partial(self._will_finish, theirs))
            if bound:
                patches.replace(self._wandb, LOG, theirs.log)

    @guarded
    def _will_log(self, theirs: Any, data: Any, step: Any = None, *_args: Any, **_kwargs: Any) -> int:  # noqa: ARG002
        """Where wandb's own step is; and what it is to be told goes first, into the same row."""
        mirror = self._tee.existing(theirs.id)
        if mirror is not None and mirror.back is not None:
            mirror.back.row(step)
        return int(getattr(theirs, "_local_step", 0))

    @guarded
    def _logged(
        self, own: int | None, theirs: Any, data: Any, step: Any = None, commit: Any = None, *_args: Any, **_kwargs: Any
    ) -> None:
        mirror = self._mirror(theirs)
        if mirror is not None:
            mirror.log(data, step, commit, own or 0)

    @guarded
    def _defined(self, _: Any, theirs: Any, name: str, step_metric: Any = None, *_args: Any, **_kwargs: Any) -> None:  # noqa: ARG002
        axis = getattr(step_metric, "name", step_metric)
        if isinstance(axis, str):
            self._steps_of(theirs).declare(axis)

    @guarded
    def _will_finish(self, theirs: Any, exit_code: int | None = None, *_args: Any, **_kwargs: Any) -> None:
        state = RunState.CRASHED if exit_code else RunState.FINISHED
        self._end(theirs, state, f"wandb finished with exit code {exit_code}" if exit_code else "")

    @guarded
    def _will_exit(self, theirs: Any, kind: Any = None, error: Any = None, *_args: Any, **_kwargs: Any) -> None:
        if kind is None:
            self._end(theirs, RunState.FINISHED, "")
        else:
            self._end(theirs, RunState.CRASHED, f"{kind.__name__}: {error}"[:500])

    def _end(self, theirs: Any, state: RunState, reason: str) -> None:
        mirror = self._tee.end(theirs.id, state, reason)
        if mirror is not None and mirror.back is not None:
            mirror.back.alerts()

    def _mirror(self, theirs: Any) -> WandbMirror | None:
        def make(run: Run) -> WandbMirror:
            back = SendBack(run, theirs, self._log) if self._send_back else None
            return WandbMirror(run, self._steps_of(theirs), back)

        return self._tee.mirror(theirs.id, make, lambda: self._describe(theirs))

    def _steps_of(self, theirs: Any) -> Steps:
        return self._steps.setdefault(theirs.id, Steps(self._step_metric))

    def _describe(self, theirs: Any) -> dict[str, Any]:
        """What wandb knows of a run, as arguments of :func:`rlwatch.init`."""
        config = {name: value for name, value in dict(theirs.config).items() if not name.startswith("_wandb")}
        known = {
            "run_id": run_id(theirs.project, theirs.id),
            "project": theirs.project,
            "name": theirs.name,
            "tags": tuple(theirs.tags or ()),
            "config": config,
        }
        return {name: value for name, value in known.items() if value}


def run_class(wandb: Any) -> Any:
    """The class of wandb's runs; None where this wandb has none that we know."""
    kind = getattr(wandb, "Run", None) or getattr(getattr(wandb, "wandb_sdk", None), "wandb_run", wandb).Run
    return kind if callable(getattr(kind, LOG, None)) else None


def run_id(project: str | None, theirs: str) -> str:
    """Our id for wandb's run: always the same, so that a run wandb resumes is resumed here too.

    >>> run_id("math", "x1y2z3"), run_id("math", "a b")
    ('math-x1y2z3', 'math-a-b-1789ac2b')
    """
    name = f"{project or 'wandb'}-{theirs}"
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("._-")[:100]
    return plain if plain == name else f"{plain}-{crc32(name.encode()):08x}"


def _run_classes(run: type) -> Iterator[type]:
    """The classes of wandb's runs: a disabled run is of a class of its own. Those of others call these."""
    yield run
    kind: type
    for kind in run.__subclasses__():
        if kind.__module__.partition(".")[0] == run.__module__.partition(".")[0]:
            yield from _run_classes(kind)
