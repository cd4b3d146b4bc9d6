"""A learning rate scaled around every step of an optimizer, for loops that set it by hand."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from rlwatch.seam import Seam


class StepScale:
    """Multiplies each group's ``lr`` by ``group[key]`` while the optimizer steps, and puts it back afterwards.

    Whoever sets or reads the rate between steps never notices. Where it cannot be scaled, the step is taken with the
    loop's own rate, and the failure ends at ``seam``.
    """

    def __init__(self, optimizer: Optimizer, key: str, seam: Seam) -> None:
        self.optimizer = optimizer
        self._key = key
        self._set: list[tuple[dict[str, Any], Any]] = []
        before = optimizer.register_step_pre_hook(seam.hook("learning rate", lambda *_: self._scale()))
        after = optimizer.register_step_post_hook(seam.hook("learning rate of before", lambda *_: self._restore()))
        self._hooks = (before, after)

    def remove(self) -> None:
        """Leave the optimizer alone."""
        self._restore()
        for hook in self._hooks:
            hook.remove()

    def _scale(self) -> None:
        self._restore()  # a step that raised never came to its end
        try:
            for group in self.optimizer.param_groups:
                scale = group.get(self._key, 1.0)
                if scale != 1.0:
                    self._set.append((group, group["lr"]))
                    group["lr"] = group["lr"] * scale
        except BaseException:
            self._restore()  # all groups or none
            raise

    def _restore(self) -> None:
        while self._set:
            group, rate = self._set.pop()
            group["lr"] = rate
