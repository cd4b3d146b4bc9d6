"""The post-mortem of a run: what happened, why, and what to do, as one HTML or Markdown file that
needs nothing else.
"""

from rlwatch.report.gather import RunSummary, facts_of_report, facts_of_run
from rlwatch.report.pages import html, markdown

__all__ = ["RunSummary", "facts_of_report", "facts_of_run", "html", "markdown"]
