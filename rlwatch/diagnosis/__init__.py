"""From findings to causes, and from causes to what people do about them."""

from rlwatch.diagnosis.actions import Action, Advice, Strength, advice, kinds

__all__ = ["Action", "Advice", "Strength", "advice", "kinds"]
