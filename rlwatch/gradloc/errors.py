"""What stops a localisation. Nothing here reaches a training loop: it becomes ``Localisation.why_not``."""

from __future__ import annotations


class NotLocalised(Exception):  # noqa: N818  (an answer, not a fault)
    """The tokens of this step cannot be localised. Its text says why, in one sentence.

    Where there are several ranks it is raised on all of them or on none.
    """
