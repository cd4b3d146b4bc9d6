"""Conversion of bytes to lines of text, within bounds: encodings, compression, carriage returns, colours, log wrappers.

A progress bar redraws itself with carriage returns, so one physical line of a console log may hold hundreds of states.
A :class:`TextLine` is one such state: the text between two line ends of either kind.

Logs are untrusted input. Reading one takes time in proportion to its size, and no more memory than the bounds below
allow. Data beyond a bound is left out and counted. If the remaining data would be meaningless, the log is refused.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, NamedTuple, cast

from rlwatch.errors import ImportFormatError
from rlwatch.records import JSON

LONGEST_LINE = 8 << 20
"""Largest number of characters in a line: 100,000 metrics fit."""
LONGEST_RECORD = 64 << 20
"""Largest number of bytes in a record of TensorBoard's or wandb's files. Larger ones hold pictures and tables, and no
metric.
"""
LARGEST_DOCUMENT = 256 << 20
"""Largest number of bytes in a file that can only be read as a whole."""
UNPACKED_FREELY = 256 << 20
MOST_UNPACKED = 200
"""Largest ratio of unpacked to packed size. Up to ``UNPACKED_FREELY`` bytes any ratio is allowed; progress bars reach
100.
"""
LONGEST_NAME = 500
"""Largest number of characters in a metric's name."""
MOST_NAMES = 20_000
"""Largest number of metrics in a run."""
MOST_RUNS = 1000
"""Largest number of runs in a log that are read together."""
MOST_ATTEMPTS = 1000
"""Largest number of times that a trainer may have restarted in one log."""
LARGEST_STEP = 1 << 53
"""Smallest step that a float can no longer represent exactly in all cases; larger ones are refused."""
A_LOOK = 64 << 20
"""Number of bytes of a log that are read before other logs are read."""
SHOWN = 80


def shown(value: object) -> str:
    """Return ``repr`` of a value from a log, truncated to a length that fits a message.

    >>> len(shown("x" * 1_000_000)), shown(10**10_000)
    (80, 'a very large integer')
    """
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return "a very large integer"
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def parsed(text: str) -> JSON:
    """Return the value of the JSON in ``text``. Raises ``ValueError`` with the problem.

    >>> parsed("[" * 200_000)
    Traceback (most recent call last):
        ...
    ValueError: a JSON line that is nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("a JSON line that is nested too deeply") from None
    except json.JSONDecodeError:
        raise ValueError("a half-written JSON line") from None
    except ValueError:
        raise ValueError("a JSON line with an integer of thousands of digits") from None


def open_regular(path: Path) -> IO[bytes]:
    """Return the file at ``path``, open for reading without a buffer. Raises ``OSError`` if it is no regular file.

    Opening a pipe or a device in place of a log might wait forever, and reading it might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path}: is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


BLOCK = 1 << 20
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_RAY = re.compile(r"^\s*\((?:[^()]{0,200}\s)?pid=\d+(?:,[^()]{0,200})?\)\s?")
_WRAPPED = re.compile(r'^[\[,]?\s*\{"(?:stream_name|log)":')


class TextLine(NamedTuple):
    """Text between two line ends (CR or LF), without colours; ``line`` is the physical line, from 1."""

    line: int
    text: str


def plain(text: str) -> str:
    """Return ``text`` without terminal control sequences and NUL bytes."""
    if "\x00" in text:
        text = text.replace("\x00", "")
    return _ANSI.sub("", text) if "\x1b" in text else text


def without_prefix(text: str) -> str:
    """Return ``text`` without the ``(TaskRunner pid=123, ip=...)`` that Ray puts before a worker's output.

    >>> without_prefix("(main_task pid=27483) step:3 - a:1")
    'step:3 - a:1'
    """
    return _RAY.sub("", text) if "pid=" in text else text


class _Splitter:
    """Text in, (line, text) between line ends out; keeps the unfinished end, in the pieces it came in.

    A line of more than ``longest`` characters is dropped; ``too_long`` is called with its number.
    """

    def __init__(self, too_long: Callable[[int], None], longest: int) -> None:
        self._too_long = too_long
        self._longest = longest
        self._kept: list[str] = []
        self._length = 0

    def feed(self, text: str, line: int) -> tuple[list[tuple[int, str]], int]:
        """Return the lines that are complete after ``text``, which begins at ``line``, without empty ones.

        The count of line feeds is also returned.
        """
        *whole, last = text.split("\n")
        *pieces, rest = last.split("\r")
        found: list[tuple[int, str]] = []
        for number, physical in enumerate(whole, line):
            if physical or self._length:
                for piece in physical.split("\r"):
                    found += self._ended(piece, number)
        for piece in pieces:
            found += self._ended(piece, line + len(whole))
        self._keep(rest)
        return found, len(whole)

    def finish(self, line: int) -> list[tuple[int, str]]:
        return self._ended("", line)

    def _keep(self, text: str) -> None:
        self._length += len(text)
        if self._length > self._longest:
            self._kept.clear()
        elif text:
            self._kept.append(text)

    def _ended(self, piece: str, line: int) -> list[tuple[int, str]]:
        """Return the line that ``piece`` completes; empty if it is blank or too long."""
        if self._length:
            self._keep(piece)
            length, piece = self._length, "".join(self._kept)
            self._kept, self._length = [], 0
        else:
            length = len(piece)
        if length > self._longest:
            self._too_long(line)
            return []
        return [(line, piece)] if piece else []


class Segments:
    """Converter of a stream of bytes into lines of text; the result does not depend on how the stream was divided.

    UTF-8 and UTF-16 with a byte order mark are decoded; bytes that are neither become U+FFFD. Lines of Kaggle
    (``{"stream_name":...,"data":...}``) and Docker (``{"log":...,"stream":...}``) logs are unwrapped.

    Parameters
    ----------
    too_long
        Called with the number of each line that is left out as too long.
    longest
        Largest number of characters in a line.
    """

    def __init__(self, too_long: Callable[[int], None] = lambda _line: None, *, longest: int = LONGEST_LINE) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._head = b""
        self._outer, self._inner = _Splitter(too_long, longest), _Splitter(too_long, longest)
        self._line = 1

    def feed(self, data: bytes) -> list[TextLine]:
        """Return the lines that are complete after the next bytes ``data``."""
        return self._split(self._decode(data, final=False))

    def finish(self) -> list[TextLine]:
        """Return the last, unterminated line, if there is one."""
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

    def _split(self, text: str) -> list[TextLine]:
        found, feeds = self._outer.feed(text, self._line)
        self._line += feeds
        return self._unwrapped(found)

    def _unwrapped(self, found: list[tuple[int, str]]) -> list[TextLine]:
        plain_ones: list[tuple[int, str]] = []
        for line, text in found:
            inner = _unwrap(text) if '{"' in text[:4] else None
            if inner is None:
                plain_ones.append((line, text))
            else:
                plain_ones += [(line, piece) for _, piece in self._inner.feed(inner, line)[0]]
        return _segments(plain_ones)


def _segments(found: list[tuple[int, str]]) -> list[TextLine]:
    """Return the segments of texts that are not blank."""
    return [TextLine(line, text) for line, raw in found if (text := plain(raw)) and not text.isspace()]


def _unwrap(text: str) -> str | None:
    """Return the content of a wrapped line; None if it is not wrapped."""
    if not _WRAPPED.match(text):
        return None
    try:
        entry = parsed(text.strip().strip("[],"))
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    data = entry.get("data") if "stream_name" in entry else entry.get("log") if "stream" in entry else None
    return data if isinstance(data, str) else None


def _zstd(raw: IO[bytes], path: Path) -> IO[bytes]:
    """Return a stream that unpacks a zstd file: by Python's own module, from 3.14 on, or by pyarrow (extra
    ``export``).
    """
    try:
        return cast("IO[bytes]", import_module("compression.zstd").ZstdFile(raw))
    except ImportError:
        pass
    try:
        pyarrow = import_module("pyarrow")
    except ImportError:
        problem = "is a zstd archive: pip install 'rlwatch-monitor[export]', or unpack it first"
        raise ImportFormatError(str(path), problem) from None
    return cast("IO[bytes]", pyarrow.CompressedInputStream(raw, "zstd"))


Unpacker = Callable[[IO[bytes], Path], IO[bytes]]
_UNPACKERS: Mapping[bytes, Unpacker] = {
    _GZIP: lambda raw, _: cast("IO[bytes]", gzip.open(raw)),  # noqa: SIM115  (blocks() closes what it wraps)
    _BZIP2: lambda raw, _: cast("IO[bytes]", bz2.open(raw)),  # noqa: SIM115
    _XZ: lambda raw, _: cast("IO[bytes]", lzma.open(raw)),  # noqa: SIM115
    _ZSTD: _zstd,
}
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)


def unpacker(head: bytes) -> Unpacker | None:
    """Return the function that unpacks a file, chosen by its first bytes ``head`` whatever its name; None if it is not
    packed.
    """
    return next((unpack for magic, unpack in _UNPACKERS.items() if head.startswith(magic)), None)


def is_packed(path: Path) -> bool:
    """Return True if the file at ``path`` is packed (gzip, bzip2, xz, zstd), by its first bytes."""
    with open_regular(path) as stream:
        return unpacker(stream.read(6)) is not None


def blocks(path: Path, size: int = BLOCK) -> Iterator[bytes]:
    """Yield the unpacked bytes of a log, ``size`` at a time. Raises ``ImportFormatError`` if the log cannot be read."""
    try:
        with open_regular(path) as raw:
            unpack = unpacker(raw.read(6))
            raw.seek(0)
            stream = raw if unpack is None else unpack(raw, path)
            given = 0
            while block := stream.read(size):
                given += len(block)
                if unpack is not None and given > max(UNPACKED_FREELY, MOST_UNPACKED * raw.tell()):
                    problem = f"unpacks to more than {MOST_UNPACKED} times its size, as no log does; if it is one, "
                    raise ImportFormatError(str(path), problem + "unpack it and give that")
                yield block
    except _DAMAGED as error:
        raise _half_packed(path, error) from error
    except OSError as error:
        if error.errno is None:  # bzip2 and zstd report damage this way
            raise _half_packed(path, error) from error
        raise ImportFormatError(str(path), f"cannot be read: {error.strerror or error}") from error


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield ``path``, or an unpacked copy of that file, for readers that need a file. Raises ``ImportFormatError``."""
    if not is_packed(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="rlwatch-") as home:
        copy = Path(home) / path.stem
        with copy.open("wb") as file:
            for block in blocks(path):
                file.write(block)
        yield copy


def _half_packed(path: Path, error: Exception) -> ImportFormatError:
    problem = f"the packed file is damaged or still being written ({error}); unpack what is there first (zcat, zstdcat)"
    return ImportFormatError(str(path), problem)
