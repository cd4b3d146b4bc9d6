"""Alerts, from findings (detected problems) to receivers.

``rules`` define which findings become alerts, ``engine`` keeps the state of alerts, ``dispatch`` decides which message
goes to which channel and writes ``messages`` to the outbox, which survives the process; ``outbox`` delivers it.
``silencing`` has users' actions on alerts; ``config`` reads ``rlwatch.toml``, by the ``schema``.
"""
