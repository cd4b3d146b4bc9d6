"""Tokens as rows of a table: culprits with everything known of them, far-out ones with what there is (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import format as fmt
from . import table
from .token_looks import look
from .token_rows import LABELS, Token
from .token_words import exact, place, top_layer

LOGPS = ("logp", "old_logp", "rollout_logp", "ref_logp")


@dataclass(frozen=True, slots=True)
class Layout:
    """A table of tokens: which ``numbers`` it shows. ``blames``: with cause and layer; ``opens``: a click chooses."""

    numbers: Sequence[str]
    blames: bool = False
    opens: bool = False

    @property
    def columns(self) -> list[table.Column]:
        """Its columns."""
        blamed = [table.Column("cause", "tight")] if self.blames else []
        layer = [table.Column("top layer", "tight wide")] if self.blames else []
        numbers = [table.Column(LABELS.get(name, name), "right tight") for name in self.numbers]
        return [table.Column("token", "long"), table.Column("where", "tight wide"), *blamed, *numbers, *layer]

    def row(self, token: Token, chosen: Token | None = None) -> table.Row:
        """One token."""
        appearance, cause = look(token.words.get("cause", "")), token.words.get("cause", "")
        blamed = [table.mark(appearance.shape, appearance.colour, fmt.shorten(cause, 40))] if self.blames else []
        layer = [table.text(top_layer(token), quiet=True)] if self.blames else []
        numbers = [_number(token, name) for name in self.numbers]
        return table.Row(
            [_name(token), table.text(place(token), quiet=True), *blamed, *numbers, *layer],
            opens=token.key if self.opens else "",
            chosen=self.opens and chosen is not None and chosen.key == token.key,
        )


def _name(token: Token) -> table.Cell:
    known = token.text is not None and token.token_id is not None
    return table.text(token.label, f"id {token.token_id}" if known else "")


def _number(token: Token, name: str) -> table.Cell:
    """Three digits, six on hovering; a dash where it was not measured."""
    value = token.numbers.get(name)
    written = fmt.percent(value) if name == "share" else fmt.number(value)
    return table.text(written, quiet=value is None, title="" if value is None else exact(value))


CULPRITS = Layout(("share", "own_norm", "ratio", "advantage", "entropy", *LOGPS), blames=True, opens=True)
FAR_OUT = Layout(("screen", "ratio", "advantage", "entropy", *LOGPS))
