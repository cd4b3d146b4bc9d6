"""From bytes to pieces of lines: encodings, gzip, carriage returns, colours, log wrappers.

A progress bar redraws itself with carriage returns, so one physical line of a console log may hold hundreds of
states. A :class:`Segment` is one such state: the text between two line ends of either kind.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

from rlwatch.errors import ImportFormatError

BLOCK = 1 << 20
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_GZIP = b"\x1f\x8b"
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_RAY = re.compile(r"^\s*\((?:[^()]*\s)?pid=\d+(?:,[^()]*)?\)\s?")
_WRAPPED = re.compile(r'^[\[,]?\s*\{"(?:stream_name|log)":')


class Segment(NamedTuple):
    """Text between two line ends (CR or LF), without colours; ``line`` is the physical line, from 1."""

    line: int
    text: str


def plain(text: str) -> str:
    """``text`` without terminal control sequences and NUL bytes."""
    if "\x00" in text:
        text = text.replace("\x00", "")
    return _ANSI.sub("", text) if "\x1b" in text else text


def without_prefix(text: str) -> str:
    """``text`` without the ``(TaskRunner pid=123, ip=...)`` that Ray puts before a worker's output.

    >>> without_prefix("(main_task pid=27483) step:3 - a:1")
    'step:3 - a:1'
    """
    return _RAY.sub("", text) if "pid=" in text else text


class _Splitter:
    """Text in, (line, text) between line ends out; keeps the unfinished end."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str, line: int) -> tuple[list[tuple[int, str]], int]:
        """What ``text``, beginning at ``line``, completes; and the number of line feeds in it."""
        *whole, last = (self._rest + text).split("\n")
        *pieces, self._rest = last.split("\r")
        found: list[tuple[int, str]] = []
        for number, physical in enumerate(whole, line):
            if "\r" in physical:
                found += [(number, piece) for piece in physical.split("\r")]
            else:
                found.append((number, physical))
        found += [(line + len(whole), piece) for piece in pieces]
        return found, len(whole)

    def finish(self, line: int) -> list[tuple[int, str]]:
        rest, self._rest = self._rest, ""
        return [(line, rest)]


class Segments:
    """Cuts a stream of bytes into segments; the result does not depend on how the stream was chunked.

    UTF-8 and UTF-16 with a byte order mark; bytes that are neither become U+FFFD. Lines of Kaggle
    (``{"stream_name":...,"data":...}``) and Docker (``{"log":...,"stream":...}``) logs are unwrapped.
    """

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._head = b""
        self._outer, self._inner = _Splitter(), _Splitter()
        self._line = 1

    def feed(self, data: bytes) -> list[Segment]:
        """The segments that ``data`` completes."""
        return self._split(self._decode(data, final=False))

    def finish(self) -> list[Segment]:
        """The last, unterminated segment, if any."""
        found = self._split(self._decode(b"", final=True))
        found += self._unwrapped(self._outer.finish(self._line))
        return found + _segments(self._inner.finish(self._line))

    def _decode(self, data: bytes, *, final: bool) -> str:
        if self._decoder is None:
            self._head += data
            if len(self._head) < 2 and not final:
                return ""
            encoding = "utf-16" if self._head.startswith(UTF16) else "utf-8-sig"
            self._decoder = codecs.getincrementaldecoder(encoding)("replace")
            data = self._head
        return self._decoder.decode(data, final)

    def _split(self, text: str) -> list[Segment]:
        found, feeds = self._outer.feed(text, self._line)
        self._line += feeds
        return self._unwrapped(found)

    def _unwrapped(self, found: list[tuple[int, str]]) -> list[Segment]:
        plain_ones: list[tuple[int, str]] = []
        for line, text in found:
            inner = _unwrap(text) if '{"' in text[:4] else None
            if inner is None:
                plain_ones.append((line, text))
            else:
                plain_ones += [(line, piece) for _, piece in self._inner.feed(inner, line)[0]]
        return _segments(plain_ones)


def _segments(found: list[tuple[int, str]]) -> list[Segment]:
    """Segments of what is not blank."""
    return [Segment(line, text) for line, raw in found if (text := plain(raw)) and not text.isspace()]


def _unwrap(text: str) -> str | None:
    """What a wrapped line carried, or None if it is not wrapped."""
    if not _WRAPPED.match(text):
        return None
    try:
        entry = json.loads(text.strip().strip("[],"))
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    data = entry.get("data") if "stream_name" in entry else entry.get("log") if "stream" in entry else None
    return data if isinstance(data, str) else None


def is_packed(path: Path) -> bool:
    """Whether the file is gzipped, by its first bytes."""
    with path.open("rb") as stream:
        return stream.read(2) == _GZIP


def open_log(path: Path) -> IO[bytes]:
    """Open for reading bytes; gzip is recognised by its first bytes, whatever the name says."""
    raw = path.open("rb")
    magic = raw.read(2)
    raw.seek(0)
    return cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="rb")) if magic == _GZIP else raw


def blocks(path: Path, size: int = BLOCK) -> Iterator[bytes]:
    """The bytes of a log, unpacked, ``size`` at a time. Raises ``ImportFormatError`` if it cannot be read."""
    try:
        with open_log(path) as stream:
            while block := stream.read(size):
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"the gzip file is damaged or still being written ({error}); unpack what is there with `zcat` first"
        raise ImportFormatError(str(path), problem) from error
    except OSError as error:
        raise ImportFormatError(str(path), f"cannot be read: {error.strerror or error}") from error
