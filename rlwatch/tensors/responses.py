"""The per-response view of one generation batch, whatever trainer it came from.

A trainer gives what it has, in one call, as tensors, arrays or lists::

    batch = ResponseBatch.of(
        rewards=[1.0, 0.0, None, 1.0],        # None: the reward function gave none
        groups=2,                             # or each prompt's id, if a group may be spread over ranks
        lengths=[120, 340, 80, 512],
        cut=[False, False, False, True],
        tasks=["gsm8k", "gsm8k", "math", "math"],
        answers=["42", "41", None, "7"],      # None: no answer could be extracted
    )
    tally.add_stats(observe_responses(batch))

Give a quantity once a step: lengths that a :class:`~rlwatch.tensors.tokens.TokenBatch` with ``cut`` tells of are
not to be given here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor

from rlwatch.tensors.coding import codes, device_of, numbers, some_numbers
from rlwatch.tensors.groups import consecutive
from rlwatch.tensors.padded import Padded
from rlwatch.tensors.tasks import TaskNames


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """Detached tensors of B responses on one device; each is ``None`` where it does not exist.

    Parameters
    ----------
    rewards, scored
        (B,) rewards as the advantages are made of; (B,) bool, which responses have one (None: all). A response
        without a reward is left out; a reward that is NaN is not.
    right
        (B,) bool, whether a response is right, for a trainer that judges apart from the reward. Without it a reward
        of 1 is right, of 0 or -1 wrong, and of any other it is not known.
    groups
        (B,) int64: ids of the prompts, at least 0 and the same in all batches and ranks. Ids below 0 are of groups
        that are whole within this batch (:func:`~rlwatch.tensors.groups.consecutive`).
    whole
        Whether all groups are: nothing needs to be kept of them then.
    answers
        (B,) int64, equal for equal answers in all batches; below 0 where no answer was extracted.
    lengths, cut
        (B,) tokens of a response; (B,) bool, whether it was cut at the length limit.
    entropy
        (B,) mean entropy of a response's tokens, nats.
    tasks, task_names
        (B,) indices into ``task_names``, of a task or data source.
    ids, mask, eos
        (B, T) sampled token ids, right-padded; (B, T) which of them the policy sampled; ids that end a sequence.
    retention, spans, budget
        (B,) iterations a response was carried over; (B,) policy versions it was sampled under; response tokens an
        iteration is to have over all ranks.
    """

    rewards: Tensor | None = None
    scored: Tensor | None = None
    right: Tensor | None = None
    groups: Tensor | None = None
    whole: bool = False
    answers: Tensor | None = None
    lengths: Tensor | None = None
    cut: Tensor | None = None
    entropy: Tensor | None = None
    tasks: Tensor | None = None
    task_names: tuple[str, ...] = ()
    ids: Tensor | None = None
    mask: Tensor | None = None
    eos: tuple[int, ...] = ()
    retention: Tensor | None = None
    spans: Tensor | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if the tensors are not of the same responses."""
        sizes = {f.name: x.shape[0] for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"everything in a ResponseBatch must be of the same responses, got numbers {sizes}")

    @classmethod
    def of(
        cls,
        *,
        rewards: Any = None,
        scored: Any = None,
        right: Any = None,
        groups: Any = None,
        answers: Any = None,
        lengths: Any = None,
        cut: Any = None,
        entropy: Any = None,
        tasks: Sequence[object] | None = None,
        task_names: TaskNames | None = None,
        ids: Any = None,
        mask: Any = None,
        eos: Sequence[int] = (),
        retention: Any = None,
        spans: Any = None,
        budget: float | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """From tensors, arrays or lists; what it takes is described on the class, but for this.

        ``rewards``: in a list, None where a response has none (of a tensor, ``scored`` says so).
        ``groups``: how many responses a group has, if groups lie one after the other, whole, in this batch; else one
        id a response: integers, or anything that has a text, such as verl's ``uid``.
        ``answers``: one a response, of any type; None where none was extracted.
        ``tasks``, ``task_names``: one name a response; the run's :class:`~rlwatch.tensors.tasks.TaskNames`, which
        bounds how many there are.
        ``ids``, ``mask``: (B, T), nested, or lists of rows.
        ``device``: where everything goes; default: where the first tensor given is that is not on the CPU.

        Raises ``ValueError`` if the numbers of responses differ or groups do not divide them.
        """
        plain = {"right": right, "lengths": lengths, "cut": cut, "entropy": entropy}
        plain |= {"retention": retention, "spans": spans}
        columns: dict[str, Tensor | None] = {name: None if x is None else numbers(x) for name, x in plain.items()}
        columns["rewards"], there = (None, None) if rewards is None else some_numbers(rewards)
        columns["scored"] = there if scored is None else numbers(scored)
        columns["answers"] = None if answers is None else codes(answers)
        columns |= _tokens(ids, mask)
        names = task_names or TaskNames()
        columns["tasks"] = None if tasks is None else torch.tensor(names.codes(tasks), dtype=torch.int64, device="cpu")
        known = [x for x in columns.values() if x is not None]
        columns["groups"] = None if groups is None else _group_ids(groups, known)
        where = device_of((*known, columns["groups"])) if device is None else torch.device(device)
        quick = where.type != "cpu"  # a copy to the CPU that nobody waits for would be read half-written
        return cls(
            **{name: None if x is None else x.to(where, non_blocking=quick) for name, x in columns.items()},
            whole=isinstance(groups, Integral),
            task_names=() if tasks is None else names.names,
            eos=tuple(eos),
            budget=budget,
        )


def _tokens(ids: Any, mask: Any) -> dict[str, Tensor | None]:
    """Ids (B, T), and a mask of them if one is given or their rows are unequal."""
    if ids is None:
        return {"ids": None, "mask": None}
    padded = Padded.of(ids)
    values = torch.zeros(0, 0, dtype=torch.int64, device="cpu") if padded.values.shape == (0,) else padded.values
    if values.dim() != 2:
        raise ValueError(f"ids must be (B, T), got a shape of {tuple(values.shape)}")
    on = torch.ones_like(values, dtype=torch.bool) if padded.valid is None else padded.valid
    return {"ids": values, "mask": on if mask is None else on & Padded.of(mask).values.bool()}


def _group_ids(groups: Any, known: Sequence[Tensor]) -> Tensor:
    if not isinstance(groups, Integral):
        return codes(groups)
    if not known:
        raise ValueError("a size of groups tells nothing without responses")
    return consecutive(known[0].shape[0], int(groups))
