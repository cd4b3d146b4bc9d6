"""Why training ended, as the body of an ``exception`` event."""

from __future__ import annotations

import traceback

_LINES = 30


def cause_of(error: BaseException) -> dict[str, str]:
    """The error, where it was raised and the end of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    lines = "".join(traceback.format_exception(error)).splitlines()[-_LINES:]
    return {"error": reason_of(error), "type": type(error).__name__, "where": where, "traceback": "\n".join(lines)}


def reason_of(error: BaseException) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {error}"[:500]
