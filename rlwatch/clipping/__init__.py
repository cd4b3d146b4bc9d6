"""Clipping gradients layer by layer: the cure where one layer spikes and a global clip would starve the others."""
