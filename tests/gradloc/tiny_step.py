"""One optimizer step's gradient on a random two-layer Qwen2: a batch, the losses of the field, planted culprits."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlwatch.gradloc.passes import Outputs, RandomState, RecordedPasses
from rlwatch.tensors.tokens import TokenBatch

torch.set_num_threads(1)


def policy(*, hidden=32, layers=2, vocab=64, tie=True, attention="eager", dropout=0.0, std=0.06, seed=0, **more):
    """A model in training mode; ``std`` of its weights decides how sharp its predictions are."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=tie,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, attention_dropout=dropout, initializer_range=std,
        attn_implementation=attention, **more,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train()


@dataclass(frozen=True)
class Rollouts:
    """B prompts and responses of T tokens, right-padded; log-probs in nats, advantages (B, T)."""

    ids: Tensor
    prompt: int
    mask: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor

    def rows(self, rows):
        """Some of them."""
        cut = {name: getattr(self, name)[rows] for name in ("ids", "mask", "old", "ref", "advantages")}
        return replace(self, **cut)

    @property
    def response(self):
        """(B, T) ids."""
        return self.ids[:, self.prompt :]


def outputs(model, ids, prompt, *, entropy=True, temperature=1.0):
    """Log-probs and entropies (B, T) of the responses, in float32."""
    logits = model(input_ids=ids).logits[:, prompt - 1 : -1].float() / temperature
    every = logits.log_softmax(-1)
    logp = every.gather(-1, ids[:, prompt:, None])[..., 0]
    return Outputs(logp, -(every.exp() * every).sum(-1) if entropy else None)


def rollouts(model, *, batch=8, prompt=4, length=24, seed=1, off=0.1, varied=True):
    """Random tokens; old and reference policies whose log-probs are ``off`` nats away (one standard deviation)."""
    draw = torch.Generator().manual_seed(seed)
    vocab = model.config.vocab_size
    ids = torch.randint(3, vocab, (batch, prompt + length), generator=draw)
    with torch.no_grad():
        logp = outputs(model, ids, prompt).logp
    lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=draw) if varied else length
    mask = torch.arange(length).expand(batch, length) < lengths
    noise = torch.randn(2, batch, length, generator=draw) * off
    advantages = torch.randn(batch, 1, generator=draw).expand(batch, length).clone()
    return Rollouts(ids, prompt, mask, logp + noise[0], logp + noise[1], advantages)


def per_token(values, mask, total):
    """Token mean over the whole step, of which ``total`` tokens count."""
    return (values * mask).sum() / total


def _ppo(out, batch, ratio):
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


def grpo(out, batch, total):
    """Mean of each response, then of the responses: normalised per sequence."""
    loss = _ppo(out, batch, (out.logp - batch.old).exp())
    lengths = batch.mask.sum(1).clamp(min=1)
    return ((loss * batch.mask).sum(1) / lengths).sum() / (total / batch.mask.shape[1])


def dapo(out, batch, total):
    """Mean over all tokens."""
    return per_token(_ppo(out, batch, (out.logp - batch.old).exp()), batch.mask, total)


def gspo(out, batch, total):
    """Ratios of whole responses."""
    log_ratio = ((out.logp - batch.old) * batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(
        min=1
    )
    return per_token(_ppo(out, batch, log_ratio.exp().expand_as(out.logp)), batch.mask, total)


def cispo(out, batch, total):
    """Detached capped ratios times log-probs."""
    weight = (out.logp - batch.old).exp().detach().clamp(max=5.0)
    return per_token(-weight * batch.advantages * out.logp, batch.mask, total)


def rloo(out, batch, total):
    """REINFORCE on whole responses: the product of ratios."""
    ratio = ((out.logp - batch.old) * batch.mask).sum(1, keepdim=True).exp()
    return per_token(-ratio * batch.advantages, batch.mask, total)


def dapo_kl(out, batch, total, beta=0.1):
    """With k3 to the reference in the loss."""
    gap = batch.ref - out.logp
    return dapo(out, batch, total) + beta * per_token(gap.exp() - gap - 1, batch.mask, total)


def dapo_entropy(out, batch, total, coef=0.05):
    """With an entropy bonus."""
    return dapo(out, batch, total) - coef * per_token(out.entropy, batch.mask, total)


LOSSES = {f.__name__: f for f in (grpo, dapo, gspo, cispo, rloo, dapo_kl, dapo_entropy)}


def take_step(model, batch, loss=dapo, *, micro_batches=1, forward=outputs, autocast=None, rewards=None):
    """Forward and backward of the whole step: gradients in ``.grad``, and the passes to look at."""
    model.zero_grad(set_to_none=True)
    passes, total = RecordedPasses(), batch.mask.sum().clamp(min=1)
    for rows in torch.arange(len(batch.ids)).tensor_split(micro_batches):
        part = batch.rows(rows)

        def again(some=None, part=part):
            ids = part.ids if some is None else part.ids[list(some)]
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
                return forward(model, ids, part.prompt)

        random = RandomState.now()
        out = again()
        drew = not random.same(RandomState.now())
        tokens = TokenBatch(
            out.logp.detach(), part.mask, entropy=out.entropy.detach(), ids=part.response,
            advantages=part.advantages, old_logp=part.old, ref_logp=part.ref,
        )  # fmt: skip
        given = None if rewards is None else rewards[rows]
        passes.add(again, out, tokens, random=random, drew=drew, rewards=given)
        loss(out, part, total).backward()
    return passes


def plant(batch, kind, k, size, *, seed=2):
    """``k`` culprits; returns the batch and their places [(row, position)].

    ``advantage``: multiplied by ``size``. ``ratio``: off-policy by a factor ``size`` where A < 0, so that no clip binds.
    ``kl``: ``size`` times likelier under the reference.
    """
    allowed = batch.mask & (batch.advantages < 0) if kind == "ratio" else batch.mask
    places = allowed.nonzero()
    chosen = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:k]]
    at = chosen[:, 0], chosen[:, 1]
    field, change = {
        "advantage": ("advantages", lambda x: x * size),
        "ratio": ("old", lambda x: x - math.log(size)),
        "kl": ("ref", lambda x: x + math.log(size)),
    }[kind]
    changed = getattr(batch, field).clone()
    changed[at] = change(changed[at])
    return replace(batch, **{field: changed}), [tuple(place) for place in chosen.tolist()]
