"""The ``rlwatch`` command line: one module for each command, which parses options and prints.

``entry`` is the console script and ``app`` the tree of commands. Commands get their results from the other packages of
rlwatch; modules here that are not commands (``console``, ``options``, ``view_text``, ``background``) are shared by
several commands.
"""
