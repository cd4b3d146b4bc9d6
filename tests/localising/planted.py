"""Culprits planted into the loss of a real trainer."""

import math

import torch


class Planted:
    """Wraps the trainer's loss: from ``step`` on, for ``steps`` steps, the inputs of micro-batch ``micro_batch`` change.

    ``places`` are the culprits (row, position), filled in when it happens; ``ids`` their token ids.
    """

    def __init__(self, trainer, change, *, step=4, steps=1, micro_batch=0):
        self.places, self.ids = [], []
        self._trainer, self._change = trainer, change
        self._steps, self._micro_batch = range(step - 1, step - 1 + steps), micro_batch
        self._seen = (None, 0)
        original = trainer._compute_loss

        def loss(model, inputs):
            step, count = self._seen
            count = count + 1 if step == trainer.state.global_step else 0
            self._seen = trainer.state.global_step, count
            if model.training and trainer.state.global_step in self._steps and count == self._micro_batch:
                inputs = self._planted(dict(inputs))
            return original(model, inputs)

        trainer._compute_loss = loss

    def _planted(self, inputs):
        places = self._change(inputs)
        self.places += places
        self.ids += [int(inputs["completion_ids"][place]) for place in places]
        return inputs


def off_policy(count=1, size=math.e**5):
    """Tokens of responses with a negative advantage that the old policy thought ``size`` times less likely."""

    def change(inputs):
        allowed = inputs["completion_mask"].bool() & (inputs["advantages"] < 0)[:, None]
        places = allowed.nonzero()[:: max(1, int(allowed.sum()) // count)][:count]
        old = inputs["old_per_token_logps"].clone()
        old[tuple(places.T)] -= math.log(size)
        inputs["old_per_token_logps"] = old
        return [tuple(place) for place in places.tolist()]

    return change


def broken(name, value=math.nan):
    """One element of an input is not a number."""

    def change(inputs):
        place = inputs["completion_mask"].bool().nonzero()[2]
        changed = inputs[name].clone()
        changed[tuple(place) if changed.dim() == 2 else place[0]] = torch.tensor(value)
        inputs[name] = changed
        return [tuple(place.tolist())]

    return change
