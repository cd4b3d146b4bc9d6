"""Between the ranks of one run: each sends what it measured to rank 0, and hears what to do.

Plain TCP, without torch: rank 0 holds a :class:`~rlwatch.link.hub.Hub`, every other rank a
:class:`~rlwatch.link.spoke.WorkerClient`; both speak :mod:`~rlwatch.link.wire`. Their training
threads vote on commands in :mod:`~rlwatch.link.rounds`. A rank that dies closes its connections, so that no other rank
waits for it.

Commands go round: all ranks carry one out at the same boundary, or none does, and nobody waits where none is.

A *boundary* is a place in the training loop that every rank comes to, where a command may be carried out. Usually
there is none, and a rank passes without a word to anybody: it looks at a number in its own memory. When rank 0 has
commands it asks every rank at which boundary it could still stop. Each answers at once, on a thread of its own,
whatever its training thread does, and from then on waits at its next boundary until it hears where all meet: at the
first that none has passed. So whoever comes first, by whatever time, only a command makes ranks wait for each other,
and only at the boundary it is carried out at. There every rank checks, votes, hears one verdict, acts and votes again.

A *place of order* is one that every rank passes where only rank 0 knows whether something is to be done (a
checkpoint keeps a reference, training resumes from one). The others wait there to hear that.
"""
