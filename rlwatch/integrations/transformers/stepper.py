"""The rhythm of a step: seal what was measured, deliver it, and obey commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from transformers import TrainerCallback
from typing_extensions import override

from rlwatch.integrations.step_tally import Decode, SealedStep, StepTally
from rlwatch.integrations.transformers.control import Commands, Latest
from rlwatch.seam import Seam, guarded


class Taps(Protocol):
    """What reads the trainer during a step."""

    tally: StepTally

    def take(self) -> StepTally:
        """The tally of the step that ended."""
        ...

    def discard(self) -> None:
        """Forget what was read so far."""
        ...

    def gradients_if_unclipped(self) -> None:
        """Read gradients that nobody clips."""
        ...


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """Ends a step's tally and records it before anything of the next step.

    A sealed step is recorded as soon as its copy has arrived: usually when the step is logged, at the latest
    when the next one begins. That is the only wait for the device, once a step.
    """

    def __init__(
        self, taps: Taps, seam: Seam, control: Callable[[Latest], Commands], decode: Decode | None = None
    ) -> None:
        self.seam = seam
        self.latest: dict[str, float] = {}
        self._taps = taps
        self._decode = decode
        self._sealed: deque[SealedStep] = deque()
        self._control = control(lambda: self.latest)

    @override
    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget what an earlier attempt left half-measured; take up what a checkpoint kept."""
        self._taps.discard()
        self._control.begin(state.global_step)

    @override
    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Deliver what the last step measured."""
        self.deliver()

    @override
    @guarded
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read gradients nobody clipped."""
        self._taps.gradients_if_unclipped()

    @override
    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal the step, then see what people want."""
        self.seal(state.global_step)
        self.deliver(wait=False)
        self.noticed(args, state.global_step)
        self._control.loop.look(args, state, control, kwargs)
        self._control.obey(state.global_step)

    @override
    @guarded
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep with the checkpoint what it leaves out."""
        self._control.saved(state.global_step)

    @override
    @guarded
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer has just waited for the device, so the copy is there."""
        self.deliver(wait=False)

    @override
    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Deliver the last step."""
        self.deliver()

    def noticed(self, args: Any, step: int) -> None:
        """For trainers that do at a step's end what a run should know of."""

    def seal(self, step: int) -> None:
        """End the current tally as that of ``step``."""
        tally, run = self._taps.take(), self.seam.run
        if run is not None and run.measures:
            self._sealed.append(tally.seal(step, shared=run.linked))

    def seal_unfinished(self, step: int) -> None:
        """Training died within ``step``: what was measured of it so far is kept."""
        if not self._taps.tally.empty:
            self.seal(step)

    def deliver(self, *, wait: bool = True) -> None:
        """Record sealed steps, in order; without ``wait`` only those whose copy has arrived."""
        while self._sealed and (wait or self._sealed[0].ready()):
            sealed = self._sealed.popleft()
            if self.seam.run is not None:
                self.latest = sealed.deliver(self.seam.run, self._decode)
