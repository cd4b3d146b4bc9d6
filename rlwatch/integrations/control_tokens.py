"""Control tokens of a tokenizer: those it added for templates, tools and thinking, and which of them form tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlwatch.error_boundary import call_or

MOST = 64
"""Most control tokens; tokenizers reserve hundreds that no template uses."""
_MARKED = re.compile(r"[<\[][^\s<>\[\]]+[>\]]|<[^\s<>]+>")
_TAG = re.compile(r"<(/?)([\w.:-]+)>")
_UNUSED = re.compile(r"reserved|unused|extra_id|placeholder", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Ids of control tokens, and pairs of them that open and close a block."""

    ids: tuple[int, ...] = ()
    tags: tuple[tuple[int, int], ...] = ()


NO_CONTROL = ControlTokens()


def control_tokens(tokenizer: Any) -> ControlTokens:
    """Return the tokens that a Hugging Face ``tokenizer`` added and marked by brackets; none of anything else.

    >>> class Tokenizer:
    ...     added_tokens_decoder = {3: "<|im_end|>", 5: "<tool_call>", 6: "</tool_call>", 7: "    "}
    >>> control_tokens(Tokenizer())
    ControlTokens(ids=(3, 5, 6), tags=((5, 6),))
    """
    return call_or(lambda: _read(getattr(tokenizer, "added_tokens_decoder", None)), lambda _error: NO_CONTROL)


def _read(added: Any) -> ControlTokens:
    if not isinstance(added, Mapping):
        return NO_CONTROL
    named = {int(token): str(getattr(text, "content", text)) for token, text in added.items()}
    marked = {token: text for token, text in named.items() if _MARKED.fullmatch(text) and not _UNUSED.search(text)}
    ids = sorted(marked)[:MOST]
    halves = {match.groups(): token for token in ids if (match := _TAG.fullmatch(marked[token]))}
    tags = tuple(
        (token, halves["/", name]) for (closes, name), token in halves.items() if not closes and ("/", name) in halves
    )
    return ControlTokens(tuple(ids), tags)
