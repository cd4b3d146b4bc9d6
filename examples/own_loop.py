"""A GRPO loop of your own in plain PyTorch, watched: the lines with `watcher` are all that was added.

    python examples/own_loop.py                 # then: rlwatch show own-loop, or rlwatch ui
    python examples/own_loop.py --reset-at 30   # another process asks for a reset of the reference, the loop obeys

The policy is tiny and learns to repeat a digit; CPU, no downloads, a few seconds. While a loop of yours runs, ask it
from any shell: `rlwatch command own-loop reset-reference --why "KL saturated"`.
"""

import argparse
import copy
import subprocess
import sys

import torch
from torch import nn

import rlwatch

DIGITS, EOS, LENGTH = 10, 0, 8
PROMPTS, GROUP, MICRO_BATCHES, CLIP, BETA = 8, 8, 2, (0.2, 0.28), 0.02


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(DIGITS, 32)
        self.layers = nn.ModuleList([nn.GRU(32, 32, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(32, DIGITS)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden)


def logp_of(policy, ids):
    """Log-probs (N, T) of the responses ids[:, 1:], and the logits they were chosen from."""
    logits = policy(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1), logits


@torch.no_grad()
def generate(policy):
    """Sample GROUP responses to each prompt; reward: how much of a response repeats its prompt."""
    prompts = torch.randint(1, DIGITS, (PROMPTS, 1)).repeat_interleave(GROUP, 0)
    ids, alive, columns = prompts, torch.ones(len(prompts), dtype=torch.bool), []
    for _ in range(LENGTH):
        token = torch.multinomial(policy(ids)[:, -1].softmax(-1), 1)
        columns.append(alive)
        ids = torch.cat([ids, torch.where(alive[:, None], token, EOS)], 1)
        alive = alive & (token[:, 0] != EOS)
    mask = torch.stack(columns, 1)
    rewards = ((ids[:, 1:] == prompts) & mask).sum(1) / LENGTH
    return ids, mask, rewards


def group_advantages(rewards):
    grouped = rewards.view(PROMPTS, GROUP)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def loss_of(logp, old_logp, ref_logp, advantages, mask):
    ratio, gap = (logp - old_logp).exp(), ref_logp - logp
    advantages = advantages[:, None]
    clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
    per_token = -torch.minimum(ratio * advantages, clipped * advantages) + BETA * (gap.exp() - gap - 1)
    return (per_token * mask).sum() / mask.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default=None, help="where the run goes (default: ./rlwatch-runs)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--reset-at", type=int, default=None, help="ask for a reset from another process at this step")
    args = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    person = None

    watcher = rlwatch.Watcher(
        policy, optimizer, ref_model=reference, clip=CLIP, kl_coef=BETA, eos=EOS,
        project="examples", name="own-loop", store=args.store, config=vars(args),
    )  # fmt: skip
    with watcher:
        step = 0
        while step < args.steps or (person is not None and person.poll() is None):
            watcher.obey()  # what people asked for: here no rollouts are in flight
            if watcher.should_stop:
                break
            ids, mask, rewards = generate(policy)
            advantages = group_advantages(rewards)
            with torch.no_grad():
                old_logp, ref_logp = logp_of(policy, ids)[0], logp_of(reference, ids)[0]
            cut = mask[:, -1] & (ids[:, -1] != EOS)
            watcher.rollouts(rewards=rewards, groups=GROUP, lengths=mask.sum(1), cut=cut)

            optimizer.zero_grad()
            total = 0.0
            for rows in torch.arange(len(ids)).chunk(MICRO_BATCHES):
                logp, logits = watcher.forward(logp_of, policy, ids[rows])  # so that a spike can be traced to tokens
                loss = loss_of(logp, old_logp[rows], ref_logp[rows], advantages[rows], mask[rows]) / MICRO_BATCHES
                watcher.observe(
                    logp=logp, logits=logits, ids=ids[rows, 1:], mask=mask[rows], advantages=advantages[rows],
                    old_logp=old_logp[rows], ref_logp=ref_logp[rows],
                )  # fmt: skip
                loss.backward()
                total += loss.detach()
            watcher.gradients()  # before they are clipped
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()

            step += 1
            watcher.step(step, loss=total)
            if step == args.reset_at:
                person = ask_for_a_reset(watcher.run.info.run_id, args.store)
    if person is not None:
        print(person.stdout.read().strip())
    kl = watcher.latest.get("policy/kl_ref_k3", float("nan"))  # not measured at level="scalars"
    print(f"reward {watcher.latest['reward/mean']:.2f}, KL to the reference {kl:.4f}")
    for what, why in watcher.unavailable.items():
        print(f"not measured: {what} ({why})")
    print(f"recorded {watcher.run.info.run_id}")


def ask_for_a_reset(run_id, store):
    """What a person does in a shell, in a process of its own; the loop does not wait for it."""
    where = [] if store is None else ["--store", store]
    command = ["command", run_id, "reset-reference", "--why", "KL saturated", "--wait", "120", *where]
    return subprocess.Popen([sys.executable, "-m", "rlwatch.cli", *command], stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()
