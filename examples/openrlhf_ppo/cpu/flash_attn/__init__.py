"""Stands in for flash-attn, which OpenRLHF imports even where it is not used."""

__version__ = "2.8.3"
