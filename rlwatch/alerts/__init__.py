"""Alerts, from findings to receivers.

``rules`` say which findings become alerts, ``engine`` keeps their states, ``dispatch`` decides what is published to
whom and writes ``messages`` to the outbox, which survives the process; ``outbox`` delivers it. ``silencing`` is what
people do about alerts; ``config`` reads ``rlwatch.toml``, by the ``schema``.
"""
