"""Connections between the ranks of one run: each rank sends its metrics to rank 0, and receives commands.

Plain TCP, without torch: rank 0 holds a :class:`~rlwatch.link.hub.Hub`, every other rank a
:class:`~rlwatch.link.spoke.WorkerClient`; both speak :mod:`~rlwatch.link.wire`. Their training
threads vote on commands in :mod:`~rlwatch.link.rounds`. A rank that dies closes its connections, so that no other rank
waits for it.

Commands are carried out by all ranks at the same boundary, or by none; no rank waits while there is no command.

A *boundary* is a place in the training loop that every rank comes to, where a command may be carried out. Usually
there is no command, and a rank passes without communication: it reads a number in its own memory. When rank 0 has
commands it asks every rank at which boundary it could still stop. Each answers at once, on a thread of its own,
whatever its training thread does, and from then on waits at its next boundary until it hears where all meet: at the
first that none has passed. So however far apart the ranks are, only a command makes them wait for each other,
and only at the boundary it is carried out at. There every rank checks, votes, receives one verdict, acts and votes
again.

A *place of order* is one that every rank passes where only rank 0 knows whether something is to be done (a
checkpoint keeps a reference, training resumes from one). The others wait there for its order.
"""
