"""Changing the coefficient of the KL term of a live run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.control.policy import veto_set_kl_coef
from rlwatch.errors import RLWatchError
from rlwatch.records import JSON, Command
from rlwatch.seam import Seam


class SetKLCoef:
    """Handles ``set-kl-coef`` with ``{"value": >= 0}``.

    Parameters
    ----------
    read
        The coefficient now. Raises ``RLWatchError`` with the reason why it cannot be changed.
    write
        Sets it; what the trainer computes from then on uses it.
    seam
        Where the run's health is asked, for the veto during a collapse.

    ``value`` is what was set last; None while the trainer's own configuration holds.
    """

    kind: str = "set-kl-coef"

    def __init__(self, read: Callable[[], float], write: Callable[[float], None], seam: Seam) -> None:
        self._read = read
        self._write = write
        self._seam = seam
        self.value: float | None = None

    def check(self, command: Command) -> None:
        """Refuse where there is no coefficient, or where lowering it would loosen the anchor of a collapse."""
        new, old, run = float(COMMAND_KINDS[self.kind].read(command.args)["value"]), self._read(), self._seam.run
        veto = None if run is None else veto_set_kl_coef(run.health(), old=old, new=new, force=command.force)
        if veto is not None:
            raise RLWatchError(veto)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Set it; returns the value before and after."""
        new, old = float(COMMAND_KINDS[self.kind].read(command.args)["value"]), self._read()
        self._write(new)
        self.value = new
        return {"before": old, "after": new, "summary": f"KL coefficient {old:g} -> {new:g}"}
