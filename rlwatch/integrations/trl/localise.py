"""Localisation of gradient spikes in GRPO and RLOO: their loss passes are kept until the optimizer has stepped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlwatch.error_boundary import ErrorBoundary, Tapped, call_or
from rlwatch.errors import ConfigError
from rlwatch.gradloc.passes import LossPass, Outputs, RandomState, RecordedPasses
from rlwatch.gradloc.recording import Context
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import UNKEPT, Localise, Localiser, Spike, scale_of
from rlwatch.integrations.transformers.compat import HIDDEN, sharding_engine, unseen
from rlwatch.integrations.trl.batch import Scored, as_text, tasks_of
from rlwatch.tensors.padded import places_of
from rlwatch.tensors.tokens import TokenBatch

EVALUATING = "the model is in evaluation mode, in which the trainer is not watched"
IDS = ("prompt_ids", "completion_ids")
"""Inputs by which a sequence is recognised, because TRL shuffles a generation before it trains on it."""
MASKS = ("prompt_mask", "completion_mask")


def wished(wish: bool | Localise | None, level: Level, trainer: Any) -> Localise | None:
    """Return the settings of localisation for ``wish``; None means the default for this level and trainer.

    The result is None if localisation is off. Raises ``ConfigError`` if the settings are not possible with this
    trainer.
    """
    engine = sharding_engine(trainer)
    if wish is None:
        return Localise() if level.includes(Level.FULL) and engine is None else None
    settings = Localise.of(wish)
    if settings is not None and (reason := unseen(trainer)):
        raise ConfigError(f"localise: {reason}; leave localise= out, or pass False")
    if settings is not None and settings.skip is not None and engine in HIDDEN:
        raise ConfigError(f"localise: under {engine} a step cannot be left out; leave skip= out")
    if settings is not None and not level.includes(Level.TOKENS):
        raise ConfigError(f'localise: it needs level="tokens" or closer, got {level.value!r}')
    return settings


class TrainerLocalising:
    """Link between a TRL trainer and ``localiser``, which passes on the forward passes of the trainer's loss, and its
    gradients.

    ``error_boundary`` is the error boundary around the measurement.
    """

    def __init__(self, trainer: Any, error_boundary: ErrorBoundary, localiser: Localiser) -> None:
        self.localiser = localiser
        self._trainer = trainer
        self._tap = LossPassTap(trainer, error_boundary, localiser.passes)
        self._inputs: list[Mapping[str, Any]] = []
        self._generated: Generated | None = None
        self._generations = 0
        self._dataset = PromptRows(trainer)
        self._bare = BareModel(trainer)
        localiser.rewards = self._add_rewards
        localiser.contexts = self._contexts
        localiser.expects = True
        localiser.autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision, "")

    def attach(self, live: Callable[[], bool]) -> None:
        """Wrap the forward pass of the loss; it is kept while ``live()`` is True."""
        self._tap.attach(live)

    def generated(self, outputs: Mapping[str, Any], rewards: Tensor, scored: Scored) -> None:
        """Keep a generation: TRL's ``outputs``, and the rewards (N,) of its sequences; ``scored`` has their components
        and texts.
        """
        known = {name: outputs[name] for name in IDS if name in outputs}
        step = int(self._trainer.state.global_step)
        self._generated = Generated(known, rewards, scored, self._generations, step)
        self._generations += 1

    def keep(self, tokens: TokenBatch, inputs: Mapping[str, Any]) -> None:
        """Keep the forward pass of a micro-batch's loss, before its backward pass.

        ``tokens`` and ``inputs`` are those of the micro-batch.
        """
        self._tap.keep(tokens)
        self._inputs.append({name: inputs[name] for name in (*IDS, *MASKS) if name in inputs})

    def forget(self) -> None:
        """Drop the kept forward passes of the loss, at the start of training."""
        self._tap.forget()
        self._inputs.clear()

    def check(self, total: Tensor | float | None) -> None:
        """Examine the complete gradient of the step.

        ``total`` is its norm before clipping, if the trainer computed it.
        """
        try:
            model = self._bare.of(self._trainer.model)
            self.localiser.missing = UNKEPT if model.training else EVALUATING
            step = int(self._trainer.state.global_step) + 1
            self.localiser.check(Spike(model, step, total, self._loss_scale()))
        finally:
            self._inputs.clear()

    def _loss_scale(self) -> Tensor | float | None:
        """Return the loss scale of float16; by the time the norm is known, the gradients no longer carry it."""
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        return None if scaler is None else scale_of(scaler)

    def _add_rewards(self, passes: list[LossPass]) -> None:
        """Find each sequence of the step in the generation it came from."""
        made = self._generated
        if made is None or len(passes) != len(self._inputs):
            return
        columns = identity_of(self._trainer, made, self._dataset)
        for one, inputs in zip(passes, self._inputs, strict=True):
            known = made.known
            ours = [inputs[name] for name in known] if known.keys() <= inputs.keys() else None
            at = None if ours is None else places_of(ours, list(known.values()))
            if at is None:
                continue
            rewards = made.rewards.to(at.device)
            one.rewards = torch.where(at < 0, torch.nan, rewards[at.clamp(min=0)]).to(one.tokens.logp.device)
            rows = at.tolist()
            one.identify({name: [values[i] if i >= 0 else None for i in rows] for name, values in columns.items()})

    def _contexts(self) -> list[Context]:
        """Return inputs that the forward of each micro-batch read."""
        temperature = float(self._trainer.temperature)
        return [Context(_whole(inputs, IDS), _whole(inputs, MASKS), temperature) for inputs in self._inputs]


def _whole(inputs: Mapping[str, Tensor], names: tuple[str, str]) -> Tensor:
    """Return prompt and completion, (B, L)."""
    return torch.cat([inputs[name] for name in names], 1)


# Origin of the sequences in the generation: prompt, group, sample, task and rewards.

INDEX_COLUMNS = ("index", "idx", "id")
"""Columns of a dataset that may number its rows; the first one with an integer is used."""
LOOKED_THROUGH = 200_000
"""Largest number of rows of a dataset in which a prompt is searched."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One generation of this rank: token ids ``known`` (N, ...) and ``rewards`` (N,) of its sequences.

    It is the ``number``-th of the run, after ``step`` optimizer steps. ``scored`` has the rewards of each function and
    the texts.
    """

    known: Mapping[str, Tensor]
    rewards: Tensor
    scored: Scored
    number: int
    step: int


class PromptRows:
    """Search for the row of the trainer's dataset that contains a prompt.

    The dataset is indexed at the first search.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._places: dict[str, int] | None = None

    def of(self, row: Mapping[str, Any], prompt: Any) -> int | None:
        """Return the number of the dataset row with ``prompt``, or None if it is not found.

        ``row`` is a copy of the dataset row, which may contain its number. Of several rows with the prompt the first
        counts.
        """
        numbers = (row.get(name) for name in INDEX_COLUMNS)
        number = next((n for n in numbers if isinstance(n, int) and not isinstance(n, bool)), None)
        if number is not None:
            return number
        if self._places is None:
            self._places = call_or(self._looked_through, lambda _: {})
        return self._places.get(as_text(prompt))

    def _looked_through(self) -> dict[str, int]:
        dataset = self._trainer.train_dataset
        if not hasattr(dataset, "__len__") or len(dataset) > LOOKED_THROUGH:
            return {}
        places: dict[str, int] = {}
        for i, prompt in enumerate(dataset["prompt"]):
            places.setdefault(as_text(prompt), i)
        return places


def identity_of(trainer: Any, made: Generated, dataset: PromptRows) -> dict[str, list[Any]]:
    """Return the columns that identify the N sequences of a generation: prompt, group, sample, rollout, task and reward
    parts.

    ``made`` is the generation; ``dataset`` finds the rows of its prompts. The names are those of
    :data:`rlwatch.gradloc.passes.IDENTITY`. Waits for the device.
    """
    scored, count, every = made.scored, len(made.scored.completions), int(made.scored.rewards.shape[0])
    size = max(1, int(getattr(trainer, "num_generations", 1)))
    first = int(trainer.accelerator.process_index) * count
    places = [first + i for i in range(count)]
    parts = scored.rewards[first : first + count].tolist()
    names = list(getattr(trainer, "reward_func_names", ()))
    tasks = tasks_of(scored.rows)
    return {
        "prompt_index": [dataset.of(row, prompt) for row, prompt in zip(scored.rows, scored.prompts, strict=False)],
        "prompt": [as_text(prompt) for prompt in scored.prompts],
        "group": [str((made.number * every + place) // size) for place in places],
        "sample": [place % size for place in places],
        "rollout": [str(made.number * every + place) for place in places],
        "sampler_version": [made.step] * count,
        "reward_parts": [json.dumps(dict(zip(names, given, strict=False))) for given in parts],
        **({} if tasks is None else {"task": [None if task is None else str(task) for task in tasks]}),
    }


# The loss passes of a GRPO or RLOO trainer, kept until the optimizer has stepped so that they can be repeated.

METHOD = "_get_per_token_logps_and_entropies"
BY_SEQUENCE = ("input_ids", "attention_mask")
"""Arguments of the trainer's forward pass with one row for each sequence."""
POSITIONAL = (*BY_SEQUENCE, "logits_to_keep", "batch_size")
"""Arguments of the trainer's forward pass after the policy, in order."""
PLAIN = (*POSITIONAL, "compute_entropy", "compute_aux_loss")
"""Arguments with which single sequences can be repeated; images are divided in other ways."""


@dataclass(slots=True)
class TrainerForwardCall:
    """One call of the trainer's forward pass with the policy, with what is needed to repeat it.

    ``drew`` is True if the call drew random numbers.
    """

    method: Callable[..., Any]
    policy: Any
    arguments: Mapping[str, Any]
    random: RandomState
    drew: bool

    @property
    def splits(self) -> bool:
        """Return True if the forward pass can be repeated for single sequences."""
        return all(value is None or name in PLAIN for name, value in self.arguments.items())

    def again(self, rows: Sequence[int] | None = None) -> Outputs:
        """Repeat the forward pass for the sequences ``rows`` (None: all), without the wrappers of the policy for
        several ranks.
        """
        given = dict(self.arguments)
        if rows is not None:
            given |= {name: given[name][list(rows)] for name in BY_SEQUENCE}
        return Outputs(*self.method(self.policy, **given)[:3])

    def differentiable(self, rows: Sequence[int] | None = None) -> Outputs:
        """Repeat the forward pass for the sequences ``rows`` (None: all), with a language-model head that has a forward
        derivative.
        """
        with pure_head():
            return self.again(rows)


class BareModel:
    """The policy of one trainer without Accelerate's wrappers, looked up once: each look-up searches the disk for
    packages.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._known: tuple[Any, Any] = (None, None)

    def of(self, model: Any) -> Any:
        """Return ``model`` without its wrappers."""
        if model is not self._known[0]:
            self._known = model, self._trainer.accelerator.unwrap_model(model)
        return self._known[1]


class LossPassTap:
    """Hook on the forward pass of the loss in one trainer, which keeps the passes in ``passes``."""

    def __init__(self, trainer: Any, error_boundary: ErrorBoundary, passes: RecordedPasses) -> None:
        self._trainer = trainer
        self._error_boundary = error_boundary
        self._passes = passes
        self._latest: tuple[TrainerForwardCall, Outputs] | None = None
        self._bare = BareModel(trainer)

    def attach(self, live: Callable[[], bool]) -> None:
        """Wrap the trainer's forward pass; calls are kept while ``live()`` is True."""
        original = getattr(self._trainer, METHOD)

        def tapped(model: Any, *args: Any, **kwargs: Any) -> Any:
            looks = bool(kwargs.get("compute_entropy")) and live()
            before = self._error_boundary.attempt("loss pass", RandomState.now) if looks else None
            result = original(model, *args, **kwargs)
            if before is not None:
                given = dict(zip(POSITIONAL, args, strict=False)) | kwargs
                self._error_boundary.attempt("loss pass", self._note, result, before, original, model, given)
            return result

        setattr(self._trainer, METHOD, Tapped(original, tapped))

    def keep(self, tokens: TokenBatch) -> None:
        """Keep the last forward pass as that of the loss that has just been computed from ``tokens``."""
        latest, self._latest = self._latest, None
        if latest is not None:
            call, outputs = latest  # the outputs carry the graph and must not be kept any longer
            drew, other = call.drew or not call.splits, call.differentiable
            self._passes.add(call.again, outputs, tokens, random=call.random, drew=drew, differentiable=other)

    def forget(self) -> None:
        """Drop the kept forward passes of the loss at the end of the step."""
        self._latest = None
        self._passes.clear()

    def _note(self, result: Any, before: RandomState, method: Any, model: Any, given: Mapping[str, Any]) -> None:
        outputs = Outputs(*result[:3])
        if outputs.logp.requires_grad:
            drew = not before.same(RandomState.now())
            policy = self._bare.of(model)
            self._latest = TrainerForwardCall(_unprofiled(method), policy, given, before, drew), outputs


def _unprofiled(method: Any) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return the bare method: TRL's decorator sends every call's time to the tracker."""
    inner = getattr(getattr(method, "__func__", None), "__wrapped__", None)
    return method if inner is None else inner.__get__(method.__self__)  # type: ignore[no-any-return]


# TRL's fused language-model head, written in operations that have a forward derivative.

HEAD = "_ChunkedLogProbFunction"
TOKENS = 1024
"""Number of tokens whose logits are held at once; forward derivatives double them."""


class PureHead:
    """Replacement of TRL's ``ChunkedLogProbFunction`` with the same signature, in operations that have a forward
    derivative.

    It returns log-probs and entropies only.
    """

    @staticmethod
    def apply(  # noqa: PLR0917  (TRL's signature)
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        _chunk: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: Collection[str] = (),
        *,
        at_once: int = TOKENS,
    ) -> tuple[Tensor | None, ...]:
        """Return log-probs (N,) and entropies (N,) of the tokens ``targets`` (N,), in nats, and three times None.

        Logits are divided by ``temperature``, multiplied by ``scale`` and capped at ``softcap``, if given. ``hidden``
        (N, H) are the last hidden states, ``weight`` (V, H) and ``bias`` (V,) those of the head. Entropies are None
        unless ``outputs`` names them. The logits of ``at_once`` tokens are held at a time.
        """

        def logits(rows: Tensor) -> Tensor:
            z = linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)).float() * scale
            return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature

        pieces = zip(torch.split(hidden, at_once), torch.split(targets, at_once), strict=True)
        chunks = [_log_probs(logits(h), t) for h, t in pieces]
        logp, entropy = (torch.cat(part) for part in zip(*chunks, strict=True))
        return logp, entropy if "entropy" in outputs else None, None, None, None


@contextmanager
def pure_head() -> Iterator[None]:
    """Let TRL's models use :class:`PureHead` during the ``with`` block, for
    :attr:`rlwatch.gradloc.passes.LossPass.differentiable`.

    Nothing changes if this TRL has no fused head.
    """
    utils = sys.modules.get("trl.trainer.utils")  # whose trainer asks for this has it
    fused: Any = getattr(utils, HEAD, None)
    if utils is None or fused is None:
        yield
        return
    setattr(utils, HEAD, PureHead)
    try:
        yield
    finally:
        setattr(utils, HEAD, fused)


def _log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N,) log-probs of the targets and entropies, nats."""
    every = logits.log_softmax(-1)
    return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
