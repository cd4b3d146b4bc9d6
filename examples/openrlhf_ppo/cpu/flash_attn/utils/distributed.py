"""Part of the stand-in."""

all_gather = None
