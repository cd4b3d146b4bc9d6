"""Statistics of per-token tensors, computed where the tensors are.

Nothing here waits for the device, draws a random number or keeps a graph. Results are 0-d tensors (or
:class:`~rlwatch.tensors.mergeable.Stat` objects holding them); :mod:`rlwatch.tensors.transfer` brings all results of a
step to the CPU in one copy.
"""
