"""Mirroring of Weights & Biases: every ``wandb.log`` of this process is also recorded and judged by rlwatch.

>>> import rlwatch
>>> rlwatch.tee_wandb(project="math-rl")  # doctest: +SKIP

wandb is imported only when ``tee_wandb`` is called.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from zlib import crc32

from rlwatch.control.policy import RunHealth
from rlwatch.error_boundary import guarded
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.integrations.tee import Held, Tee, check_first, checked_settings, scalars, snapshot, step_index
from rlwatch.monitor import MonitorOutcome
from rlwatch.records import Alert, AlertState, RunState, Severity
from rlwatch.run import Run

CALL = "rlwatch.tee_wandb()"

_newest: Tee[Any] | None = None


def tee_wandb(
    *, run: Run | None = None, step_metric: str | None = None, send_back: bool = False, **init_kwargs: Any
) -> Tee[Any]:
    """Record in rlwatch everything that this process logs to wandb from now on. Call it before or after ``wandb.init``.

    Each wandb run becomes a run of rlwatch with its first row, under wandb's project, name, tags and configuration
    (with secrets redacted). ``wandb.finish`` finishes it; a run that wandb resumes is resumed. wandb itself works
    unchanged, online, offline or disabled.

    Scalars are kept under wandb's names, nested ones as ``outer.inner``. Values that are not numbers are left out.
    :class:`WandbStepAxis` describes how the step of a row is found.

    Parameters
    ----------
    run
        A run to record everything into, for example the one of a watched trainer; the caller ends it.
    step_metric
        The metric that holds the optimizer step, if it is not one of the well-known ones.
    send_back
        True: send rlwatch's results to wandb. Firing alerts are sent by ``wandb.alert``. The metric ``rlwatch/<kind>``
        is 1 to 3 while a finding of that kind is active as info, warning or critical. The forecast of the step before
        is logged as ``forecast/p20``, ``forecast/p50``, ``forecast/p100``...
    init_kwargs
        Arguments of :func:`rlwatch.init`, which override wandb's. ``run_id`` and ``output_dir`` name the first run
        only. ``source`` (``"openrlhf"``, ``"verl"``...) selects the meaning of names that differ between trainers.

    Returns
    -------
    Tee
        Handle on the mirror: ``.run`` and ``.runs`` are the rlwatch runs that record, and ``.untee()`` stops the
        mirroring.

    Raises
    ------
    MissingExtraError
        If wandb is not installed.
    ConfigError
        If wandb is mirrored already, or an argument is wrong.
    StoreError
        If the store cannot be opened.
    """
    global _newest
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError("wandb", "wandb", CALL) from error
    check_first(_newest, "wandb", CALL)
    if run_class(wandb) is None:
        raise ConfigError(
            f"{CALL} does not know this wandb ({getattr(wandb, '__version__', 'no version')}): no Run.log"
        )
    tee: Tee[Any] = Tee("wandb", checked_settings(init_kwargs, run, CALL), run)
    WandbHooks(tee, wandb, step_metric=step_metric, send_back=send_back)
    _newest = tee
    return tee


# The functions of wandb that are looked at while they are mirrored, all of them public.

# Parameters are named as wandb names them: they may be given by name.
LOG, FINISH, EXIT, DEFINE = "log", "finish", "__exit__", "define_metric"


class WandbHooks:
    """Hooks on the methods of wandb's runs, which mirror their rows through a :class:`Tee`.

    wandb's own functions are called first, once, with the arguments of the call. If they raise, the error propagates
    and the row is not mirrored. ``wandb`` is the imported module; ``step_metric`` and ``send_back`` are those of
    :func:`tee_wandb`.
    """

    def __init__(self, tee: Tee[WandbMirror], wandb: Any, *, step_metric: str | None, send_back: bool) -> None:
        self.error_boundary = tee.error_boundary
        self._tee = tee
        self._step_metric = step_metric
        self._send_back = send_back
        self._steps: dict[str, WandbStepAxis] = {}
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
        """Bind ``wandb.log`` to the wrapped method: wandb bound it to the current run's method when that run began."""
        wandb_run = getattr(getattr(self._wandb, name, None), "__self__", None)
        if wandb_run is not None:
            self._tee.patches.replace(self._wandb, name, getattr(wandb_run, name))

    @guarded
    def _adopt(self, wandb_run: Any) -> None:
        """Wrap the functions of one run: before wandb 0.23 a disabled run had its own functions on the instance."""
        patches, own = self._tee.patches, vars(wandb_run) if wandb_run is not None else {}
        if LOG in own and getattr(own[LOG], "__wrapped__", None) is None:
            bound = self._wandb.log is own[LOG]
            patches.around(
                wandb_run,
                LOG,
                before=partial(self._will_log, wandb_run),
                after=lambda seen, *args, **kwargs: self._logged(seen, wandb_run, *args, **kwargs),
            )
            patches.around(wandb_run, FINISH, before=partial(self._will_finish, wandb_run))
            if bound:
                patches.replace(self._wandb, LOG, wandb_run.log)

    @guarded
    def _will_log(self, wandb_run: Any, data: Any, step: Any = None, *_args: Any, **_kwargs: Any) -> int:  # noqa: ARG002
        """Return wandb's own step counter; send findings and forecasts before the row, so that they join the row."""
        mirror = self._tee.existing(wandb_run.id)
        if mirror is not None and mirror.back is not None:
            mirror.back.row(step)
        return int(getattr(wandb_run, "_local_step", 0))

    @guarded
    def _logged(
        self,
        own: int | None,
        wandb_run: Any,
        data: Any,
        step: Any = None,
        commit: Any = None,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        mirror = self._mirror(wandb_run)
        if mirror is not None:
            mirror.log(data, step, commit, own or 0)

    @guarded
    def _defined(self, _: Any, wandb_run: Any, name: str, step_metric: Any = None, *_args: Any, **_kwargs: Any) -> None:  # noqa: ARG002
        axis = getattr(step_metric, "name", step_metric)
        if isinstance(axis, str):
            self._steps_of(wandb_run).declare(axis)

    @guarded
    def _will_finish(self, wandb_run: Any, exit_code: int | None = None, *_args: Any, **_kwargs: Any) -> None:
        state = RunState.CRASHED if exit_code else RunState.FINISHED
        self._end(wandb_run, state, f"wandb finished with exit code {exit_code}" if exit_code else "")

    @guarded
    def _will_exit(self, wandb_run: Any, kind: Any = None, error: Any = None, *_args: Any, **_kwargs: Any) -> None:
        if kind is None:
            self._end(wandb_run, RunState.FINISHED, "")
        else:
            self._end(wandb_run, RunState.CRASHED, f"{kind.__name__}: {error}"[:500])

    def _end(self, wandb_run: Any, state: RunState, reason: str) -> None:
        mirror = self._tee.end(wandb_run.id, state, reason)
        if mirror is not None and mirror.back is not None:
            mirror.back.alerts()

    def _mirror(self, wandb_run: Any) -> WandbMirror | None:
        def make(run: Run) -> WandbMirror:
            back = SendBack(run, wandb_run, self._log) if self._send_back else None
            return WandbMirror(run, self._steps_of(wandb_run), back)

        return self._tee.mirror(wandb_run.id, make, lambda: self._describe(wandb_run))

    def _steps_of(self, wandb_run: Any) -> WandbStepAxis:
        return self._steps.setdefault(wandb_run.id, WandbStepAxis(self._step_metric))

    def _describe(self, wandb_run: Any) -> dict[str, Any]:
        """Return arguments of :func:`rlwatch.init` that wandb knows of a run."""
        config = {name: value for name, value in dict(wandb_run.config).items() if not name.startswith("_wandb")}
        known = {
            "run_id": run_id(wandb_run.project, wandb_run.id),
            "project": wandb_run.project,
            "name": wandb_run.name,
            "tags": tuple(wandb_run.tags or ()),
            "config": config,
        }
        return {name: value for name, value in known.items() if value}


def run_class(wandb: Any) -> Any:
    """Return the class of wandb's runs in the module ``wandb``; None if this version has none with a ``log`` method."""
    kind = getattr(wandb, "Run", None) or getattr(getattr(wandb, "wandb_sdk", None), "wandb_run", wandb).Run
    return kind if callable(getattr(kind, LOG, None)) else None


def run_id(project: str | None, wandb_run: str) -> str:
    """Return rlwatch's id for a wandb run. It is always the same, so that a run that wandb resumes is resumed here too.

    >>> run_id("math", "x1y2z3"), run_id("math", "a b")
    ('math-x1y2z3', 'math-a-b-1789ac2b')
    """
    name = f"{project or 'wandb'}-{wandb_run}"
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("._-")[:100]
    return plain if plain == name else f"{plain}-{crc32(name.encode()):08x}"


def _run_classes(run: type) -> Iterator[type]:
    """Yield the classes of wandb's runs; a disabled run has its own class. Subclasses of other packages call these."""
    yield run
    kind: type
    for kind in run.__subclasses__():
        if kind.__module__.partition(".")[0] == run.__module__.partition(".")[0]:
            yield from _run_classes(kind)


# One run of wandb, mirrored row by row.

HUGGING_FACE = "train/global_step"
"""Metric whose presence in a row means that None is NaN: TRL writes None where every value was NaN. In other rows None
is not a measurement.
"""


class WandbMirror:
    """Recorder of the scalars of one wandb run, row by row, at their steps.

    Parts of a row that are logged with ``commit=False`` wait for the part that has the step, as in wandb. Everything
    else is recorded at once. ``steps`` finds the step of a row, ``back`` sends findings to wandb (None: it does not).
    """

    def __init__(self, run: Run, steps: WandbStepAxis, back: SendBack | None = None) -> None:
        self.run = run
        self.steps = steps
        self.back = back
        self._held = Held()

    def log(self, data: Mapping[str, Any], step: Any, commit: bool | None, own: int) -> None:
        """Record the row of a call ``wandb.log(data, step=step, commit=commit)``.

        ``own`` is wandb's own step at that time.
        """
        given = None if step is None else step_index(step)
        index = self.steps.count(given, commit, own)
        row = scalars(data, null=math.nan if HUGGING_FACE in data else None)
        stated = self.steps.stated(row, given)
        if stated is None and step is None and commit is False:
            self._held.append((index, snapshot(row)))
            return
        at = self.steps.assumed(index) if stated is None else stated
        self._release(index, at)
        self._record(row, at)

    def flush(self) -> None:
        """Record the parts of rows that still wait, because the rest of their row will not come."""
        self._release(None, 0)

    def _release(self, index: int | None, at: int) -> None:
        """Record what is held: parts of the row ``index`` at step ``at``, older ones where they belong."""
        for part_of, row in self._held.taken():
            self._record(row, at if part_of == index else self.steps.assumed(part_of))

    def _record(self, row: dict[str, Any], step: int) -> None:
        if row:
            self.run.log(row, step=step)


# The step of a row.

KNOWN_AXES = ("train/global_step", "trainer/global_step", "training/global_step")
WEAK_AXIS = "global_step"


class WandbStepAxis:
    """Rules for the optimizer step of each row of one wandb run.

    wandb's own step counts rows, not optimizer steps: Hugging Face's Trainer and OpenRLHF do not set it, and log the
    global step as a metric. The step of a row is the first of these that applies:

    1. the metric named by ``tee_wandb(step_metric=...)``, if the row holds it;
    2. ``train/global_step`` (Hugging Face, TRL, OpenRLHF), ``trainer/global_step`` (Lightning) or
       ``training/global_step`` (verl);
    3. a step axis that ``define_metric`` declared, in order of declaration;
    4. the argument ``step=``;
    5. ``global_step``;
    6. the last value of one of 1 to 3, if an earlier row had one, as wandb's ``step_sync`` fills it in;
    7. wandb's own step.

    A run keeps the best axis it has seen: if rows hold ``train/global_step``, an ``epoch`` in other rows is no step.
    A value that is not an integer >= 0 is no step either. ``step_metric`` names the metric of rule 1.
    """

    def __init__(self, step_metric: str | None = None) -> None:
        self.counter = 0
        """wandb's own step of the next row."""
        self._axes = [step_metric] if step_metric else list(KNOWN_AXES)
        self._rank = len(self._axes)
        self._last: int | None = None

    def declare(self, axis: str) -> None:
        """Add ``axis``, which ``define_metric(..., step_metric=axis)`` declared as a step axis."""
        if axis not in self._axes:
            self._axes.append(axis)

    def count(self, step: int | None, commit: bool | None, own: int = 0) -> int:
        """Return wandb's own step of a row, and advance the counter as wandb does.

        ``step`` and ``commit`` are the arguments of ``wandb.log``; ``own`` is wandb's counter before the call.
        """
        self.counter = max(self.counter, own)
        index = self.counter if step is None else step
        self.counter = max(self.counter, index)
        if commit or (step is None and commit is None):
            self.counter += 1
        return index

    def stated(self, row: Mapping[str, Any], step: int | None) -> int | None:
        """Return the step that ``row`` itself contains, by rules 1 to 5 of the class, or None.

        ``step`` is the argument of ``log``.
        """
        for rank, axis in enumerate(self._axes):
            index = step_index(row.get(axis))
            if index is not None and (rank <= self._rank or self._last is None):
                self._rank, self._last = rank, index
                return index
        return step_index(row.get(WEAK_AXIS)) if step is None else step_index(step)

    def assumed(self, index: int) -> int:
        """Return the step of a row that contains none, by rules 6 and 7 of the class.

        ``index`` is wandb's own step of the row.
        """
        return index if self._last is None else self._last


# Findings and forecasts, sent to wandb.
#
# They are sent on the thread that logs, just before the user's row and into that row (``commit=False``). So wandb is
# used from no other thread, its step counter moves as without rlwatch, and no row is added.

LEVELS = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.CRITICAL: "ERROR"}
"""rlwatch's severity -> wandb's name of the alert level."""
TITLE = 63
"""Longest title that is sent, in characters, because wandb's titles are shorter than 64."""

Log = Callable[..., None]


class SendBack:
    """Sender of rlwatch's results to wandb: firing alerts as ``wandb.alert``, active findings and forecasts as metrics.

    ``rlwatch/<kind>`` is 1, 2 or 3 while a finding of that kind is active as info, warning or critical, and 0
    afterwards. ``forecast/p50`` and similar metrics are the newest forecast, sent once, in the row that follows. So
    that forecast belongs to the step before.

    Parameters
    ----------
    run
        The rlwatch run whose findings are sent.
    wandb_run
        The wandb run that receives them.
    log
        wandb's original ``Run.log``, which is not mirrored.
    """

    def __init__(self, run: Run, wandb_run: Any, log: Log) -> None:
        self._run = run
        self._wandb_run = wandb_run
        self._log = log
        self._alerts: deque[Alert] = deque()
        self._kinds: set[str] = set()
        self._last_forecast: int | None = None
        run.listen(self._observe)

    def row(self, step: Any) -> None:
        """Send findings, forecast and alerts to wandb, just before the user logs a row with this ``step=`` (or
        None).
        """
        health = self._run.health()
        metrics = {**self._levels(health), **self._forecast(health)}
        if metrics:
            self._log(self._wandb_run, metrics, step=step, commit=False)
        self.alerts()

    def alerts(self) -> None:
        """Send the alerts that fired since the last call."""
        while self._alerts:
            alert = self._alerts.popleft()
            title = f"rlwatch: {alert.kind} since step {alert.onset_step}"[:TITLE]
            self._wandb_run.alert(title=title, text=alert.message, level=LEVELS[alert.severity])

    def _forecast(self, health: RunHealth) -> dict[str, float]:
        if health.forecast is None or health.forecast.step == self._last_forecast:
            return {}
        self._last_forecast = health.forecast.step
        return health.forecast.metrics

    def _levels(self, health: RunHealth) -> dict[str, int]:
        worst: dict[str, int] = {}
        for finding in health.findings:
            worst[finding.kind] = max(worst.get(finding.kind, 0), finding.severity.rank + 1)
        self._kinds.update(worst)
        return {f"rlwatch/{kind}": worst.get(kind, 0) for kind in sorted(self._kinds)}

    def _observe(self, outcome: MonitorOutcome) -> None:
        """Queue the alerts that fire; called on the writer thread."""
        self._alerts.extend(
            transition.alert
            for transition in outcome.transitions
            if transition.notify and transition.alert.state is AlertState.FIRING
        )
