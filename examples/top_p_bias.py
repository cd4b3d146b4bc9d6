"""Truncated sampling without a correction: the ratios are biased, and the finding says by what (CPU, seconds).

    python examples/top_p_bias.py --steps 60

Halfway somebody sets the rollout engine's `top_p` to 0.8, for cleaner answers. The engine now renormalises over the
tokens it kept. The trainer takes the engine's log-probs for the old ones and divides by the whole softmax, so that the
importance ratio of a sampled token is the mass that was kept, below 1 whatever the policy does.
"""

import argparse

import torch
from own_loop import EOS, GROUP, LENGTH, PROMPTS, Policy, group_advantages, logp_of  # the loop of the other example

import rlwatch


@torch.no_grad()
def generate(policy, top_p):
    """Sample as an engine does: ids, mask, rewards, and the log-probs of what was sampled from, (N, T)."""
    prompts = torch.randint(1, policy.head.out_features, (PROMPTS, 1)).repeat_interleave(GROUP, 0)
    ids, alive, masks, logps = prompts, torch.ones(len(prompts), dtype=torch.bool), [], []
    for _ in range(LENGTH):
        ordered, places = policy(ids)[:, -1].softmax(-1).sort(descending=True)
        cut = ordered.cumsum(-1) - ordered >= top_p
        kept = ordered.masked_fill(cut, 0.0)
        place = torch.multinomial(kept, 1)
        logps.append((kept / kept.sum(-1, keepdim=True)).gather(1, place).log())
        token = places.gather(1, place)
        masks.append(alive)
        ids = torch.cat([ids, torch.where(alive[:, None], token, EOS)], 1)
        alive = alive & (token[:, 0] != EOS)
    mask = torch.stack(masks, 1)
    return ids, mask, ((ids[:, 1:] == prompts) & mask).sum(1) / LENGTH, torch.cat(logps, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="rlwatch-runs", help="where the run goes")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    watcher = rlwatch.Watcher(policy, optimizer, project="examples", name="top-p-bias", store=args.store)
    with watcher:
        for step in range(1, args.steps + 1):
            ids, mask, rewards, engine_logp = generate(policy, top_p=1.0 if step <= args.steps // 2 else 0.8)
            watcher.rollouts(rewards=rewards, groups=GROUP, lengths=mask.sum(1))
            advantages = group_advantages(rewards)
            logp, logits = watcher.forward(logp_of, policy, ids)
            ratio = (logp - engine_logp).exp()  # the bug: one distribution over the other
            loss = -(ratio.clamp(0.8, 1.2) * advantages[:, None] * mask).sum() / mask.sum()
            watcher.observe(
                logp=logp, logits=logits, ids=ids[:, 1:], mask=mask, advantages=advantages, rollout_logp=engine_logp
            )
            optimizer.zero_grad()
            loss.backward()
            watcher.gradients()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            watcher.step(step, loss=loss)
    print(f"recorded {watcher.run.info.run_id}")
    stored = rlwatch.open(args.store)[watcher.run.info.run_id]
    for message in stored.findings().query("kind.str.startswith('mismatch')")["message"]:
        print(f"found: {message}")
    print(f"cause: {stored.view().diagnosis.summary}")


if __name__ == "__main__":
    main()
