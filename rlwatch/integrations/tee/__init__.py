"""What mirrors of other trackers share: reading their rows, opening runs for them, undoing. Imports no torch."""

from __future__ import annotations

from rlwatch.integrations.tee.handle import Tee

__all__ = ["Tee"]
