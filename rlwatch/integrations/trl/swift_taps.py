"""Reading of ms-swift's GRPO trainer, a subclass of TRL's whose loss and rewards have other arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from rlwatch.integrations.compat import Needs, lacking
from rlwatch.integrations.level import Level
from rlwatch.integrations.trl.batch import Scored, sequence_stats, token_batch
from rlwatch.integrations.trl.taps import TrlTaps

NEEDS: Needs = {
    "_compute_loss_and_metrics": ("model_inputs", "grpo_batch"),
    "_get_per_token_logps_and_entropies": ("grpo_batch",),
    "_compute_rewards_per_func": ("samples",),
    "_generate_and_score_completions": (),
}
"""Private methods that are wrapped, and the parameters by which each is recognised."""
COLUMNS = {
    "advantages": "advantages", "old_per_token_logps": "old_per_token_logps",
    "ref_per_token_logps": "ref_per_token_logps",
    "sampling_per_token_logps": "rollout_per_token_logps",
}  # fmt: skip
"""TRL's name of an input of the loss -> field of ms-swift's ``GRPOBatch``."""


class SwiftTaps(TrlTaps):
    """Hooks that measure a GRPO trainer of ms-swift. Gradient spikes are not localised."""

    rewards = "_compute_rewards_per_func"

    @override
    def attach(self) -> None:
        self.wrap("_get_per_token_logps_and_entropies", self._after_swift_forward)
        self.wrap("_compute_loss_and_metrics", self._after_swift_loss)
        self._meter_rewards()
        self.wrap(self.rewards, self._after_swift_rewards)
        self.wrap("_generate_and_score_completions", self._after_swift_generation)
        self.tap_loss()
        self.tap_gradients()

    def _after_swift_forward(self, result: Any, *_args: Any, **_kwargs: Any) -> None:
        """Keep the pass of the loss; the passes for the old and the reference policy have no gradient."""
        logps, entropy = result[:2]
        if logps.requires_grad:
            self._forward = (logps.detach(), None if entropy is None else entropy.detach())

    def _after_swift_loss(self, result: Any, _model: Any, model_inputs: Mapping[str, Any], grpo_batch: Any) -> None:
        forward, self._forward = self._forward, None
        self.look_at_gradients()
        if forward is None:
            return
        with torch.no_grad():
            inputs = loss_inputs(model_inputs, grpo_batch, result[1]["completion_mask"])
            batch = token_batch(self.trainer, inputs, *forward, control=self._control)
            known = sequence_stats(self.trainer, inputs, batch)
            self.tally.add_batch(batch, full=self._level.includes(Level.FULL), instead=known)

    def _after_swift_rewards(self, result: Tensor, samples: Sequence[Any]) -> None:
        """Note the rewards ``result`` (N, functions) of all ranks; a batch of several turns has other sizes."""
        if not getattr(self.trainer, "dynamic_num_samples", False) and result.shape[1]:
            self._generations.scored(scored(result.detach(), samples))

    def _after_swift_generation(self, _result: Any, *_args: Any, **_kwargs: Any) -> None:
        ids = self._generations.ids
        stats, scored = self._generations.take({} if ids is None else padded(ids))
        self.tally.add_stats(stats)
        run = self._error_boundary.run
        if scored is not None and run is not None:
            self.sampled.offer(run, self.trainer, scored, None)


def loss_inputs(model_inputs: Mapping[str, Any], grpo_batch: Any, mask: Tensor) -> dict[str, Any]:
    """Return the inputs of ms-swift's loss by TRL's names, (B, T) each.

    ``mask`` (B, T) marks the tokens that the loss counts. Token ids are left out where responses are packed into one
    row.
    """
    inputs: dict[str, Any] = {"completion_mask": mask}
    inputs |= {name: getattr(grpo_batch, field) for name, field in COLUMNS.items()}
    ids = model_inputs["input_ids"]
    inputs["completion_ids"] = ids[:, -mask.shape[1] :] if len(ids) == len(mask) else None
    return {name: value for name, value in inputs.items() if value is not None or name == "completion_ids"}


def scored(rewards: Tensor, samples: Sequence[Any]) -> Scored:
    """Return ms-swift's ``samples`` as one generation with ``rewards`` (N_all, functions)."""
    return Scored(
        rewards,
        [sample.extra for sample in samples],
        [sample.messages[:-1] for sample in samples],
        [sample.messages[-1]["content"] for sample in samples],
        [flat(sample.response_token_ids) for sample in samples],
    )


def flat(ids: Sequence[Any]) -> list[int]:
    """Return the token ids of one response, which ms-swift keeps by turn where there are several turns.

    >>> flat([[4, 5], [6]]), flat([4, 5])
    ([4, 5, 6], [4, 5])
    """
    return [int(token) for turn in ids for token in (turn if isinstance(turn, Sequence) else (turn,))]


def padded(ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return token ids (N, T) and their mask (N, T) by TRL's names."""
    rows = [torch.tensor(list(one), dtype=torch.int64) for one in ids]
    mask = [torch.ones(len(one), dtype=torch.bool) for one in ids]
    return {
        "completion_ids": pad_sequence(rows, batch_first=True),
        "completion_mask": pad_sequence(mask, batch_first=True),
    }


def lacks(trainer: Any) -> str | None:
    """Return the reason why ``trainer`` is not read as ms-swift's; None if it is."""
    return lacking(trainer, NEEDS)
