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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from rlwatch.errors import ImportFormatError

BLOCK = 1 << 20
_GZIP = b"\x1f\x8b"
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_RAY = re.compile(r"^\s*\((?:[^()]*\s)?pid=\d+(?:,[^()]*)?\)\s?")
_WRAPPED = re.compile(r'^[\[,]?\s*\{"(?:stream_name|log)":')


@dataclass(frozen=True, slots=True)
class Segment:
    """Text between two line ends (CR or LF), without colours; ``line`` is the physical line, from 1."""

    line: int
    text: str


def plain(text: str) -> str:
    """``text`` without terminal control sequences and NUL bytes."""
    text = text.replace("\x00", "")
    return _ANSI.sub("", text) if "\x1b" in text else text


def without_prefix(text: str) -> str:
    """``text`` without the ``(TaskRunner pid=123, ip=...)`` that Ray puts before a worker's output.

    >>> without_prefix("(main_task pid=27483) step:3 - a:1")
    'step:3 - a:1'
    """
    return _RAY.sub("", text) if "pid=" in text else text


class _Splitter:
    """Text in, segments out; keeps the unfinished end."""

    def __init__(self) -> None:
        self.rest = ""

    def feed(self, text: str, line: int) -> tuple[list[Segment], int]:
        """Segments that ``text`` completes and the number of line feeds in it."""
        found: list[Segment] = []
        *whole, last = (self.rest + text).split("\n")
        for offset, physical in enumerate(whole):
            found += [Segment(line + offset, piece) for piece in physical.split("\r") if piece]
        *pieces, self.rest = last.split("\r")
        found += [Segment(line + len(whole), piece) for piece in pieces if piece]
        return found, len(whole)

    def finish(self, line: int) -> list[Segment]:
        rest, self.rest = self.rest, ""
        return [Segment(line, rest)] if rest else []


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
        found += self._cleaned(self._outer.finish(self._line))
        return found + [Segment(s.line, plain(s.text)) for s in self._inner.finish(self._line)]

    def _decode(self, data: bytes, *, final: bool) -> str:
        if self._decoder is None:
            self._head += data
            if len(self._head) < 2 and not final:
                return ""
            utf16 = self._head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            self._decoder = codecs.getincrementaldecoder("utf-16" if utf16 else "utf-8-sig")("replace")
            data = self._head
        return self._decoder.decode(data, final)

    def _split(self, text: str) -> list[Segment]:
        found, feeds = self._outer.feed(text, self._line)
        self._line += feeds
        return self._cleaned(found)

    def _cleaned(self, found: list[Segment]) -> list[Segment]:
        out: list[Segment] = []
        for segment in found:
            inner = _unwrap(segment.text) if _WRAPPED.match(segment.text) else None
            pieces = [segment] if inner is None else self._inner.feed(inner, segment.line)[0]
            for piece in pieces:
                text = plain(piece.text)
                if text and not text.isspace():
                    out.append(Segment(segment.line, text))
        return out


def _unwrap(text: str) -> str | None:
    """What a wrapped line carried, or None if it is not wrapped after all."""
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
