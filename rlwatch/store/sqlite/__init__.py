"""Runs in SQLite files: one directory per run, with ``run.db`` for measurements and ``control.db`` for commands and
alerts.

The files are laid out in ``layout``, owned through ``ownership``, opened through ``connection``, and their tables are
in ``schema``. ``rows`` encodes items, and ``runrow`` keeps the row that describes the run. ``writer`` (with its
``journal``) and ``reading`` write and read a run; ``control`` holds what other processes write. ``filestore`` puts
these together; ``shared`` does so where the directory lies on a network file system.
"""
