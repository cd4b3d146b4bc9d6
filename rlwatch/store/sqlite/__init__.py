"""Runs in SQLite files: one directory per run, ``run.db`` for what was measured, ``control.db`` for what is asked."""
