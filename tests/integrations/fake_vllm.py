"""A second engine for TRL without vLLM: its own copy of the policy samples and returns its own log-probs.

TRL's real importance-sampling correction and ``sampling/*`` metrics then run on the CPU.
"""

import torch


class FakeVLLM:
    def __init__(self, trainer, *, noise=0.0, unscored=False, surprise=0.0, temperature=1.0, top_k=None):
        from tiny_trl import fresh_model

        state = torch.get_rng_state()
        self.model = fresh_model().eval()
        torch.set_rng_state(state)
        self.trainer, self.noise, self.unscored, self.surprise = trainer, noise, unscored, surprise
        self.temperature, self.top_k = temperature, top_k
        self.generator = torch.Generator().manual_seed(7)
        self.limit = trainer.max_completion_length

    def sync_weights(self):
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
                mine.copy_(theirs + self.noise * torch.randn(theirs.shape, generator=self.generator))

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None, **kwargs):
        rows = [self._complete(list(prompt)) for prompt in prompts]
        return prompts, [ids for ids, _ in rows], [logps for _, logps in rows], None

    def _complete(self, ids):
        new, logps = [], []
        for _ in range(self.limit):
            logp = self._warped(self.model(input_ids=torch.tensor([ids + new])).logits[0, -1])
            token = int(torch.multinomial(logp.exp(), 1, generator=self.generator))
            new.append(token)
            first = len(new) == 1  # the first token may come without a log-prob, or with a wrong one
            logps.append([float("nan") if self.unscored and first else float(logp[token]) - self.surprise * first])
            if token == 2:
                break
        return new, logps

    def _warped(self, logits):
        logits = logits / self.temperature
        if self.top_k is not None:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], -torch.inf)
        return logits.log_softmax(-1)


def install(trainer, **kwargs):
    """Make ``trainer`` sample from the fake engine."""
    trainer.vllm_generation = FakeVLLM(trainer, **kwargs)
    trainer.use_vllm = True
    trainer._last_loaded_step = -1
