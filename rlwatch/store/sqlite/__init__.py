"""Runs in SQLite files: one directory per run, ``run.db`` for what was measured, ``control.db`` for what is asked.

The files are laid out in ``layout``, owned through ``ownership``, opened through ``connection``, and their tables are
in ``schema``. ``rows`` encodes items, ``runrow`` keeps the run's own row; ``writer`` (with its ``journal``) and
``reading`` are the two halves of a run, ``control`` is what other processes write. ``filestore`` puts these together;
``shared`` does so where the directory lies on a network file system.
"""
