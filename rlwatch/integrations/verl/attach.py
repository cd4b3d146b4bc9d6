"""Hooks on verl's modules, which the plugin installs as each module is imported. Without ``rlwatch`` in
``trainer.logger`` they do nothing.

- ``Tracking``: rlwatch as a backend, for the scalars that every verl trainer logs, old and new.
- the v1 ``PPOTrainer``: three wrappers on the class, the others on the instance within ``fit``. They open the run and
  pass the trainer to a :class:`~rlwatch.integrations.verl.driver.VerlDriver`.
- ``RayPPOTrainer`` (``trainer.use_v1=false``, and verl before 0.9): scalars, and the cause of its end.
- ``ActorRolloutRefWorker``: the remote calls by which the driver reads and commands a worker.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import rlwatch
from rlwatch.error_boundary import Contained, ErrorBoundary, Reported, guarded
from rlwatch.errors import RLWatchError
from rlwatch.integrations.compat import lacking
from rlwatch.integrations.crash import record_crash
from rlwatch.integrations.stages import tap_methods
from rlwatch.integrations.verl.compat import (
    REFUSED,
    TRACKING,
    TRAINER,
    V1,
    in_words,
    missing_parts,
    scalars_only,
    verl_version,
)
from rlwatch.integrations.verl.heartbeat import IN_PLACE, acting, hook
from rlwatch.integrations.verl.ranks import answering
from rlwatch.integrations.verl.settings import NAME, VerlSettings, plain, wanted
from rlwatch.records import RunState

if TYPE_CHECKING:
    from rlwatch.integrations.verl.driver import VerlDriver
    from rlwatch.run import Run


logger = logging.getLogger("rlwatch")


@dataclass(slots=True)
class FitSession:
    """One call of a trainer's ``fit``, with the run that its driver or its ``Tracking`` opened."""

    run: Run | None = None

    def finish(self) -> None:
        """Finish the run as successful, if there is one that has not ended."""
        if self.run is not None and self.run.active:
            Backend(self.run).finish()


session: ContextVar[FitSession | None] = ContextVar("session", default=None)
"""The call of ``fit`` in progress in this thread, or None."""


class Backend:
    """Backend of verl's ``Tracking`` that records numbers in ``run`` under verl's own names.

    Other values are left out.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.error_boundary = ErrorBoundary(run)
        self._made_in = threading.get_ident()

    @guarded
    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record the numbers in ``data`` as the row of ``step``."""
        self.run.log({name: value for name, value in data.items() if is_number(value)}, step=int(step))

    @guarded
    def finish(self, exit_code: int = 0) -> None:
        """Finish the run, as crashed if ``exit_code`` is not 0."""
        if exit_code:
            self.run.finish(RunState.CRASHED, f"verl ended with exit code {exit_code}")
        else:
            self.run.finish()

    @guarded
    def collected(self) -> None:
        """Finish the run of a ``Tracking`` object that is garbage-collected.

        That may happen in any thread, also in one that the end of the run waits for. So in another thread than the one
        that created the backend, a new thread finishes the run.
        """
        if threading.get_ident() == self._made_in:
            self.finish()
        else:
            threading.Thread(target=self.finish, name="rlwatch-end").start()


def is_number(value: object) -> bool:
    """Return True if ``value`` is one number: Python's, numpy's, or a tensor with a single element."""
    with Contained(lambda _error: None):  # a row may hold anything
        if isinstance(value, str | bytes | bool) or value is None:
            return False
        if getattr(value, "ndim", 0) != 0 and getattr(value, "size", 0) != 1:
            return False
        return hasattr(value, "__float__")
    return False


def install_tracking(module: ModuleType) -> str:
    """Add rlwatch's backend to ``module.Tracking``.

    Return the state of the hook: in place, or the reason why it is not.
    """
    tracking = module.Tracking
    known = getattr(tracking, "supported_backend", ())  # where there is no such list, verl refuses no name
    if NAME in known:
        return IN_PLACE
    reason = lacking(tracking, TRACKING)
    if reason is not None:
        return f"rlwatch is no logger of this verl: {reason}"
    _wrap_init(tracking)
    _wrap_finish(tracking, "finish" if hasattr(tracking, "finish") else "__del__")
    tracking.supported_backend = [*known, NAME]
    return IN_PLACE


def _wrap_init(tracking: Any) -> None:
    original = tracking.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        project, name, loggers, config = (given.arguments[parameter] for parameter in TRACKING["__init__"])
        if wanted(loggers):
            self.logger[NAME] = Backend(_opened(project, name, config))

    tracking.__init__ = __init__


def _wrap_finish(tracking: Any, name: str) -> None:
    original = getattr(tracking, name, None)

    def finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        finished = getattr(self, "_finished", False)
        try:
            return None if original is None else original(self, *args, **kwargs)
        finally:
            backend = getattr(self, "logger", {}).get(NAME)
            if backend is not None and not finished:
                if name == "__del__":
                    backend.collected()
                else:
                    backend.finish(kwargs.get("exit_code", next(iter(args), 0)))

    setattr(tracking, name, finish if original is None else wraps(original)(finish))


def _opened(project: str, name: str, config: Any) -> Run:
    """Return the driver's run, or a new run of scalars without a driver for this trainer. May raise: this is set-up."""
    current = session.get() or FitSession()
    if current.run is None or not current.run.active:
        logger.warning(
            "of verl %s rlwatch records what the trainer logs and how training ends, but no tokens, gradients or "
            "commands: %s",
            verl_version() or "?", scalars_only(hook(V1)),
        )  # fmt: skip
        current.run = rlwatch.init(**VerlSettings.of(plain(config), project, name).init)
    return current.run


# Crashes of ``fit``.


@contextmanager
def fitting(current: FitSession, trainer: Any) -> Iterator[None]:
    """Make ``current`` visible to the trainer's ``Tracking`` during the ``with`` block.

    An exception of the block is recorded as the end of the run, and propagates.
    """
    token = session.set(current)

    def failed(error: BaseException) -> None:
        run = current.run
        if run is not None and run.active:
            record_crash(run, ErrorBoundary(run), error, getattr(trainer, "global_steps", None))

    try:
        with Reported(failed):
            yield
    finally:
        session.reset(token)


# Hooks on verl's v1 ``PPOTrainer``: three wrappers on the class, the others on the instance within ``fit``.

HELD = "rlwatch_driver"
"""Attribute of a trainer that holds its driver."""

ENDED_S, CRASHED_S = 30.0, 5.0
"""Longest wait for statistics in seconds, at the regular end of training and at a crash."""

Method = Callable[..., Any]


def install_trainer(module: ModuleType) -> str:
    """Wrap methods of ``module.PPOTrainer``. Return the state of the hook: in place, or what cannot be recorded.

    A class that lacks the required methods is left unchanged, and only its scalars are recorded.
    """
    cls = module.PPOTrainer
    reason = lacking(cls, TRAINER)
    if reason is not None:
        return REFUSED + reason
    for name, around in {"init": _init, "_load_checkpoint": _load_checkpoint, "fit": watched_fit}.items():
        if hasattr(cls, name):
            setattr(cls, name, around(getattr(cls, name)))
    missing = missing_parts(cls)
    return in_words(missing) if missing else IN_PLACE


def begin_driver(trainer: Any) -> VerlDriver:
    """Create the driver of ``trainer`` with an open run, and return it. Raises what :func:`rlwatch.init` raises."""
    from rlwatch.integrations.verl.canaries import canary_scorer
    from rlwatch.integrations.verl.driver import VerlDriver

    settings = VerlSettings.of(plain(trainer.config))
    canaries = canary_scorer(trainer.config, settings.canaries)
    missing = missing_parts(trainer)
    if missing:
        logger.warning("%s", in_words(missing))
    driver = VerlDriver(trainer, rlwatch.init(**settings.init), settings, canaries)
    driver.run.introduce()
    setattr(trainer, HELD, driver)
    session.set(FitSession(driver.run))  # for a trainer that has a fit of its own
    acting("driver")
    return driver


def _init(original: Method) -> Method:
    """Wrap the constructor to open the run before the models load, so that configuration errors show early."""

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not wanted(self.config.trainer.logger):
            return original(self, *args, **kwargs)
        driver = begin_driver(self)
        with fitting(FitSession(driver.run), self):
            return original(self, *args, **kwargs)

    return init


def _load_checkpoint(original: Method) -> Method:
    """Wrap the loading of a checkpoint, the end of set-up: the workers exist, and the step to continue from is
    known.
    """

    @wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        driver = getattr(self, HELD, None)
        if driver is not None:
            driver.attach()
            driver.error_boundary.attempt("checkpoint", driver.loaded)
        return result

    return load


def watched_fit(original: Method) -> Method:
    """Wrap ``original``, a trainer's ``fit``, so that its driver measures every step and its end is reported."""

    @wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        driver = getattr(self, HELD, None)
        if driver is None:
            return original(self, *args, **kwargs)
        if not driver.attached:  # this verl loads no checkpoint where we could see that its workers are there
            driver.attach()
        tap_steps(self, driver)
        with fitting(FitSession(driver.run), self):
            deadline_s = CRASHED_S
            try:
                result = original(self, *args, **kwargs)
                deadline_s = ENDED_S
                return result
            finally:
                driver.error_boundary.attempt("last steps", driver.settle, deadline_s)

    return fit


STAGES = {
    "_compute_reward_colocate": "reward",
    "_compute_old_log_prob": "logprobs",
    "_compute_ref_log_prob": "logprobs",
    "_compute_values": "logprobs",
    "_update_critic": "update",
    "_update_actor": "update",
    "_save_checkpoint": "checkpoint",
    "_validate": "evaluation",
}
"""Method of the trainer -> the stage in which its time counts; the driver waits in it for the workers."""


def tap_steps(trainer: Any, driver: VerlDriver) -> None:
    """Wrap the methods of ``trainer`` by which ``driver`` times stages, executes commands and measures steps.

    The instance is changed, because subclasses override these methods without calling ``super``.
    """
    driver.run.stages.by_rows = True
    tap_methods(trainer, STAGES, driver.error_boundary)
    tap_methods(getattr(trainer, "replay_buffer", None), {"sample": "sampling"}, driver.error_boundary)
    tap_methods(getattr(trainer, "checkpoint_manager", None), {"update_weights": "weight_sync"}, driver.error_boundary)
    _hook(trainer, "on_step_end", driver, before=driver.obey)
    _hook(trainer, "_save_checkpoint", driver, after=lambda *_args, **_kwargs: driver.saved())
    _hook(trainer, "_compute_metrics", driver, after=lambda batch, *_args, **_kwargs: driver.measure(batch))


def _hook(
    trainer: Any,
    name: str,
    driver: VerlDriver,
    *,
    before: Callable[[], None] | None = None,
    after: Method | None = None,
) -> None:
    """Wrap a method: call ``before`` without arguments and ``after`` with the method's; their errors are contained."""
    original = getattr(trainer, name, None)
    if original is None:
        return

    @wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            driver.error_boundary.attempt(name, before)
        result = original(*args, **kwargs)
        if after is not None:
            driver.error_boundary.attempt(name, after, *args, **kwargs)
        return result

    setattr(trainer, name, hooked)


# The trainer of ``trainer.use_v1=false`` and of verl before 0.9: only scalars and the cause of its end are recorded.


def install_legacy(module: ModuleType) -> str:
    """Wrap ``module.RayPPOTrainer``, so that the exception that ends its ``fit`` is recorded.

    Return the state of the hook. Its ``Tracking`` opens the run. The instance is changed, because subclasses (recipes)
    have their own ``fit``, and do not call the parent's.
    """
    original = module.RayPPOTrainer.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        fit = getattr(self, "fit", None)
        if callable(fit):
            self.fit = _reporting(self, fit)

    module.RayPPOTrainer.__init__ = __init__
    return IN_PLACE


def _reporting(trainer: Any, original: Any) -> Any:
    @wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Any:
        current = FitSession()
        with fitting(current, trainer):
            result = original(*args, **kwargs)
        current.finish()  # its Tracking would, whenever and in whatever thread it is collected
        return result

    return fit


# Calls added to verl's ``ActorRolloutRefWorker``, by which the driver reads and commands a worker.
#
# Each is an RPC to all ranks (``ONE_TO_ALL``) that returns at once with references to the answers
# (:mod:`~rlwatch.integrations.verl.ranks`). Until ``rlwatch_attach`` nothing in the worker is touched.


def install_worker(module: ModuleType) -> str:
    """Add rlwatch's remote calls to ``module.ActorRolloutRefWorker``. Return the state of the hook."""
    from verl.single_controller.base.decorator import Dispatch, register

    remote = register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    for method in CALLS:
        setattr(module.ActorRolloutRefWorker, method.__name__, remote(answering(method)))
    return IN_PLACE


def rlwatch_attach(self: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Install the hooks in this worker.

    Return what is missing, the vocabulary size, and why spikes are not localised, if so. ``settings``: ``level``;
    ``bypass`` for verl's bypass mode; ``localise``, fields of ``Localise`` (None: spikes are not localised), with
    ``text`` if the text of tokens is kept. Every rank gets the same settings, and waits for the others.
    """
    from rlwatch.integrations.verl.worker import Inside

    if getattr(self, "rlwatch", None) is None:
        self.rlwatch = Inside.of(self, settings)
        acting("worker")
    localising = self.rlwatch.localising
    why_not = localising if isinstance(localising, str) else None
    return {"missing": self.rlwatch.missing, "vocab_size": self.rlwatch.vocab_size, "not_localised": why_not}


def rlwatch_collect(self: Any, step: int, before: bool = False) -> dict[str, Any]:
    """Return the measurements of this rank since the last call, encoded, as those of ``step``.

    ``before``: from now on measure the policy before the update here as well, because steps are too large for the
    driver.
    """
    return dict(_inside(self).collect(step, before=before))


def rlwatch_check(self: Any, kind: str, args: Mapping[str, Any], step: int = 0) -> dict[str, Any]:
    """Raise ``RLWatchError`` if this rank cannot execute the command ``kind`` with ``args`` after ``step``.

    Changes nothing.
    """
    _inside(self).check(kind, args, step)
    return {}


def rlwatch_do(self: Any, kind: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Execute the command ``kind`` with ``args``, which every rank has checked, and return its report."""
    return {"report": dict(_inside(self).do(kind, args))}


def rlwatch_settle(self: Any, kind: str, args: Mapping[str, Any], refusal: str | None = None) -> dict[str, Any]:
    """Keep the effect of a command if all ranks executed it (``refusal`` is None); undo it if a rank could not."""
    _inside(self).settle(kind, args, refusal)
    return {}


def rlwatch_due(self: Any, kind: str, step: int) -> dict[str, Any]:
    """Return the arguments of the command that ends the effect of ``kind`` after ``step``, None while it continues."""
    return {"due": _inside(self).due(kind, step)}


def rlwatch_reset_reference(self: Any, optimizer: str = "clear") -> dict[str, Any]:
    """Reset the reference to the policy on this rank.

    The optimizer's state is cleared (``clear``) or kept (``keep``).
    """
    args = {"optimizer": optimizer}
    _inside(self).check("reset-reference", args)
    return {"report": dict(_inside(self).do("reset-reference", args))}


def rlwatch_save_reference(self: Any, directory: str) -> dict[str, Any]:
    """Write this rank's part of the reference into ``directory`` and return the path of the file."""
    return {"path": _inside(self).keeper.save(directory)}


def rlwatch_forget_reference(self: Any, directory: str) -> dict[str, Any]:
    """Delete this rank's part of a reference from ``directory``, if it is there."""
    _inside(self).keeper.forget(directory)
    return {}


def rlwatch_find_reference(self: Any, directory: str) -> dict[str, Any]:
    """Return the fingerprint of this rank's part of the reference in ``directory``, None without one.

    Raises ``RLWatchError`` if it does not fit this rank.
    """
    return {"found": _inside(self).keeper.find(directory)}


def rlwatch_restore_reference(self: Any, directory: str) -> dict[str, Any]:
    """Restore this rank's part of the reference in ``directory``, and return a report."""
    return {"report": _inside(self).keeper.restore(directory)}


def rlwatch_kl_coef(self: Any, value: float | None = None) -> dict[str, Any]:
    """Set the coefficient of the loss's KL term to ``value``, if one is given. Return the coefficient."""
    return {"value": _inside(self).kl_coef(value)}


def rlwatch_lowered(self: Any) -> dict[str, Any]:
    """Return the step until which the learning rate is lowered; 0 if it is not lowered, or permanently."""
    return {"until": _inside(self).lowered_until}


CALLS: tuple[Callable[..., dict[str, Any]], ...] = (
    rlwatch_attach,
    rlwatch_collect,
    rlwatch_check,
    rlwatch_do,
    rlwatch_settle,
    rlwatch_due,
    rlwatch_reset_reference,
    rlwatch_save_reference,
    rlwatch_forget_reference,
    rlwatch_find_reference,
    rlwatch_restore_reference,
    rlwatch_kl_coef,
    rlwatch_lowered,
)


def _inside(worker: Any) -> Any:
    inside = getattr(worker, "rlwatch", None)
    if inside is None:
        raise RLWatchError("this worker is not watched")
    return inside
