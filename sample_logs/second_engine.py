"""A second engine that samples for TRL in place of vLLM: a copy of the policy that can be stale or imprecise.

It is put where TRL keeps its vLLM client, so TRL's own ``sampling/*`` metrics compare it with the trainer.
"""

from __future__ import annotations

import torch


class SecondEngine:
    """Samples from its own float32 copy of the policy and returns its own log-probs.

    Parameters
    ----------
    every
        The copy is renewed every so many steps (1: always fresh).
    noise
        Standard deviation of what is added to every weight of the copy, relative to that of its tensor: a
        stand-in for an engine that computes with lower precision or wrong weights.
    ramp
        Steps ``(first, last)`` over which the noise grows from nothing to ``noise``.
    """

    def __init__(self, trainer, *, every: int = 1, noise: float = 0.0, ramp: tuple[int, int] = (0, 1)) -> None:
        self._trainer = trainer
        self._every, self._noise, self._ramp = every, noise, ramp
        with torch.random.fork_rng():  # making it must not change what the trainer will draw
            self._model = type(trainer.model)(trainer.model.config).float().eval()
        self._generator = torch.Generator().manual_seed(7)
        self._pad, self._end = trainer.processing_class.pad_token_id, trainer.processing_class.eos_token_id
        trainer.vllm_generation, trainer.use_vllm = self, True
        trainer._last_loaded_step = -1  # noqa: SLF001  (no public way to put an engine here)

    @torch.no_grad()
    def sync_weights(self) -> None:
        """TRL calls this before it samples."""
        step = self._trainer.state.global_step
        if step % self._every:
            return
        first, last = self._ramp
        noise = self._noise * min(1.0, max(0.0, (step - first) / (last - first)))
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        for mine, theirs in zip(self._model.parameters(), policy.parameters(), strict=True):
            weight = theirs.float()
            if noise:
                weight = weight + noise * weight.std() * torch.randn(weight.shape, generator=self._generator)
            mine.copy_(weight)

    @torch.no_grad()
    def generate(self, prompts, *_, **__):
        """Completions and log-probs of ``prompts`` (lists of token ids, all of one length)."""
        ids = torch.tensor(prompts)
        tokens, scores = [], []
        for _ in range(self._trainer.max_completion_length):
            logp = self._model(input_ids=ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1)
            tokens.append(token[:, 0])
            scores.append(logp.gather(-1, token)[:, 0])
            ids = torch.cat([ids, token], 1)
        kept = [self._until_end(row) for row in torch.stack(tokens, 1).tolist()]
        logps = [
            [[score] for score in row[: len(ids)]]
            for row, ids in zip(torch.stack(scores, 1).tolist(), kept, strict=True)
        ]
        return prompts, kept, logps, None

    def _until_end(self, row: list[int]) -> list[int]:
        return row[: row.index(self._end) + 1] if self._end in row else row
