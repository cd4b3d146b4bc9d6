"""Recorded runs in Python: :func:`rlwatch.open`, tables as DataFrames, plots for notebooks.

The command line takes its rows from :mod:`~rlwatch.analysis.rows`, too, so that both agree.
"""
