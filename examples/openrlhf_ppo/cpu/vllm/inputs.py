"""Part of the stand-in."""

TokensPrompt = dict
