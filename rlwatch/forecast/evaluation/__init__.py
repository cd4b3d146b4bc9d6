"""Judging forecasts of failures: labels of runs, simple tools to beat, and the scorer that compares them.

Tables need pyarrow (the extra ``forecast``), which is imported when one is read.
"""

from __future__ import annotations

from rlwatch.forecast.evaluation.folds import Split, folds_of
from rlwatch.forecast.evaluation.labels import Label, Labels, Outcome, label_runs, labels_of_index, read_labels
from rlwatch.forecast.evaluation.limits import limits
from rlwatch.forecast.evaluation.reading import read_runs
from rlwatch.forecast.evaluation.results import Evaluation, ToolResult
from rlwatch.forecast.evaluation.run_table import TRUTH, Column, RunTable
from rlwatch.forecast.evaluation.scorer import evaluate
from rlwatch.forecast.evaluation.scores import ToolScores, read_scores

__all__ = [
    "TRUTH",
    "Column",
    "Evaluation",
    "Label",
    "Labels",
    "Outcome",
    "RunTable",
    "Split",
    "ToolResult",
    "ToolScores",
    "evaluate",
    "folds_of",
    "label_runs",
    "labels_of_index",
    "limits",
    "read_labels",
    "read_runs",
    "read_scores",
]
