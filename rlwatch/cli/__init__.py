"""The ``rlwatch`` command: one file per command, printing only.

``entry`` is the console script, ``app`` the tree of commands. What a command knows comes from the floors
below; what is not printing lives in small modules of its own here (``lookup``, ``strict_json``, ``wording``).
"""
