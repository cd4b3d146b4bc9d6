"""``rlwatch demo``: a small training run that goes wrong, watched live."""

from __future__ import annotations

from rlwatch.cli.options import examples
from rlwatch.errors import ConfigError

EPILOG = examples("rlwatch demo")


def demo() -> None:
    """Train a tiny model on this machine until it collapses, and watch rlwatch notice."""
    raise ConfigError("the demo is not part of this version yet; try: rlwatch scan LOG")
