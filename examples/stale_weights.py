"""A rollout engine that no longer gets the weights: who finds out, and when (CPU, no downloads, seconds).

    python examples/stale_weights.py --steps 60

Halfway somebody wraps the policy, so that the names of its parameters get a prefix, as `torch.compile` and DDP do it.
The sync loads them with `strict=False`, which finds no name it knows and says nothing. From then on the engine samples
from weights that get older with every step, while the trainer believes that they are its own.
"""

import argparse
import copy

import torch
from own_loop import GROUP, Policy, generate, group_advantages, logp_of  # the other example; yours goes here

import rlwatch


def sync(policy, engine):
    """The bug: what `load_state_dict` did not find, it returns, and nobody reads it."""
    engine.load_state_dict(policy.state_dict(), strict=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="rlwatch-runs", help="where the run goes")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy()
    engine = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    watcher = rlwatch.Watcher(policy, optimizer, project="examples", name="stale-weights", store=args.store)
    sent = policy
    with watcher:
        for step in range(1, args.steps + 1):
            if step > args.steps // 2:
                sent = torch.nn.ModuleDict({"module": policy})  # names as DDP makes them
            with watcher.stage("weight_sync"):
                sync(sent, engine)
                watcher.synced(engine)  # compares what arrived; without it the gap alone gives the cause away, later
            ids, mask, rewards = generate(engine)
            watcher.rollouts(rewards=rewards, groups=GROUP, lengths=mask.sum(1))
            advantages = group_advantages(rewards)
            with torch.no_grad():
                engine_logp = logp_of(engine, ids)[0]
            logp, logits = watcher.forward(logp_of, policy, ids)
            loss = -(logp * advantages[:, None] * mask).sum() / mask.sum()
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
    for message in stored.findings().query("kind in ('weights_differ', 'mismatch_growth')")["message"]:
        print(f"found: {message}")
    print(f"cause: {stored.view().diagnosis.summary}")


if __name__ == "__main__":
    main()
