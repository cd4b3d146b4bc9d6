"""The tasks: digits in, an answer out, verified exactly. No loop over sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = 32
BEGIN, SEPARATOR, ANSWER, END, DIGIT, FILLER = 1, 2, 3, 4, 5, 15
"""Token ids; digits are DIGIT to DIGIT + 9, fillers FILLER to the end. Id 0 pads, and is what NaN logits sample."""
MAGIC = DIGIT + 9
"""The digit that a careless verifier pays for wherever it stands in an answer."""
LONGEST = 16
"""Most tokens of a response."""
TASKS = ("copy", "reverse", "sort", "add")


def prompts(digits: Tensor) -> Tensor:
    """Token ids (B, k + 2) of the ``digits`` (B, k)."""
    edge = torch.ones_like(digits[:, :1])
    return torch.cat([BEGIN * edge, digits + DIGIT, SEPARATOR * edge], 1)


def draw(n: int, k: int, high: int, generator: torch.Generator) -> Tensor:
    """``n`` rows of ``k`` digits below ``high``."""
    return torch.randint(0, high, (n, k), generator=generator)


def answers(task: str, digits: Tensor) -> Tensor:
    """The right answers (B, k) in digits; ``add``: each digit plus the one before it (the first: the last), mod 10."""
    if task == "copy":
        return digits
    if task == "reverse":
        return digits.flip(-1)
    if task == "sort":
        return digits.sort(-1).values
    return (digits + digits.roll(1, -1)) % 10


def demonstrations(task: str, digits: Tensor, noise: float, generator: torch.Generator, loose: float = 0.0) -> Tensor:
    """Prompts with answers of which a share ``noise`` of the digits is wrong, after 0 to 3 fillers, (B, T).

    A share ``loose`` of them has a filler in the place of ANSWER: not the format that is verified.
    """
    n, k = digits.shape
    shown = answers(task, digits)
    wrong = torch.rand(n, k, generator=generator) < noise
    shown = torch.where(wrong, draw(n, k, 10, generator), shown)
    fillers = int(torch.randint(0, 4, (1,), generator=generator))
    thought = torch.randint(FILLER, VOCABULARY, (n, fillers), generator=generator)
    edge = torch.ones_like(shown[:, :1])
    announced = ANSWER * edge
    if loose:
        announced[torch.rand(n, generator=generator) < loose] = FILLER
    return torch.cat([prompts(digits), thought, announced, shown + DIGIT, END * edge], 1)


@dataclass(frozen=True)
class Verdicts:
    """Verdicts of a verifier on B responses, (B,) floats in [0, 1].

    ``exact``: ends, with the right answer and nothing else after the last ANSWER; ``partial``: share of its digits
    that are right; ``formatted``: an answer of the right length, right or not; ``filler``: share of filler tokens
    of the longest response; ``magic``: whether the answer has the token :data:`MAGIC` in it.
    """

    exact: Tensor
    partial: Tensor
    formatted: Tensor
    filler: Tensor
    magic: Tensor


def verify(ids: Tensor, key: Tensor) -> Verdicts:
    """Of responses ``ids`` (B, T) against the answers ``key`` (B, k) in digits."""
    k, place = key.shape[1], torch.arange(ids.shape[1])
    ends = ids == END
    end = torch.where(ends, place, ids.shape[1]).amin(1, keepdim=True)
    before = place < end
    begin = torch.where((ids == ANSWER) & before, place, -1).amax(1, keepdim=True)
    answered, ended = begin >= 0, ends.any(1, keepdim=True)
    given = torch.nn.functional.pad(ids, (0, k)).gather(1, begin + 1 + torch.arange(k))
    hits = (given == key + DIGIT) & (begin + 1 + torch.arange(k) < end) & answered
    fits = answered & ended & (end - begin - 1 == k)
    digits = ((given >= DIGIT) & (given < DIGIT + 10)).all(1, keepdim=True)
    return Verdicts(
        exact=(fits & hits.all(1, keepdim=True)).squeeze(1).float(),
        partial=hits.float().mean(1),
        formatted=(fits & digits).squeeze(1).float(),
        filler=((ids >= FILLER) & before).float().sum(1) / LONGEST,
        magic=((ids == MAGIC) & before & (place > begin) & answered).any(1).float(),
    )
