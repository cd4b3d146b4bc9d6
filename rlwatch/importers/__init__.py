"""Reading of the logs that trainers write: one module for each format, and recognition of formats by content."""

from rlwatch.importers.base import About, ImportedRun, Importer, Skipped
from rlwatch.importers.follow import Position
from rlwatch.importers.registry import formats, logs_in, read_data, read_log, sniff
from rlwatch.importers.tail import LogTail, Tail

__all__ = [
    "About",
    "ImportedRun",
    "Importer",
    "LogTail",
    "Position",
    "Skipped",
    "Tail",
    "formats",
    "logs_in",
    "read_data",
    "read_log",
    "sniff",
]
