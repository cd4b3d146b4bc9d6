"""One directory of TensorBoard, mirrored scalar by scalar."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from rlwatch.integrations.tee.rows import scalars, snapshot, step_index
from rlwatch.run import Run


class TensorBoardMirror:
    """Gathers the scalars of a step into one record.

    A record ends when a scalar of another step comes, when the writer is flushed or closed, and when the process ends.
    A scalar without a step is at the last step said; where none was ever said, at the number of times its tag came
    before (TensorBoard itself would put them all at 0).
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._held: deque[tuple[int, dict[str, Any]]] = deque()  # popped once each, whatever thread writes
        self._last: int | None = None
        self._foretold: int | None = None
        self._times: Counter[str] = Counter()

    def log(self, row: Mapping[str, Any], step: Any) -> None:
        """Scalars were written at ``step`` (or None)."""
        kept = snapshot(scalars(row))
        if not kept:
            return
        at = self._step(next(iter(kept)), step)
        if self._held and self._held[-1][0] != at:
            self.flush()
        self._held.append((at, kept))

    def news(self) -> list[tuple[int, str, float]]:
        """The newest forecast as (step, name, value), once each."""
        forecast = self.run.health().forecast
        if forecast is None or forecast.step == self._foretold:
            return []
        self._foretold = forecast.step
        return [(forecast.step, name, value) for name, value in forecast.metrics.items()]

    def flush(self) -> None:
        """Record what was gathered."""
        steps: dict[int, dict[str, Any]] = {}
        while self._held:
            try:
                step, row = self._held.popleft()
            except IndexError:  # another thread was quicker
                break
            steps.setdefault(step, {}).update(row)
        for step, row in steps.items():
            self.run.log(row, step=step)

    def _step(self, tag: str, step: Any) -> int:
        said = None if step is None else step_index(step)
        if said is not None:
            self._last = said
            return said
        if self._last is not None:
            return self._last
        self._times[tag] += 1
        return self._times[tag] - 1
