"""Values as text: JSON that keeps NaN, Infinity and -Infinity apart, and text SQLite can always hold.

These are our own files, so the three literals Python's ``json`` adds to the standard are welcome here.
"""

from __future__ import annotations

import json

from rlwatch.errors import StoreError
from rlwatch.records import JSON


def dumps(value: JSON) -> str:
    """JSON text of ``value``; raises ``StoreError`` if it has none (a cycle, a tuple as a key).

    >>> dumps({"kl": float("nan"), "top": (1, float("-inf"))})
    '{"kl":NaN,"top":[1,-Infinity]}'
    """
    try:
        return json.dumps(value, default=_nearest, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot be kept as JSON ({error}); got {str(value)[:200]}") from error


def loads(text: str) -> JSON:
    """The value again. Raises ``ValueError`` on damage."""
    return json.loads(text)


def plain(text: str) -> str:
    r"""``text`` as UTF-8 can hold it: lone surrogates (undecodable bytes of argv, say) become escapes.

    >>> plain("ok"), plain(chr(0xDC80))
    ('ok', '\\udc80')
    """
    text = str(text)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _nearest(value: object) -> JSON:
    if hasattr(value, "tolist"):  # numpy scalars and arrays, 0-d tensors
        return value.tolist()
    if hasattr(value, "items"):
        return dict(value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)
