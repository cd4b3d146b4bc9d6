"""Between the ranks of one run: each sends what it measured to rank 0, and hears what to do.

Plain TCP, without torch: rank 0 holds a :class:`~rlwatch.link.hub.Hub`, every other rank a
:class:`~rlwatch.link.spoke.Spoke`. They come to know each other by :mod:`~rlwatch.link.greeting`; commands go round by
:mod:`~rlwatch.link.rounds`. A rank that dies closes its connections, so nobody waits for it.
"""
