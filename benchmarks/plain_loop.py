"""The plain loop of ``watching_cost.py``: GRPO on a small decoder, CPU, with or without a watcher."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, HIDDEN, LAYERS, PROMPT, RESPONSE, PROMPTS, GROUP, MICRO_BATCHES = 2048, 128, 4, 8, 56, 4, 8, 2


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, 0.0, batch_first=True) for _ in range(LAYERS)]
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def logp_of(policy: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the responses."""
    logp = policy(ids)[:, PROMPT - 1 : -1].log_softmax(-1)
    entropy = -(logp.detach().exp() * logp.detach()).sum(-1)
    return logp.gather(-1, ids[:, PROMPT:, None]).squeeze(-1), entropy


def train(make_watcher: Callable[..., Any] | None, steps: int) -> Any:
    """Sampling is left out: the rollouts are random, as what they cost does not concern rlwatch."""
    torch.manual_seed(0)
    policy = Decoder()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    watcher = None if make_watcher is None else make_watcher(policy, optimizer, ref_model=reference, clip=(0.2, 0.28))
    rows = PROMPTS * GROUP
    for step in range(1, steps + 1):
        if watcher is not None:
            watcher.obey()
        ids = torch.randint(0, VOCABULARY, (rows, PROMPT + RESPONSE))
        lengths = torch.randint(1, RESPONSE + 1, (rows,))
        mask = torch.arange(RESPONSE) < lengths[:, None]
        rewards = torch.randint(0, 2, (rows,)).float()
        advantages = rewards - rewards.mean()
        with torch.no_grad():
            old, ref = logp_of(policy, ids)[0], logp_of(reference, ids)[0]
        if watcher is not None:
            watcher.rollouts(rewards=rewards, groups=GROUP, lengths=lengths)
        optimizer.zero_grad()
        for part in torch.arange(rows).chunk(MICRO_BATCHES):
            logp, entropy = logp_of(policy, ids[part])
            ratio, gap = (logp - old[part]).exp(), ref[part] - logp
            loss = ((gap.exp() - gap - 1 - ratio * advantages[part, None]) * mask[part]).sum() / mask.sum()
            if watcher is not None:
                watcher.observe(
                    logp=logp, entropy=entropy, ids=ids[part, PROMPT:], mask=mask[part], advantages=advantages[part],
                    old_logp=old[part], ref_logp=ref[part],
                )  # fmt: skip
            loss.backward()
        if watcher is not None:
            watcher.gradients()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if watcher is not None:
            watcher.step(step, loss=loss)
    return watcher
