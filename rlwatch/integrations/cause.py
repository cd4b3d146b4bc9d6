"""Why training ended, as the body of an ``exception`` event."""

from __future__ import annotations

import traceback

from rlwatch.seam import Contained, described

_LINES = 30


def cause_of(error: BaseException) -> dict[str, str]:
    """The error, where it was raised and the end of its traceback, as far as they can be had. Raises nothing."""
    cause = {"error": reason_of(error), "type": type(error).__name__, "where": "", "traceback": ""}
    with Contained(lambda _error: None):  # its attributes and its sources are somebody's
        frames = traceback.extract_tb(error.__traceback__)
        cause["where"] = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        lines = "".join(traceback.format_exception(error)).splitlines()[-_LINES:]
        cause["traceback"] = "\n".join(lines)
    return cause


def reason_of(error: BaseException) -> str:
    """The error in one line."""
    return described(error, 500)
