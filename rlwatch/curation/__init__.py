"""Name, tag, annotate, archive, delete and restore recorded runs, and find them again."""

from rlwatch.curation.editing import GRACE_S, edit_run, purge_run
from rlwatch.curation.search import SearchDocument, SearchQuery, facts_of

__all__ = ["GRACE_S", "SearchDocument", "SearchQuery", "edit_run", "facts_of", "purge_run"]
