"""A loop of your own with layer-wise clipping: one line in place of `clip_grad_norm_` (CPU, no downloads, seconds).

    python examples/layer_clip.py --steps 60

One layer's gradient is made to spike now and then, as a faulty kernel or a rare token would do it. The layer is clipped
to what it usually has, the others keep their step, and the run records what was clipped.
"""

import argparse

import torch
from torch import nn

import rlwatch

DIGITS, LENGTH, PROMPTS, GROUP = 8, 6, 8, 8


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(DIGITS, 32)
        self.layers = nn.ModuleList([nn.GRU(32, 32, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(32, DIGITS)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden)


def logp_of(policy, ids):
    logits = policy(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def generate(policy):
    """GROUP responses to each prompt; reward: how much of a response repeats its prompt."""
    prompts = torch.randint(0, DIGITS, (PROMPTS, 1)).repeat_interleave(GROUP, 0)
    ids = prompts
    for _ in range(LENGTH):
        ids = torch.cat([ids, torch.multinomial(policy(ids)[:, -1].softmax(-1), 1)], 1)
    return ids, (ids[:, 1:] == prompts).float().mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default=None, help="where the run goes (default: ./rlwatch-runs)")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    clip = rlwatch.LayerClip(policy, "layer-median", max_norm=1.0)  # layers first, then all of them together

    with rlwatch.Watcher(policy, optimizer, project="examples", name="layer-clip", store=args.store) as watcher:
        for step in range(1, args.steps + 1):
            ids, rewards = generate(policy)
            watcher.rollouts(rewards=rewards, groups=GROUP)
            advantages = (rewards.view(PROMPTS, GROUP) - rewards.view(PROMPTS, GROUP).mean(1, keepdim=True)).view(-1, 1)
            logp = logp_of(policy, ids)
            watcher.observe(logp=logp, mask=torch.ones_like(logp), advantages=advantages, ids=ids[:, 1:])
            loss = -(logp * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            if step > 20 and step % 10 == 0:
                for parameter in policy.layers[1].parameters():
                    parameter.grad.mul_(100.0)
            watcher.gradients()  # before they are clipped
            clipped = clip()  # was: nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            watcher.step(step, loss=loss, **clipped.metrics())
            # with a checkpoint: state["layer_clip"] = clip.state_dict(); on a resume: clip.load_state_dict(...)
    print(f"reward {watcher.latest['reward/mean']:.2f}; steps with a layer clipped: {clip.counts()['clipped']}")
    print(f"recorded {watcher.run.info.run_id}")


if __name__ == "__main__":
    main()
