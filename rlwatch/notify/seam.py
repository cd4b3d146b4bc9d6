"""The seam to what others wrote and we send through: apprise, wandb."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from rlwatch.notify.quiet import quiet_http_logs

P = ParamSpec("P")


def raised_by(send: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Exception | None:
    """What ``send(*args, **kwargs)`` raised, or None. The logs of HTTP libraries are quiet meanwhile.

    No more than the error's type (and a server's number) may be shown: its text could hold an address.
    """
    try:
        with quiet_http_logs():
            send(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (seam: what a library over a network raises has no common type)
        return error
    return None
