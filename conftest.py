"""Seeds of property tests are fixed: the same commit passes or fails everywhere.

``pytest --hypothesis-profile explore`` draws new examples at every run, and more of them.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile("fixed")
