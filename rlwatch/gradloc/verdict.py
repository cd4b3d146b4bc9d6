"""Decision which level of a spike is to blame: token, stretch, response, group, task, rank or batch.

Contributions are aggregated upwards. A response is to blame if most of its tokens are outliers, a prompt group if most
of its responses are to blame, and so on. So the named level explains the most with the least: one response instead of
its four hundred tokens, and one token instead of the response that contains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from torch import Tensor

from rlwatch.gradloc.culprits import HostPass
from rlwatch.gradloc.distributed import World, gather_plain
from rlwatch.gradloc.report import BlameLevel, Unit
from rlwatch.gradloc.trigger import Usual
from rlwatch.stats import mad, median
from rlwatch.wording import percent

BEYOND = 1.5
"""Multiple of the largest token of a healthy step (or 3 deviations of it) above which a token is an outlier."""
FAR, DEVIATIONS = 6.0, 5.0
"""Limits of a token if no healthy step is known: multiple of the median of its own step, and log deviations from it."""
DOMINANT = 0.3
"""Share of the gradient norm above which a token is an outlier, whatever the sizes of others."""
HALF = 0.5
"""Share of its tokens that must be outliers for a response to be to blame."""
MOST = 0.6
"""Share of its responses that must be to blame for a group, task, rank or batch to be to blame."""
NEARLY = 0.8
"""Share of the total size of all outliers that a level must hold to be to blame."""
FEW = 3
"""Smallest number of tokens in a stretch, or in a response that is to blame."""
MOST_UNITS = 8
"""Largest number of units that a report lists; all others are combined."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Sizes beyond which a token is an outlier: of its coefficient |dL/dlogp|, and of |dL/dlogp| (1 - p), an estimate
    of its gradient.

    p is the token's probability. ``usual`` is the size of an ordinary coefficient.
    """

    coefficient: float
    screen: float
    usual: float

    @classmethod
    def of(cls, hosts: Sequence[HostPass], scales: Mapping[str, Usual], world: World) -> TokenLimits:
        """Compute the limits from the run's healthy steps (``scales``), or, if there are none, from the step itself.

        A collective: all ranks call it. ``hosts`` are the micro-batches of this rank, on the CPU.
        """
        pushed = [np.abs(a[a != 0]) for host in hosts if (a := coefficients(host)) is not None]
        sizes = np.concatenate(pushed) if pushed else np.zeros(0)
        surprise = [(-np.expm1(host.columns["logp"][host.mask])) for host in hosts]
        open_share = float(np.nanquantile(np.concatenate(surprise), 0.9)) if len(sizes) else 1.0
        logs = [math.log(size) for size in sizes.tolist()]
        here = [median(logs), mad(logs), open_share, float(len(logs))] if logs else [0.0, 0.0, 1.0, 0.0]
        every = [rank for rank in gather_plain(world, here) if rank[3]]
        if all(name in scales and scales[name].middle > 0 for name in ("largest coefficient", "largest screen")):
            largest = scales["largest coefficient"]
            return cls(largest.upper(BEYOND), scales["largest screen"].upper(BEYOND), scales["coefficient"].middle)
        if not every:
            return cls(math.inf, math.inf, 0.0)
        total = sum(rank[3] for rank in every)
        middle, spread, opened = (sum(rank[i] * rank[3] for rank in every) / total for i in range(3))
        limit = math.exp(middle + max(math.log(FAR), DEVIATIONS * spread))
        return cls(limit, limit * opened, math.exp(middle))


def coefficients(host: HostPass) -> np.ndarray | None:
    """Return dL/dlogp (B, T) of the micro-batch ``host``, 0 outside the mask and where it is not finite; None if not
    known.
    """
    column = host.columns.get("coefficient")
    return None if column is None else np.where(host.mask & np.isfinite(column), column, 0.0)


def sizes_of(host: HostPass) -> np.ndarray:
    """Return the size (B, T) of the gradient of each token at its logits, up to a factor of sqrt 2: |dL/dlogp| (1 - p).

    p is the token's probability. ``host``: the micro-batch, on the CPU.
    """
    push = coefficients(host)
    surprise = np.where(host.mask, -np.expm1(np.minimum(host.columns["logp"], 0.0)), 0.0)
    return np.zeros(host.mask.shape) if push is None else np.abs(push) * np.nan_to_num(surprise)


# One response, as plain numbers that are sent between ranks.


@dataclass(frozen=True, slots=True)
class ResponseNorm:
    """One response of a step: its share of the gradient norm, and how many of its tokens are outliers.

    ``up`` and ``down`` are the sums of positive and negative contributions, ``top`` the largest absolute one, all as
    shares of the norm (0 if nothing was attributed). ``pushed`` is the number of the response's coefficients dL/dlogp
    that are not 0, ``middle`` their median size. ``standing`` is the number of outliers, ``stood`` their summed size,
    and ``size`` the summed size of all tokens. ``runs`` lists stretches of outliers: (first, last, tokens, size).
    """

    rank: int
    microbatch: int
    row: int
    sequence: int
    group: str | None
    task: str | None
    tokens: int
    pushed: int
    middle: float
    standing: int
    stood: float
    size: float
    up: float
    down: float
    top: float
    runs: Sequence[tuple[int, int, int, float]] = ()

    @property
    def share(self) -> float:
        """Return the response's share of the norm, signed."""
        return self.up + self.down

    def to_blame(self, limits: TokenLimits) -> bool:
        """Return True if the response as a whole is to blame: most of its tokens are outliers, not only some.

        ``limits``: sizes beyond which a token is an outlier.
        """
        if self.pushed < FEW:  # a short answer is to blame if all its tokens are outliers
            return 0 < self.pushed == self.standing
        alike = self.up - self.down > 0 and self.top < HALF * (self.up - self.down)
        dominant = self.share >= HALF and self.middle > 3 * limits.usual > 0 and alike
        return self.middle > limits.coefficient or self.standing >= max(FEW, HALF * self.pushed) or dominant


Standing = Sequence[np.ndarray]
"""For each pass (B, T): True for outlying tokens."""


def standing_out(
    hosts: Sequence[HostPass],
    sizes: Sequence[np.ndarray],
    contributions: Sequence[Tensor],
    norm: float,
    limits: TokenLimits,
) -> list[np.ndarray]:
    """Return, for each micro-batch of this rank, which tokens (B, T) are outliers: by their size, or by their share of
    the norm.

    ``hosts`` are these micro-batches on the CPU, ``norm`` is the step's gradient norm, and ``limits`` are the sizes
    beyond which a token is an outlier. ``sizes`` and ``contributions`` are (B, T) of each micro-batch;
    ``contributions`` may be empty.
    """
    found = []
    for k, (host, size) in enumerate(zip(hosts, sizes, strict=True)):
        large = size > limits.screen
        if contributions and norm > 0:
            large |= np.abs(contributions[k].numpy()) >= DOMINANT * norm
        found.append(large & host.mask)
    return found


def rows_of(
    hosts: Sequence[HostPass],
    sizes: Sequence[np.ndarray],
    standing: Standing,
    shares: Sequence[np.ndarray],
    world: World,
) -> list[ResponseNorm]:
    """Return the responses of all ranks that have tokens. A collective.

    ``hosts`` are the micro-batches of this rank, on the CPU. ``sizes``, ``standing`` (True for outliers) and ``shares``
    of the norm are (B, T) for each micro-batch of this rank.
    """
    here = [
        _row(host, row, size[row], outlying[row], share[row])
        for host, size, outlying, share in zip(hosts, sizes, standing, shares, strict=True)
        for row in np.flatnonzero(host.mask.any(1)).tolist()
    ]
    bodies = [body for rank in gather_plain(world, [asdict(row) for row in here]) for body in rank]
    return [ResponseNorm(**{**body, "runs": [tuple(run) for run in body["runs"]]}) for body in bodies]


def _row(host: HostPass, row: int, size: np.ndarray, standing: np.ndarray, shares: np.ndarray) -> ResponseNorm:
    a, on = coefficients(host), host.mask[row]
    pushed = np.abs(a[row][a[row] != 0]) if a is not None else np.zeros(0)
    inside = shares[on]
    return ResponseNorm(
        host.rank, host.microbatch, row, host.first_row + row,
        None if host.groups is None else host.groups[row],
        None if host.tasks is None else host.tasks[row],
        int(on.sum()), len(pushed), float(np.median(pushed)) if len(pushed) else 0.0,
        int(standing.sum()), float(size[standing].sum()), float(size[on].sum()),
        float(inside[inside > 0].sum()), float(inside[inside < 0].sum()),
        float(np.abs(inside).max(initial=0.0)), _runs(np.flatnonzero(standing), size),
    )  # fmt: skip


def _runs(places: np.ndarray, size: np.ndarray) -> list[tuple[int, int, int, float]]:
    """Group adjacent places, with gaps of one at most."""
    pieces = np.split(places, np.flatnonzero(np.diff(places) > 2) + 1) if len(places) else []
    return [(int(piece[0]), int(piece[-1]), len(piece), float(size[piece].sum())) for piece in pieces]


# The level to blame.


@dataclass(frozen=True, slots=True)
class Blame:
    """The level that is to blame for a spike (token, response, prompt group...), its ``units``, and the ``rows``
    (responses) in them, out of ``every`` response.

    ``statement`` describes the level. :attr:`BlameLevel.BATCH` without rows means that there are no outliers. There are
    no units if no contributions are known.
    """

    verdict: BlameLevel
    units: Sequence[Unit] = ()
    rows: Sequence[ResponseNorm] = ()
    statement: str = ""
    every: Sequence[ResponseNorm] = ()

    @property
    def whole(self) -> bool:
        """Return True if responses are to blame as a whole, not some of their tokens."""
        return bool(self.rows) and self.verdict not in {BlameLevel.TOKEN, BlameLevel.STRETCH}


def blame(rows: Sequence[ResponseNorm], limits: TokenLimits, *, ranks: int = 1) -> Blame:
    """Return the level (token, response, prompt group, task, rank or batch) that explains most of a spike with the
    fewest tokens.

    ``limits``: sizes beyond which a token is an outlier. ``rows`` are the responses of the step, ``ranks`` is the
    number of ranks. It is plain arithmetic: ranks that are given the same rows agree.
    """
    guilty = [row for row in rows if row.to_blame(limits)]
    loose = sum(row.stood for row in rows if row not in guilty)
    whole = sum(row.size for row in guilty)
    if guilty and whole >= NEARLY * (whole + loose):
        return replace(_rolled(rows, guilty, ranks), every=rows)
    return replace(_tokens(rows, ranks), every=rows)


def _rolled(rows: Sequence[ResponseNorm], guilty: Sequence[ResponseNorm], ranks: int) -> Blame:
    """Return the coarsest of response, group, task, rank and batch that is to blame nearly whole."""
    levels: list[tuple[BlameLevel, Callable[[ResponseNorm], str | None]]] = [
        (BlameLevel.BATCH, lambda _: ""),
        (BlameLevel.RANK, (lambda row: f"rank {row.rank}") if ranks > 1 else lambda _: None),
        (BlameLevel.TASK, lambda row: row.task or None),
        (BlameLevel.GROUP, lambda row: row.group or None),
    ]
    total = sum(row.size for row in guilty)
    for level, key in levels:
        units = _guilty_units(rows, guilty, key, whole_batch=level is BlameLevel.BATCH)
        if level is BlameLevel.TASK:  # of which only one prompt is to blame: the prompt explains as much with less
            units = {name: members for name, members in units.items() if _prompts(members, guilty) != 1}
        held = sum(row.size for members in units.values() for row in members if row in guilty)
        if units and held >= NEARLY * total:
            return _blamed(level, rows, units, ranks)
    if all(row.pushed == 1 for row in guilty):  # the answer is the token
        return _tokens(rows, ranks)
    names = {_sequence(row, ranks): [row] for row in sorted(guilty, key=lambda row: -row.size)}
    return _blamed(BlameLevel.RESPONSE, rows, names, ranks)


def _guilty_units(
    rows: Sequence[ResponseNorm],
    guilty: Sequence[ResponseNorm],
    key: Callable[[ResponseNorm], str | None],
    *,
    whole_batch: bool,
) -> dict[str, list[ResponseNorm]]:
    """Return units whose responses with a signal are mostly guilty, two at least; not a unit that holds everything."""
    units: dict[str, list[ResponseNorm]] = {}
    for row in rows:
        name = key(row)
        if name is not None:
            units.setdefault(name, []).append(row)
    if len(units) < 2 and not whole_batch:
        return {}

    def is_guilty(members: Sequence[ResponseNorm]) -> bool:
        signal = [row for row in members if row.pushed]
        bad = sum(row in guilty for row in signal)
        return bad >= 2 and bad >= MOST * len(signal)

    return {name: members for name, members in units.items() if is_guilty(members)}


def _prompts(members: Sequence[ResponseNorm], guilty: Sequence[ResponseNorm]) -> int:
    """Count the prompt groups of the guilty among ``members``; 0 if they are not known."""
    return len({row.group for row in members if row in guilty and row.group is not None})


def _blamed(
    level: BlameLevel, rows: Sequence[ResponseNorm], units: Mapping[str, Sequence[ResponseNorm]], ranks: int
) -> Blame:
    attributed = any(row.up or row.down for row in rows)
    if level is BlameLevel.BATCH:
        return Blame(level, [_unit(level, "all responses", rows)] if attributed else [], rows, "all responses alike")
    blamed = [row for members in units.values() for row in members]
    every = [_unit(level, _named(level, name, members, ranks), members) for name, members in units.items()]
    if not attributed:
        who = every[0].name if len(every) == 1 else f"{every[0].name} and {len(every) - 1} more"
        return Blame(level, (), blamed, f"{who} {'has' if len(every) == 1 else 'have'} the largest gradients")
    every.sort(key=lambda unit: -abs(unit.share))
    others = [row for row in rows if row not in blamed]
    first, more = every[0], len(every) - 1
    share = sum(unit.share for unit in every)
    who = first.name if not more else f"{first.name} and {more} more"
    text = f"{who} {'make' if more else 'makes'} {percent(share)} of the gradient norm" + _cancelling(every)
    if level is BlameLevel.RESPONSE and not more:
        text += f", no single token more than {percent(max(row.top for row in blamed))}"
    listed = every[:MOST_UNITS]
    rest = [row for unit in every[MOST_UNITS:] for row in units.get(unit.name, ())]
    return Blame(level, [*listed, _unit(level, "all others", [*rest, *others])], blamed, text)


def _named(level: BlameLevel, name: str, members: Sequence[ResponseNorm], ranks: int) -> str:
    if level is BlameLevel.TASK:
        return f"the task {name}"
    if level is BlameLevel.GROUP:
        numbers = sorted(row.sequence for row in members)
        where = f" of rank {members[0].rank}" if ranks > 1 and len({row.rank for row in members}) == 1 else ""
        return f"the prompt group of sequences {_listed(numbers)}{where}"
    return name


def _listed(numbers: Sequence[int]) -> str:
    """Format places as ``4 to 7``, or ``1, 4, 9 and 14``; of many the first."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    shown = [str(number) for number in numbers[:8]]
    if len(numbers) > 8:
        return f"{', '.join(shown)} and {len(numbers) - 8} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _sequence(row: ResponseNorm, ranks: int) -> str:
    return f"sequence {row.sequence}" + (f" of rank {row.rank}" if ranks > 1 else "")


def _unit(level: BlameLevel, name: str, rows: Sequence[ResponseNorm]) -> Unit:
    up, down = sum(row.up for row in rows), sum(row.down for row in rows)
    return Unit(level, name, up + down, up, down, sum(row.tokens for row in rows))


def _cancelling(units: Sequence[Unit]) -> str:
    """Describe the cancellation, if it is large enough to report."""
    up, down = sum(unit.up for unit in units), sum(unit.down for unit in units)
    return f" ({percent(up)} along it, {percent(-down)} against)" if -down > 0.1 * max(up, 1e-12) else ""


def _tokens(rows: Sequence[ResponseNorm], ranks: int) -> Blame:
    """Blame tokens or a stretch of them; nothing if there are no outliers."""
    with_some = sorted((row for row in rows if row.standing), key=lambda row: -row.stood)
    if not with_some:
        return Blame(BlameLevel.BATCH, (), (), "no token, response or layer stands out")
    total = sum(row.stood for row in with_some)
    runs = [(row, run) for row in with_some for run in row.runs if run[2] >= FEW]
    if runs and sum(run[3] for _, run in runs) >= NEARLY * total:
        runs.sort(key=lambda one: -one[1][3])
        row, (first, last, _, _) = runs[0]
        more = f" and {len(runs) - 1} more stretches" if len(runs) > 1 else ""
        return Blame(BlameLevel.STRETCH, (), with_some, f"positions {first} to {last} of {_sequence(row, ranks)}{more}")
    return Blame(BlameLevel.TOKEN, (), with_some)
