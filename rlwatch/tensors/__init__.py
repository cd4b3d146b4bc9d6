"""Masked reductions of per-token tensors that stay on their device.

Nothing here waits for the device, draws a random number or keeps a graph. Results are 0-d tensors (or
:class:`~rlwatch.tensors.mergeable.Stat` objects holding them); :mod:`rlwatch.tensors.transfer` brings all
of a step to the CPU in one copy.
"""
