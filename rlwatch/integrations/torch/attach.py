"""The :class:`Watcher` of a custom training loop: its run, its commands, and reports on inputs that the loop did not
pass.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from typing_extensions import override

from rlwatch.error_boundary import ErrorBoundary, Tapped, copied, log_message, shown
from rlwatch.errors import ConfigError
from rlwatch.gradloc.passes import RandomState
from rlwatch.integrations.canaries import Canaries, Canary, CanaryScorer
from rlwatch.integrations.completions import KeepCompletions
from rlwatch.integrations.crash import cause_of, reason_of
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import Localise, localiser_of
from rlwatch.integrations.ranks import begin_together, place_here
from rlwatch.integrations.snapshots import SnapshotKeeper, Snapshots, checked
from rlwatch.integrations.stages import clock_of
from rlwatch.integrations.step_tally import Decode
from rlwatch.integrations.torch import compat
from rlwatch.integrations.torch.batch import GenerationReader, LossSettings, Samples
from rlwatch.integrations.torch.commands import CommandController, Means
from rlwatch.integrations.torch.compat import WatcherSettings
from rlwatch.integrations.torch.localise import LoopCall
from rlwatch.integrations.torch.taps import Collector, Refused, StepCounter
from rlwatch.integrations.verifiers import is_async
from rlwatch.integrations.weight_sync import EVENT
from rlwatch.recorder.intake import step_index
from rlwatch.records import RunState
from rlwatch.run import Run, init
from rlwatch.run.stages import Stage, StageClock

if TYPE_CHECKING:
    from torch import Tensor, nn


Needs = tuple[tuple[str, ...], ...]
"""Inputs that a metric requires: all groups, and one input of each group."""

TAKEN_BY = {
    "rewards": "rollouts(rewards=)",
    "groups": "rollouts(groups=)",
    "lengths": "rollouts(lengths=)",
    "cut": "rollouts(cut=)",
    "loss": "step(loss=)",
    "lr": "step(lr=)",
    "grad_norm": "step(grad_norm=)",
    "gradients": "gradients()",
    "clip": "Watcher(clip=)",
    "optimizer": "Watcher(optimizer=)",
}
"""Input -> the call of the watcher that takes it; all other inputs are arguments of ``observe``."""


@dataclass(frozen=True, slots=True)
class MetricInputs:
    """Inputs that a family of metrics requires, and the lowest level of detail that measures it."""

    needs: Needs
    level: Level = Level.TOKENS


SUBJECTS = {
    "policy/logp": MetricInputs((("logp", "logits"), ("mask",))),
    "policy/entropy": MetricInputs((("entropy", "logits"),)),
    "policy/kl_ref": MetricInputs((("ref_logp",),)),
    "ratio/": MetricInputs((("old_logp",),)),
    "ratio/clipfrac": MetricInputs((("clip",), ("old_logp",), ("advantages",))),
    "offpolicy/": MetricInputs((("advantages",), ("old_logp", "rollout_logp"))),
    "mismatch/": MetricInputs((("rollout_logp",),)),
    "adv/": MetricInputs((("advantages",),)),
    "lld/": MetricInputs((("advantages",),), Level.FULL),
    "text/repetition": MetricInputs((("ids",),), Level.FULL),
    "reward/mean": MetricInputs((("rewards",),), Level.SCALARS),
    "reward/zero_std_frac": MetricInputs((("rewards",), ("groups",)), Level.SCALARS),
    "len/mean": MetricInputs((("lengths",),), Level.SCALARS),
    "len/clipped": MetricInputs((("lengths",), ("cut",)), Level.SCALARS),
    "optim/grad_norm": MetricInputs((("gradients", "grad_norm"),), Level.SCALARS),
    "grad_layer/": MetricInputs((("gradients",),), Level.GRADIENTS),
    "optim/lr": MetricInputs((("optimizer", "lr"),), Level.SCALARS),
    "loss/": MetricInputs((("loss",),), Level.SCALARS),
}
"""Prefix of metric names -> the inputs that these metrics require."""


@dataclass(slots=True)
class Gaps:
    """Record of which inputs were given, which were refused (with the reason) and which metrics were measured."""

    level: Level
    given: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)

    def note(self, names: Iterable[str]) -> None:
        """Record that the metrics ``names`` were measured."""
        self.measured.update(names)

    def reasons(self) -> dict[str, str]:
        """Return why metrics were not measured so far, by the prefix of their names."""
        return {start: self._reason(subject) for start, subject in SUBJECTS.items() if not self._seen(start)}

    def _seen(self, start: str) -> bool:
        return any(name.startswith(start) for name in self.measured)

    def _reason(self, subject: MetricInputs) -> str:
        if not self.level.includes(subject.level):
            return f"level is {self.level.value!r}; this begins with {subject.level.value!r}"
        for choice in subject.needs:
            refused = [f"{_spelled(name)} was refused: {self.refused[name]}" for name in choice if name in self.refused]
            if refused:
                return "; ".join(refused)
            if self.given.isdisjoint(choice):
                return "never given: " + " or ".join(TAKEN_BY.get(name, f"observe({name}=)") for name in choice)
        return "there was nothing in it: no token inside a mask, or no finite gradient"


def _spelled(name: str) -> str:
    """Return an argument with its call, or the call if it takes none."""
    return "gradients()" if name == "gradients" else f"{name}="


# Recording: the inputs of each step become a row of the run. Refused and missing inputs are reported.

logger = logging.getLogger("rlwatch")

DEADLINE_S = 10.0
"""Longest time that the end of a run may delay the process, in seconds."""


class RecordingBase:
    """Base of the watcher: its run, the current step, and the end of the run.

    Parameters
    ----------
    run
        The run to record into.
    owned
        True if the run was created for this recording, and ends with it.
    level
        Level of detail of the measurements.
    strict
        True to raise ``ConfigError`` if an input is refused.
    decode
        Converts token ids to text, if text may be recorded.
    """

    def __init__(self, run: Run, *, owned: bool, level: Level, strict: bool, decode: Decode | None = None) -> None:
        self.run = run
        self.error_boundary = ErrorBoundary(run)
        self.latest: dict[str, float] = {}
        self._owned = owned
        self._level = level
        self._strict = strict
        self._gaps = Gaps(level)
        self.steps = StepCounter(self.error_boundary, self._delivered, decode)
        self._explained = False
        atexit.register(_deliver_at_exit, weakref.ref(self.steps))

    @property
    def unavailable(self) -> dict[str, str]:
        """Return the reasons why metrics were not measured so far, by the prefix of their names.

        Empty before the first step has ended.

        >>> import torch, rlwatch
        >>> watcher = rlwatch.Watcher(store="memory://unavailable-doctest")
        >>> watcher.step(1, loss=0.5)
        >>> watcher.unavailable["reward/mean"]
        'never given: rollouts(rewards=)'
        """
        return self._gaps.reasons() if self._explained else {}

    def finish(self) -> None:
        """Record the last step, and end the run if it was created here. Later calls do nothing."""
        self.error_boundary.attempt("last steps", self.steps.deliver, wait=True)
        if self._owned:
            self.error_boundary.attempt("finish", self.run.finish)

    def _given(self, **inputs: object) -> None:
        self._gaps.given |= {name for name, value in inputs.items() if value is not None}

    def _refuse(self, call: str, refused: Mapping[str, str]) -> None:
        """Count the refused inputs, and warn once about each."""
        for name, why in refused.items():
            if self._strict:
                raise ConfigError(f"{call}(): {why}" if name == call else f"{call}({name}=): {why}")
            self.run.counters.add("refused")
            if name not in self._gaps.refused:
                what = _spelled(name) if name == call else f"{_spelled(name)} of {call}"
                log_message(logging.WARNING, "rlwatch leaves out %s (training goes on): %s", what, why)
        self._gaps.refused.update(refused)

    def _delivered(self, step: int, measured: dict[str, float]) -> None:
        """Note a step's metrics; with several ranks they are filled in later, once all shares have arrived."""
        self._gaps.note(self.latest)
        self._gaps.note(measured)
        self.latest = measured
        if self._gaps.measured and not self._explained:
            self._explained = True
            reasons = self.unavailable
            if reasons:
                self.run.event("not_available", step, reasons=reasons)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.error_boundary.attempt("exception", self._crashed, error)
        self.finish()

    def _crashed(self, error: BaseException) -> None:
        """Record the measurements of the step in which training crashed, then the cause."""
        done = self.steps.last
        if not self.steps.tally.empty:
            self.error_boundary.attempt("unfinished step", self.steps.seal, done + 1)
        self.error_boundary.attempt("last steps", self.steps.deliver, wait=True)
        self.run.event("exception", done, **cause_of(error))
        if self._owned:
            self.run.finish(RunState.CRASHED, reason_of(error), DEADLINE_S)


def _deliver_at_exit(reference: weakref.ref[StepCounter]) -> None:
    """Deliver the last step at exit, in case :meth:`RecordingBase.finish` was not called."""
    steps = reference()
    if steps is not None:
        steps.error_boundary.attempt("last steps", steps.deliver, wait=True)


# Steering: commands that act on the loop, and their effects that must outlive the process.

FORMAT = 1


class Steering(RecordingBase):
    """A recording that executes commands to the run, with the objects and functions in ``means`` that the user gave."""

    def __init__(self, means: Means, *args: Any, snapshots: Snapshots | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._means = means
        self._commands = CommandController(means, self.error_boundary, lambda: self.steps.last, self._newest, snapshots)

    def obey(self) -> None:
        """Execute the run's waiting commands; while the run is paused, wait.

        Call it before a batch of rollouts is generated, when nothing in flight was computed with the old reference.
        Every rank calls it, at the same steps. In a loop that never calls it commands expire.
        """
        self.error_boundary.attempt("record", self.steps.deliver)
        self.error_boundary.attempt("commands", self._commands.obey)

    @property
    def snapshots(self) -> SnapshotKeeper | None:
        """Return the object that takes and keeps snapshots of the training state, or None without ``snapshots=``."""
        return self._commands.snapshots

    def _newest(self) -> Mapping[str, float]:
        """Return the metrics of the last step, for commands that report the values before them.

        This may wait for the device.
        """
        self.steps.deliver(wait=True)
        return self.latest

    def stage(self, name: str) -> Stage:
        """Return a context manager that times a stage of a step, and reports that the stage is running.

        ``name`` is one of ``sampling``, ``reward``, ``logprobs``, ``update``, ``weight_sync``, ``checkpoint`` and
        ``evaluation``, or a word of your own. Stages may nest: the inner one counts. It takes a few microseconds and
        raises nothing. :meth:`Watcher.step` ends the step, and with it the time of its stages.

        >>> import torch
        >>> with Watcher(torch.nn.Linear(2, 2), store="memory://stages-doctest") as watcher:
        ...     with watcher.stage("update"):
        ...         watcher.step(1, loss=0.3)
        """
        return (clock_of(self.run) or StageClock()).stage(name)

    @property
    def should_stop(self) -> bool:
        """Return True once the run received the command ``stop``.

        Read it after :meth:`obey`; otherwise the loop cannot be stopped.
        """
        self._means.heeds_stop = True
        return self._means.stopped

    def saved(self, checkpoint: str | os.PathLike[str]) -> None:
        """Add what commands changed to a checkpoint that the loop has written into the directory ``checkpoint``.

        Every rank calls it. That is a reset reference, a changed KL coefficient and other changed settings.
        """
        self.error_boundary.attempt("checkpoint", lambda: self._commands.saved(Path(checkpoint)))

    def resumed(self, checkpoint: str | os.PathLike[str]) -> None:
        """Restore what commands had changed, from a checkpoint that the loop has read from the directory
        ``checkpoint``.

        Every rank calls it, after the models were built and after :meth:`load_state_dict`, before training continues. A
        reference saved there replaces the one that the loop built; otherwise a resume would silently undo the reset.
        """
        self.error_boundary.attempt("resume", lambda: self._commands.resumed(Path(checkpoint)))

    def state_dict(self) -> dict[str, Any]:
        """Return the watcher's state for a checkpoint, in plain numbers and strings: the step and the run's id."""
        return {"format": FORMAT, "step": self.steps.last, "run_id": self.run.info.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count steps from ``state``, which :meth:`state_dict` returned before the checkpoint was saved."""
        self._refuse("load_state_dict", self.error_boundary.attempt("state", self._load, state) or {})

    def _load(self, state: Mapping[str, Any]) -> Mapping[str, str]:
        if state.get("format") != FORMAT or type(state.get("step")) is not int:
            return {"state": f"it is not what state_dict() of this version returns: got {shown(state)}"}
        self.steps.last = step_index(state["step"])
        saved_run = state.get("run_id")
        if saved_run != self.run.info.run_id:
            self.run.event("resume", state["step"], from_run=saved_run)
        return {}


# The watcher itself.

P = ParamSpec("P")
R = TypeVar("R")
Rows = Any
"""Type of inputs with a value for each token: a tensor, padded or nested, or a list of rows of unequal length."""


class Watcher(Steering):
    """Monitor of a custom training loop: PPO, GRPO, RLOO or any other with log-probs, rewards and gradients.

    The constructor may raise. Later calls never raise into the loop, wait for the device, keep a graph or draw a random
    number: training is bit-identical with and without it. Metrics without their inputs are not measured, and
    :attr:`unavailable` gives the reasons. Inputs that do not fit (a wrong shape) are skipped with one warning and
    counted as ``rlwatch/refused``. With ``strict`` they raise ``ConfigError`` instead, for a first try.

    >>> import torch
    >>> with Watcher(torch.nn.Linear(2, 2), store="memory://watcher-doctest") as watcher:
    ...     watcher.observe(logp=torch.tensor([[-0.7, -1.2]]), mask=torch.tensor([[1, 0]]))
    ...     watcher.step(1, loss=0.3)

    Parameters
    ----------
    model
        The policy, wrapped (DDP, FSDP2, Megatron's DDP, ``torch.compile``) or not: for gradients, and for a reset.
    optimizer, scheduler
        The optimizer and its learning-rate scheduler: to record the learning rate, and for commands that change it.
    ref_model
        The frozen reference, if there is one, so that it can be reset while training runs. A frozen PEFT adapter of
        ``model`` that is named ``ref`` can be reset, too.
    scaler
        The ``torch.amp.GradScaler`` of a float16 loop, so that gradients are recorded without its scale.
    run
        A run to record into, which the caller ends. By default one is created now and ended by :meth:`finish`.
    link
        With several ranks, the address at which rank 0 listens: ``HOST:PORT``, ``HOST`` or ``:PORT``; for the default
        see :func:`rlwatch.run.ranks.join`.
    settings
        Settings of the watcher; by default every setting has its default.
    arguments
        Fields of :class:`~rlwatch.integrations.torch.compat.WatcherSettings` that override ``settings``, such as
        ``clip=0.2``, and arguments of :func:`rlwatch.init` for the run created here: ``project``, ``name``, ``config``,
        ``store``...

    Raises
    ------
    ConfigError
        If an argument is not valid.
    RLWatchError
        Errors of :func:`rlwatch.init`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        ref_model: nn.Module | None = None,
        scaler: Any = None,
        run: Run | None = None,
        link: str | None = None,
        settings: WatcherSettings | None = None,
        **arguments: Any,
    ) -> None:
        compat.check_models(model, ref_model)
        compat.check_optimizer(optimizer)
        wanted, init_arguments = compat.divided(settings, arguments)
        compat.check_run(run, init_arguments)
        means = wanted.commanded(Means(model, ref_model, optimizer, scheduler, scaler=scaler))
        keep_states = Snapshots.of(wanted.snapshots)
        checked(keep_states, means.holdings)
        localise = _localise_of(wanted.localise, model)
        keep_texts, level, loss = KeepCompletions.of(wanted.completions), Level.of(wanted.level), wanted.loss()
        decode = compat.decoder_of(wanted.tokenizer) if wanted.text else None
        recording = _recording(run, init_arguments, link)
        self._rows = wanted.rows
        self._verifier_names: set[str] = set()
        self._tool_names: set[str] = set()
        super().__init__(
            means, recording, owned=run is None, level=level, strict=wanted.strict, decode=decode, snapshots=keep_states
        )
        self._given(clip=wanted.clip, optimizer=optimizer)
        measure = level.includes(Level.FULL)
        samples = Samples(recording, keep=keep_texts, measure=measure, tokenizer=wanted.tokenizer)
        self._localiser = localiser_of(self.error_boundary, localise, decode)
        self.collector = Collector(
            self.steps, level, loss, means, GenerationReader(loss.eos), samples, scaler, self._localiser
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are inert: they run computations passed to them and record nothing."""
        copied("Watcher", "make a new one where it is wanted")
        return _of_nothing, (type(self), self.run)

    @override
    def _delivered(self, step: int, measured: dict[str, float]) -> None:
        super()._delivered(step, measured)
        changed = self.collector.comparison.changed(step, measured)
        if changed is not None:
            self.run.event(EVENT, step, **changed)
        if self._localiser is not None:
            self._localiser.delivered(measured)

    def rollouts(
        self,
        *,
        rewards: Any = None,
        groups: Any = None,
        lengths: Any = None,
        cut: Any = None,
        right: Any = None,
        answers: Any = None,
        tasks: Sequence[object] | None = None,
        ids: Rows = None,
        mask: Rows = None,
        retention: Any = None,
        prompts: Sequence[str] | None = None,
        completions: Sequence[str] | None = None,
        prompt_index: Any = None,
        reward_parts: Mapping[str, Any] | None = None,
        advantages: Any = None,
        kl: Any = None,
    ) -> None:
        """Measure one generation of B responses, before the steps that train on it.

        Its metrics belong to the next step. Each input is a tensor, an array or a list with one entry for each
        response. All inputs are optional.

        Parameters
        ----------
        rewards
            Reward of each response, from which advantages are computed. In a list, None where a response has none.
        groups
            Prompt group of each response: one id for each response (integers or texts). If the responses to a prompt
            lie one after the other, the number of responses to each prompt.
        lengths
            Length of each response in tokens.
        cut
            True for a response that was truncated at the length limit.
        right
            Correctness of each response, if the reward does not show it: 1 is right, 0 and -1 are wrong.
        answers
            The answer that was extracted from each response, of any type; None where nothing was extracted.
        tasks
            Task or data source of each response; reward and length are measured for each task.
        ids, mask
            (B, T) ids of the sampled tokens, and a mask of those that the policy sampled; or rows of unequal length.
        retention
            Number of iterations over which each response was carried over.
        prompt_index
            Row of each prompt in the dataset, which is reported with the tokens that cause a spike of the gradient.
        reward_parts, advantages, kl
            Rewards of each reward function (its name -> one entry for each response), the advantage, and the KL to the
            reference in nats per token. They are recorded with a kept completion if they are on the CPU.
        prompts, completions
            Texts. A few are measured on a background thread. They are kept only with ``Watcher(completions=)``.
        """
        inputs = {name: value for name, value in locals().items() if name != "self"}  # every argument
        self._given(**(inputs | {"advantages": None}))  # those of the loss are asked for, by micro-batch
        self._look("rollouts", self.collector.rollouts, inputs)

    def verifier(
        self, name: str, function: Callable[P, R], *, canaries: Sequence[Canary] | Canaries | None = None
    ) -> Callable[P, R]:
        """Return a wrapper around ``function``, a reward function or verifier, that measures it under ``name`` at every
        call.

        The wrapper has the same arguments, result and exceptions. For each step it records the share of calls that
        raised or timed out, the share of answers without a reward (None or NaN), the share of calls with the same
        reward for every answer, and the seconds of a call. A result that is a list, tuple, array or tensor on the CPU
        has one reward for each answer; for other results only errors and time are recorded. Exceptions that the
        function catches itself are counted if its check is decorated with
        :func:`rlwatch.integrations.verifiers.count_errors`.

        ``canaries`` are calls whose answer is known to be right or wrong
        (:class:`~rlwatch.integrations.canaries.Canary`). ``function`` is called with each canary now, and in
        :meth:`step` every ten steps, on a background thread. It has to return one reward for it, or a list of one.

        Raises
        ------
        ConfigError
            If ``function`` is not callable, if ``name`` is empty or given twice, or if a canary cannot be scored.

        >>> import torch
        >>> watcher = Watcher(store="memory://verifier-doctest")
        >>> exact = watcher.verifier("exact", lambda answers: [float(a == "42") for a in answers])
        >>> exact(["42", "41"])
        [1.0, 0.0]
        >>> watcher.finish()
        """
        compat.check_verifier(name, function, self._verifier_names)
        wish = Canaries.of(canaries)
        if wish is not None:
            score = {name: lambda canary: function(*canary.given, **canary.columns)}
            self.collector.canaries.append(CanaryScorer(wish, score))
        self._verifier_names.add(name)
        measured = self.collector.verifiers.metered(name, function)
        return measured if is_async(function) else Tapped(function, measured)  # which can be copied and pickled

    def tool(self, name: str, function: Callable[P, R], *, failed: Callable[[R], bool] | None = None) -> Callable[P, R]:
        """Return ``function``, a tool that the policy calls, measured by ``name`` whenever it is called.

        It gets the same arguments and returns the same result, or raises the same exception; it may be a coroutine
        function and run in any thread. Recorded for each step are the number of calls, the shares that failed (by kind
        of error) and timed out, and the seconds of a call.

        Parameters
        ----------
        name
            Name of the tool in metrics.
        function
            The tool.
        failed
            Whether a result reports an error, for a tool that returns errors instead of raising them.

        Raises
        ------
        ConfigError
            If ``function`` or ``failed`` cannot be called, or ``name`` is empty or given twice.

        >>> watcher = Watcher(store="memory://tool-doctest")
        >>> divide = watcher.tool("divide", lambda a, b: a / b)
        >>> divide(1, 2)
        0.5
        >>> watcher.finish()
        """
        compat.check_verifier(name, function, self._tool_names)
        compat.check_callables(failed=failed)
        self._tool_names.add(name)
        measured = self.collector.tools.metered(name, function, failed)
        return measured if is_async(function) else Tapped(function, measured)  # which can be copied and pickled

    def observe(
        self,
        *,
        logp: Rows = None,
        mask: Rows = None,
        advantages: Rows = None,
        old_logp: Rows = None,
        ref_logp: Rows = None,
        rollout_logp: Rows = None,
        entropy: Rows = None,
        logits: Rows = None,
        ids: Rows = None,
        environment: Rows = None,
        staleness: Rows = None,
        experts: Rows = None,
        rollout_experts: Rows = None,
        old_experts: Rows = None,
        collision: Rows = None,
        responses: Any = None,
    ) -> None:
        """Measure one micro-batch of B responses, T tokens wide. Call it once for each forward pass of the loss.

        Inputs may carry a graph (they are detached), be of any floating dtype, and be padded, nested, or a list of
        B rows. Required are ``logp`` (or ``logits`` with ``ids``) and, where rows are padded, ``mask``. Every other
        input adds the metrics that depend on it.

        Parameters
        ----------
        logp
            (B, T) log-probs of the sampled tokens under the policy being updated, nats.
        mask
            (B, T) mask of the tokens that the loss counts: bool, or 0 and 1. For nested rows the default is all tokens.
        advantages
            (B,), (B, 1) or (B, T) advantages of responses or tokens.
        old_logp
            (B, T) log-probs when the update began, nats; leave it out if a batch is used for one update.
        ref_logp
            (B, T) log-probs under the frozen reference, nats.
        rollout_logp
            (B, T) log-probs as the engine that sampled the tokens reported them, nats.
        entropy
            (B, T) entropy of the whole next-token distribution, nats.
        logits
            (B, T, V) logits such that ``logits[:, t]`` predicts ``ids[:, t]``. ``entropy`` and, if left out, ``logp``
            are computed from them, in bounded memory, at the cost of a pass over the logits.
        ids
            (B, T) ids of the sampled tokens.
        environment
            (B, T) mask of the tokens that a tool or a user wrote, which the loss must not count.
        staleness
            (B,) policy versions between the rollout and this update.
        experts, rollout_experts, old_experts
            (B, T, layers, k) experts to which a token was routed: in the trainer, in the rollout engine, and in the
            trainer when the update began.
        collision
            (B, T) sum of the squared probabilities of all tokens at a position, if ``logits`` is left out.
        responses
            (B,) indices of these responses in the last :meth:`rollouts`, from 0, so that the tokens that cause a spike
            are reported with prompt, group, task and reward. Not needed if both calls got ``ids`` of the same width.
        """
        inputs = {name: value for name, value in locals().items() if name != "self"}  # every argument
        self._given(**inputs)
        self._look("observe", self.collector.observe, inputs)

    def forward(self, compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return ``compute(*args, **kwargs)``, the forward pass of the loss, and keep the call so that it can be
        repeated.

        ``compute`` returns log-probs (B, T), or a tuple that contains them and perhaps entropies. Pass those very
        tensors to :meth:`observe`, and compute the loss from them. When the gradient spikes, :meth:`gradients` repeats
        the pass without a graph, with displaced copies of the weights, to find the tokens that caused it. Arguments are
        kept until :meth:`step`: the loop must not overwrite them before. Exceptions of ``compute`` propagate.
        """
        before = self.error_boundary.attempt("forward", RandomState.now) if self.collector.localises else None
        result = compute(*args, **kwargs)
        if before is not None:
            self.error_boundary.attempt(
                "forward", self.collector.ran, LoopCall(compute, args, kwargs, self._rows), result, before
            )
        return result

    def synced(self, engine: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Compare the rollout engine's weights with the model's. Call it right after a weight sync.

        Up to 512 elements of each tensor are compared, other ones at each sync, after a cast to the engine's dtype.
        They must be equal to the bit, except that a merged LoRA adapter may differ by rounding. Recorded are the share
        of tensors that differ (by layer and in all), the largest difference, and the share of the model that was
        compared. Names of wrappers do not count, and the fused modules of vLLM (``qkv_proj``, ``gate_up_proj``) are
        known. Quantised tensors, tensors divided by tensor parallelism, and models under FSDP1 are not compared. The
        call only reads, and waits for no device unless the engine is on another one.

        Parameters
        ----------
        engine
            The engine's module, its state dict, or pairs of name and tensor. The engine must be awake: memory that it
            has released cannot be read.
        """
        self._given(engine=engine)
        self._look("synced", self.collector.synced, engine)

    def gradients(self) -> None:
        """Measure the gradients. Call it after the last ``backward()`` of the step, before gradients are clipped.

        It may be called before or after ``scaler.unscale_(optimizer)``. If it is called several times in a step, the
        last call counts. For Megatron's models call it after ``finalize_model_grads``, before the optimizer's step.
        """
        self._given(gradients=True)
        self._look("gradients", self.collector.gradients)

    def step(
        self,
        step: int | None = None,
        *,
        loss: float | Tensor | None = None,
        lr: float | Tensor | None = None,
        grad_norm: float | Tensor | None = None,
        **scalars: float | Tensor,
    ) -> None:
        """End an optimizer step: record the measurements since the last call as the row of ``step``.

        Parameters
        ----------
        step
            Number of optimizer steps so far, this one included, an integer >= 0; by default one more than the last.
        loss
            The loss of the step, in the loop's own unit.
        lr
            Learning rate of this step; by default that of the optimizer when the step was first observed.
        grad_norm
            The result of ``clip_grad_norm_``, if :meth:`gradients` is not called.
        scalars
            More numbers of the step, by rlwatch's canonical names, a trainer's names or your own. The call does not
            wait for tensors on a device.
        """
        inputs = {"loss": loss, "lr": lr, "grad_norm": grad_norm}
        self._given(**inputs)
        self._look("step", self.collector.end, step, inputs, scalars)
        self.error_boundary.attempt("record", self.steps.deliver)

    @override
    def finish(self) -> None:
        self.error_boundary.attempt("samples", self.collector.samples.close)
        super().finish()

    def _look(self, call: str, work: Callable[..., Refused], *inputs: Any) -> None:
        """Run ``work`` if the run records on this process, and count the inputs that it refused."""
        if not self._live and isinstance(self.run, Run):
            self.run.lose_forked()
        refused = self.error_boundary.attempt(call, work, *inputs) if self._live else None
        self._refuse(call, refused or {})

    @property
    def _live(self) -> bool:
        return self.run.measures


def _signature() -> inspect.Signature:
    """Return the signature of the watcher with every setting by name, for ``help()`` and notebooks."""
    own = list(inspect.signature(Watcher.__init__).parameters.values())[1:-1]
    settings = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(WatcherSettings)
    ]
    rest = inspect.Parameter("init_arguments", inspect.Parameter.VAR_KEYWORD, annotation=Any)
    return inspect.Signature([*own, *settings, rest])


Watcher.__signature__ = _signature()  # type: ignore[attr-defined]


def _localise_of(wish: bool | Localise | None, model: nn.Module | None) -> Localise | None:
    """Return the settings of localisation, if it is possible; by default in one process. Raises ``ConfigError``."""
    hidden = compat.hides_gradients(model)
    alone = place_here().get("world_size", 1) == 1
    wanted = Localise.of(alone and not hidden if wish is None else wish)
    if wanted is not None and hidden:
        raise ConfigError(f"localise: {compat.HIDDEN}; leave it out")
    if wanted is not None and wanted.keep_inputs is not None:
        raise ConfigError("localise: keep_inputs needs a trainer whose inputs are known, TRL; leave it out here")
    return wanted


def _recording(run: Run | None, init_arguments: Mapping[str, Any], link: str | None) -> Run:
    """Return the run to record into, linked with the other ranks; a new run prints its address."""
    begin = {**place_here(), **init_arguments}
    recording = begin_together(lambda: init(**begin) if run is None else run, link=link)
    if run is None:
        recording.introduce()
    return recording


def _of_nothing(of: type[Watcher], run: Run) -> Watcher:
    """Return a watcher for an inert run, created without the constructor, which links ranks."""
    watcher, means = of.__new__(of), Means()
    Steering.__init__(watcher, means, run, owned=False, level=Level.SCALARS, strict=False)
    vars(watcher).update(_rows=None, _localiser=None, _verifier_names=set(), _tool_names=set())
    reads = (Level.SCALARS, LossSettings(), means, GenerationReader(()), Samples(run, measure=False))
    watcher.collector = Collector(watcher.steps, *reads)
    return watcher
