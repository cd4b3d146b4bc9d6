"""A run of healthy steps on a tiny model, and a step after them in which something is wrong."""

import math

import numpy as np
from tiny_step import dapo, policy, rollouts, take_step

from rlwatch.gradloc.locate import locate
from rlwatch.gradloc.loss_form import sample_of
from rlwatch.gradloc.trigger import ScaleHistory, added_up, measured, scales_of


def norm_of(model):
    """Of the gradient it holds."""
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))


def scales(model, passes):
    """Scales of the step, and a sample of its tokens."""
    parts = [measured(one).tolist() for one in passes.all]
    sample = np.concatenate([sample_of(one).double().numpy() for one in passes.all])
    return scales_of(added_up(parts), norm_of(model)), sample


class Run:
    """Twelve healthy steps of ``loss``; :meth:`look` localises a thirteenth."""

    def __init__(self, loss=dapo, *, seed=0, steps=12, batch=8, micro_batches=1):
        self.model, self.loss, self.seed, self.size = policy(seed=seed), loss, seed, batch
        self.history = ScaleHistory()
        for step in range(steps):
            passes = take_step(
                self.model, rollouts(self.model, batch=batch, seed=100 + step), loss, micro_batches=micro_batches
            )
            self.history.learn(step, *scales(self.model, passes))

    def batch(self):
        """Healthy rollouts."""
        return rollouts(self.model, batch=self.size, seed=7 + self.seed)

    def look(self, batch, loss=None, *, groups=None, tasks=None, micro_batches=2, **more):
        """The report on a step with ``batch``."""
        passes = take_step(self.model, batch, loss or self.loss, micro_batches=micro_batches)
        for one in passes.all:
            rows = range(one.first_row, one.first_row + one.shape[0])
            one.groups = None if groups is None else [groups[row] for row in rows]
            one.tasks = None if tasks is None else [tasks[row] for row in rows]
        now, _ = scales(self.model, passes)
        return locate(self.model, passes, scales=now, history=self.history, **more).report

    def norm(self, batch, loss=None):
        """Norm of the gradient of a step with ``batch``."""
        take_step(self.model, batch, loss or self.loss)
        return norm_of(self.model)


def places(report):
    """(row, position) of the culprits, rows counted over the step."""
    return {(4 * c.at.microbatch + c.at.row, c.at.position) for c in report.culprits}
