"""A gradient that is NaN while the loss is finite, and where it comes from (CPU, no downloads, seconds).

    python examples/nan_at_padding.py --steps 40

Halfway the rollout engine is upgraded, and pads its log-probs with -inf instead of 0. The loss leaves padding out by
`torch.where`, so it stays finite. Its gradient does not: autograd multiplies the 0 of the branch not taken by the
infinite ratio of that branch. The loop skips such steps, so that nothing crashes, and nothing is learned any more.
"""

import argparse

import torch
from own_loop import GROUP, Policy, generate, group_advantages, logp_of  # the other example; yours goes here

import rlwatch


def loss_of(logp, old_logp, advantages, mask):
    """The bug: the mask comes after the ratio. `old_logp = torch.where(mask, old_logp, logp.detach())` mends it."""
    ratio = (logp - old_logp).exp()
    return -torch.where(mask, ratio * advantages[:, None], 0.0).sum() / mask.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="rlwatch-runs", help="where the run goes")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    watcher = rlwatch.Watcher(policy, optimizer, project="examples", name="nan-at-padding", store=args.store)
    with watcher:
        for step in range(1, args.steps + 1):
            padding = 0.0 if step <= args.steps // 2 else -torch.inf
            ids, mask, rewards = generate(policy)
            advantages = group_advantages(rewards)
            with torch.no_grad():
                old_logp = logp_of(policy, ids)[0].masked_fill(~mask, padding)
            watcher.rollouts(rewards=rewards, groups=GROUP, lengths=mask.sum(1))
            logp, logits = watcher.forward(logp_of, policy, ids)
            loss = loss_of(logp, old_logp, advantages, mask)
            watcher.observe(
                logp=logp, logits=logits, ids=ids[:, 1:], mask=mask, old_logp=old_logp, advantages=advantages
            )
            optimizer.zero_grad()
            loss.backward()
            watcher.gradients()
            if torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).isfinite():
                optimizer.step()
            watcher.step(step, loss=loss)
    print(f"recorded {watcher.run.info.run_id}; the last loss is {loss:.3f}")
    stored = rlwatch.open(args.store)[watcher.run.info.run_id]
    for message in stored.findings().query("severity == 'critical'")["message"]:
        print(f"found: {message}")
    print(f"cause: {stored.view().diagnosis.summary}")


if __name__ == "__main__":
    main()
