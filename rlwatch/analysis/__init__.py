"""Recorded runs in Python: :func:`rlwatch.open`, tables as DataFrames, plots for notebooks.

The command line takes its rows from here (:mod:`~rlwatch.analysis.rows`), so that both agree.
"""
