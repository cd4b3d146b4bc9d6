"""Logs that are not files here: standard input, and what an address (http, https) gives; kept while they are read."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from rlwatch.errors import ImportFormatError

STDIN = "-"
MOST = 4 << 30
"""Bytes that are fetched from an address."""
PATIENCE_S = 60.0


@contextmanager
def fetched(named: str) -> Iterator[Path]:
    """The log that was named, as a file or directory here. Raises ``ImportFormatError`` where it cannot be had."""
    if named != STDIN and not is_address(named):
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="rlwatch-") as home:
        target = Path(home) / (Path(urlsplit(named).path).name or "log" if named != STDIN else "stdin")
        if named == STDIN:
            with target.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        else:
            _download(named, target)
        yield target


def is_address(named: str) -> bool:
    """True for ``http://...`` and ``https://...``."""
    return named.startswith(("http://", "https://"))


def _download(address: str, target: Path) -> None:
    """Write what ``address`` gives to ``target``: nothing is asked for but what the user named, and redirects of it."""
    import httpx

    got = 0
    try:
        with (
            target.open("wb") as file,
            httpx.stream("GET", address, follow_redirects=True, timeout=PATIENCE_S) as answer,
        ):
            answer.raise_for_status()
            for block in answer.iter_bytes():
                got += len(block)
                if got > MOST:
                    raise ImportFormatError(address, f"is larger than the {MOST >> 30} GiB that that rlwatch downloads")
                file.write(block)
    except httpx.HTTPStatusError as error:
        said = f"{error.response.status_code} {error.response.reason_phrase}"
        raise ImportFormatError(address, f"the server answered {said}; is this the URL of the raw file?") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ImportFormatError(address, f"cannot be fetched: {error or type(error).__name__}") from None
