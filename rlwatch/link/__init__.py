"""Connections between the ranks of one run: each rank sends its metrics to rank 0, and receives commands.

Plain TCP, without torch: rank 0 has a :class:`~rlwatch.link.hub.Hub`, every other rank a
:class:`~rlwatch.link.spoke.WorkerClient`. Their messages are defined in :mod:`~rlwatch.link.wire`. The training threads
of the ranks vote on commands in :mod:`~rlwatch.link.rounds`. A rank that dies closes its connections, so that no other
rank waits for it.

Commands are executed by all ranks at the same boundary, or by none; no rank waits while there is no command.

A *boundary* is a point in the training loop that every rank reaches, and at which a command may be executed. Usually
there is no command, and a rank passes without communication: it reads a number in its own memory. When rank 0 has
commands it asks every rank at which boundary that rank could still stop. Each rank answers at once, on a thread of its
own, whatever its training thread does. From then on it waits at its next boundary until rank 0 names the boundary at
which all ranks meet: the first that none has passed. So however far apart the ranks are, only a command makes them wait
for each other, and only at the boundary at which it is executed. There every rank checks the command, votes, receives
one verdict, acts and votes again.

An *order* is for a point that every rank passes, at which only rank 0 knows whether there is something to do (a
checkpoint keeps a reference, training resumes from one). The other ranks wait there for the order of rank 0, which is
usually empty.
"""
