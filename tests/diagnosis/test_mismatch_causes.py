"""Causes of a mismatch: planted in tensors and measured as the taps do, named, or said not to be separable."""

import math

import pytest
import torch
from found import found

from rlwatch.diagnosis import TRACKED, KnobTracker, diagnose
from rlwatch.diagnosis.mismatch_causes import DIFFER, GAP_METRICS, GapTracker, MismatchCause, cause_of
from rlwatch.state import explained, headline_of, verdict_of
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.view import KnobRows, diagnosis_of

pytestmark = pytest.mark.torch
D = torch.float64
ROWS, ONSET, VOCABULARY = 48, 20, 40


def measured(trainer_of, engine_of, *, seed, entropy=True, staleness=None):
    """One row: 16 responses of up to 32 tokens, drawn from the engine's distribution and scored by both."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(16, 32, VOCABULARY, generator=g, dtype=D)  # noqa: E731
    logits = (1 + 4 * torch.rand(16, 32, 1, generator=g, dtype=D)) * normal()
    drift, noise = normal(), normal()
    trainer, engine = (f(logits, drift, noise).log_softmax(-1) for f in (trainer_of, engine_of))
    drawn = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=g).view(16, 32, 1)
    batch = TokenBatch(
        logp=trainer.gather(2, drawn).squeeze(2),
        mask=torch.arange(32) < torch.randint(8, 33, (16, 1), generator=g),
        entropy=-(trainer.exp() * trainer).sum(-1) if entropy else None,
        rollout_logp=engine.gather(2, drawn).squeeze(2),
        staleness=staleness,
    )
    settled = {name: stat.settle() for name, stat in observe(batch).items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def trainer(logits, drift, noise):
    return logits


def rounding(size, growth=0.0):
    """Noise of the logits, which may grow along the response by ``growth`` times its size."""
    along = 1 + growth * torch.arange(32, dtype=D).view(1, 32, 1) / 32
    return lambda logits, drift, noise: logits + size * along * noise


def cut(keep, size=0.002):
    def engine(logits, drift, noise):
        logp = (logits + size * noise).log_softmax(-1)
        return logp.masked_fill(~keep(logp), -math.inf)

    return engine


def top_k(k):
    return cut(lambda logp: logp >= logp.topk(k).values[..., -1:])


def min_p(share):
    return cut(lambda logp: logp.exp() >= share * logp.exp().amax(-1, keepdim=True))


def at(temperature, size=0.002):
    return lambda logits, drift, noise: (logits + size * noise) / temperature


def old(versions, step=0.02, size=0.002):
    return lambda logits, drift, noise: logits - versions * step * drift + size * noise


SOUND = rounding(0.002)


def run(engine_at, **more):
    """Rows of a run whose engine at each step is ``engine_at(step)``."""
    return [measured(trainer, engine_at(step), seed=step, **more) for step in range(ROWS)]


def from_onset(engine):
    return lambda step: engine if step >= ONSET else SOUND


def named(rows, *, onset=ONSET, step=1, also=None):
    """The first cause of a diagnosis in which the mismatch grew from ``onset``."""
    tracker = KnobTracker()
    for place, row in enumerate(rows):
        tracker.update(place * step, row | ({} if also is None else also(place)))
    names = set().union(*rows)
    return diagnose(
        [found("mismatch_growth", onset * step), found("reward_drop", (onset + 20) * step)],
        turns=tracker.turns,
        measured=names | set({} if also is None else also(0)),
        first_step=0,
        row_steps=step,
    ).causes[0]


@pytest.mark.parametrize(
    ("engine_at", "truth"),
    [
        pytest.param(from_onset(top_k(4)), MismatchCause.TRUNCATED, id="top-k"),
        pytest.param(from_onset(min_p(0.2)), MismatchCause.TRUNCATED, id="min-p"),
        pytest.param(lambda step: top_k(6), MismatchCause.TRUNCATED, id="top-k from the start"),
        pytest.param(from_onset(at(0.85)), MismatchCause.TEMPERATURE, id="sharper"),
        pytest.param(from_onset(at(1.3)), MismatchCause.TEMPERATURE, id="flatter"),
        pytest.param(lambda step: rounding(0.05), MismatchCause.PRECISION, id="rounding from the start"),
        pytest.param(from_onset(rounding(0.05, growth=4.0)), MismatchCause.ALONG, id="an error that adds up"),
        pytest.param(
            lambda step: old(max(0, step - ONSET + 1)), MismatchCause.STALE, id="weights that no longer arrive"
        ),
        pytest.param(lambda step: old(step % 6), MismatchCause.STALE, id="a sync every six steps"),
    ],
)
def test_a_planted_cause_is_named_with_its_numbers(engine_at, truth):
    """By the shape of the gap, or by what it does over the steps; the title and the first evidence say it."""
    cause = named(run(engine_at), onset=0 if engine_at(0) is not SOUND and truth is not MismatchCause.STALE else ONSET)

    assert cause.mismatch == truth
    assert cause.title == f"Train-inference mismatch: {truth.value}"
    assert any(row.text.startswith(truth.value) and any(c.isdigit() for c in row.text) for row in cause.evidence)


@pytest.mark.parametrize("temperature", [0.8, 1.3])
def test_a_temperature_is_named_without_an_entropy_too(temperature):
    """Then the sign of the slope is all there is: sharper or flatter."""
    cause = named(run(from_onset(at(temperature)), entropy=False))

    assert cause.mismatch == MismatchCause.TEMPERATURE
    assert ("flatter" if temperature > 1 else "sharper") in cause.why


def test_old_weights_and_rounding_that_begin_at_once_are_not_separable_unless_the_age_is_logged():
    """A noise on both sides from one row to the next: three old versions, or other kernels."""
    stale, rough = run(from_onset(old(3))), run(from_onset(rounding(0.05)))
    fresh = {"staleness/mean": 0.0}

    for rows in (stale, rough):
        cause = named(rows)
        assert cause.mismatch == "not separable"
        assert cause.title == "Train-inference mismatch"
        assert "log `staleness/mean`" in cause.why
    aged = named(stale, also=lambda step: {"staleness/mean": 3.0 * (step >= ONSET)})
    assert (aged.knob, aged.mismatch) == ("weight_sync", "")  # a knob that was seen to be turned is the better answer
    assert named(rough, also=lambda step: fresh).mismatch == MismatchCause.PRECISION


def test_comparing_the_weights_separates_old_ones_from_rounding():
    """What the shape cannot tell, equality can: it is logged at each sync."""
    stale, rough = run(from_onset(old(3))), run(from_onset(rounding(0.05)))

    unequal = named(stale, also=lambda step: {DIFFER: float(step >= ONSET)})
    equal = named(rough, also=lambda step: {DIFFER: 0.0})

    assert unequal.mismatch == MismatchCause.STALE
    assert any("100% of the engine's tensors differed" in row.text for row in unequal.evidence)
    assert equal.mismatch == MismatchCause.PRECISION
    assert any("weights were equal after each of 5 syncs" in row.text for row in equal.evidence)


def test_equal_weights_are_no_proof_where_samples_are_old():
    """The engine has the newest weights, and what is trained on was sampled before."""
    cause = named(run(from_onset(old(3))), also=lambda step: {DIFFER: 0.0, "staleness/mean": 3.0})

    assert cause.mismatch == "not separable"
    assert "settings of the engine" in cause.why


def test_ages_within_a_batch_name_old_weights_in_a_single_level():
    """The gap never changes from row to row, but within a batch it is that of the older responses."""
    ages = torch.arange(16) % 4

    def engine(logits, drift, noise):
        return logits - 0.02 * ages.view(16, 1, 1) * drift + 0.002 * noise

    cause = named(run(lambda step: engine, staleness=ages), onset=0)

    assert cause.mismatch == MismatchCause.STALE
    assert "nats a policy version" in cause.why


def test_a_gap_that_follows_the_logged_syncs_is_of_old_weights():
    """The trainer logs how long a sync took at the steps where there was one."""
    rows = run(lambda step: old(step % 5))

    cause = named(rows, also=lambda step: {"engine/weight_sync": 3.0} if step % 5 == 0 else {})

    assert cause.mismatch == MismatchCause.STALE
    assert "steps since the last weight sync" in cause.why


def test_an_exponential_growth_is_not_taken_for_weights_that_do_not_arrive():
    """A mismatch that feeds on itself grows by a factor a step."""
    rows = run(lambda step: rounding(0.004 * 1.15 ** max(0, step - ONSET)))

    assert named(rows).mismatch == "not separable"


def test_without_log_probs_of_tokens_it_is_said_that_they_would_be_needed():
    """A log of another trainer holds the mean difference and no more."""
    rows = [{"mismatch/logp_absdiff": 0.002 if step < ONSET else 0.2} for step in range(ROWS)]

    cause = named(rows)

    assert cause.mismatch == "not separable"
    assert "log-probs of single tokens" in cause.why


def test_a_small_gap_has_no_cause_and_no_segment():
    """The rounding of a bf16 sampler."""
    tracker = GapTracker()
    for step, row in enumerate(run(lambda step: SOUND)):
        tracker.update(step, row)

    assert tracker.turns == ()


def test_a_gap_without_a_finding_still_shows_its_cause_in_every_diagnosis():
    """Smaller than any alarm counts, live and stored alike; no cause of a failure, and nothing where a finding has it."""
    rows = [{"step": step, **row} for step, row in enumerate(run(lambda step: rounding(0.02)))]
    tracker = KnobTracker()
    for row in rows:
        tracker.update(row["step"], row)
    live = diagnose([], turns=tracker.turns)
    knobs = KnobRows({(1, row["step"]): row for row in rows})
    stored = diagnosis_of([], {1: range(ROWS)}, metrics=rows[0].keys(), knobs=knobs)
    other = diagnose([found("reward_drop", ONSET)], turns=tracker.turns, first_step=0)
    its_own = diagnose([found("mismatch_growth", ONSET)], turns=tracker.turns, first_step=0)

    assert live.gap.cause == stored.gap.cause == other.gap.cause == MismatchCause.PRECISION
    assert live.gap == stored.gap
    assert (live.causes, live.enough) == ((), False)
    assert live.summary == f"nothing was found; {live.gap.text}"
    assert "it shows precision" in live.to_dict()["gap"]["text"]
    assert its_own.gap is None


def test_what_is_known_later_changes_no_earlier_answer():
    """The tracker after n rows is what it was then: nothing looks ahead."""
    rows = run(from_onset(top_k(4)))
    whole, parts = GapTracker(), []
    for step, row in enumerate(rows):
        whole.update(step, row)
        parts.append(whole.turns)
    for until in (ONSET, ONSET + 3, ROWS - 1):
        again = GapTracker()
        for step, row in enumerate(rows[: until + 1]):
            again.update(step, row)
        assert again.turns == parts[until]


def test_a_coarse_log_is_judged_by_its_rows():
    """A row every ten steps."""
    assert named(run(from_onset(top_k(4))), step=10).mismatch == MismatchCause.TRUNCATED


def test_the_shape_of_a_lost_policy_does_not_overrule_that_of_the_onset():
    """Truncated sampling for twenty rows, then a gap of nats on both sides."""
    rows = run(lambda step: SOUND if step < ONSET else top_k(4) if step < ONSET + 20 else rounding(2.0, growth=5.0))

    assert named(rows).mismatch == MismatchCause.TRUNCATED


def test_rows_that_are_broken_or_absent_are_left_out():
    """NaN, infinities and rows of something else between those that are judged."""
    rows = run(from_onset(top_k(4)))
    odd = dict.fromkeys(GAP_METRICS, math.nan)
    mixed = [
        part for row in rows for part in (row, odd, {"reward/mean": 1.0}, {**row, "mismatch/above_share": math.inf})
    ]
    tracker = GapTracker()
    for step, row in enumerate(mixed):
        tracker.update(step, row)

    assert cause_of(tracker.turns, 4 * ONSET, 5).name == MismatchCause.TRUNCATED


def test_the_advice_for_a_named_cause_comes_first_after_undoing():
    """Check the sampling settings for truncated sampling, the weights for stale ones."""
    cut_first = [action.id for action in named(run(from_onset(top_k(4)))).actions]
    old_first = [action.id for action in named(run(lambda step: old(step % 6))).actions]

    assert cut_first[:3] == ["roll-back", "lower-lr", "lower-temperature"]
    assert old_first[:3] == ["roll-back", "lower-lr", "repair-sync"]
    assert len(set(cut_first)) == len(cut_first)


def test_the_rows_after_the_last_finding_still_tell_the_cause_and_none_after_the_step_asked_for():
    """A warning at the first tooth of a saw: its falls come later."""
    rows = run(lambda step: old((step - ONSET) % 4) if step > ONSET else SOUND)
    warned = [found("mismatch_growth", ONSET, delay=4)]
    logged = KnobRows({(1, step): row for step, row in enumerate(rows)})

    def cause(at=None):
        told = diagnosis_of(warned, {1: range(ROWS)}, metrics=rows[0], knobs=logged, at=at)
        return told.causes[0].mismatch

    assert cause() == MismatchCause.STALE
    assert cause(at=ONSET + 6) == "not separable"


def test_the_headline_says_the_cause_that_the_mismatch_has():
    """That there is a mismatch it says already."""
    rows = run(from_onset(top_k(4)))
    tracker = KnobTracker()
    for step, row in enumerate(rows):
        tracker.update(step, row)
    findings = [found("mismatch_growth", ONSET), found("reward_drop", ONSET + 20)]
    told = diagnose(findings, turns=tracker.turns, measured=set(rows[0]), first_step=0)

    verdict = verdict_of(findings, {1: range(ROWS)})

    assert "; cause: truncated sampling" in headline_of(verdict, explained(told, verdict))


def test_every_metric_it_reads_is_tracked():
    """Else a stored run would not give them."""
    assert GAP_METRICS <= TRACKED


def placed(place, seed, *, size, kept=1.0):
    """One row whose gap is ``size`` times larger at ``place``: at control tokens, or after tokens sent elsewhere.

    The engine samples from the share ``kept`` of the probability, and gives no token less than the trainer does.
    """
    g = torch.Generator().manual_seed(seed)
    logp = -2 * torch.rand(16, 32, generator=g, dtype=D) - 0.05
    ids = torch.randint(0, 20, (16, 32), generator=g)
    moved = torch.rand(16, 32, generator=g) < 0.15
    experts = torch.zeros(16, 32, 2, 1, dtype=torch.long)
    elsewhere = experts + moved[..., None, None]
    after = moved.roll(1, -1) if place == "router" else ids < 2
    noise = torch.randn(16, 32, generator=g, dtype=D) * (1 - logp.exp())
    noise = noise if kept == 1.0 else noise.abs()
    batch = TokenBatch(
        logp=logp,
        mask=torch.ones(16, 32, dtype=torch.bool),
        entropy=torch.rand(16, 32, generator=g, dtype=D),
        ids=ids,
        rollout_logp=logp - math.log(kept) + torch.where(after, size, 1.0) * 0.012 * noise,
        experts=experts,
        rollout_experts=elsewhere,
        control=(0, 1),
    )
    settled = {name: stat.settle() for name, stat in observe(batch).items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


@pytest.mark.parametrize(
    ("place", "truth", "words"),
    [
        ("template", MismatchCause.TEMPLATE, "at control tokens"),
        ("router", MismatchCause.ROUTER, "went to other experts"),
    ],
)
def test_a_gap_that_sits_at_template_tokens_or_follows_the_router_is_named_by_its_place(place, truth, words):
    """As it is where everything is rounded: as large there as elsewhere."""
    everywhere = [placed(place, seed, size=1.0) for seed in range(ONSET)]
    cause = named(everywhere + [placed(place, seed, size=15.0) for seed in range(ONSET, ROWS)])
    plain = named([placed(place, seed, size=1.0) for seed in range(ROWS)], onset=0)

    assert cause.mismatch == truth
    assert words in cause.why
    assert plain.mismatch not in (MismatchCause.TEMPLATE, MismatchCause.ROUTER)


def test_two_causes_at_once_are_both_named_where_each_has_a_shape_of_its_own():
    """The first one in the title, and the other in the reason; one alone has no second."""
    sound = [placed("template", seed, size=1.0) for seed in range(ONSET)]
    both = named(sound + [placed("template", seed, size=100.0, kept=0.95) for seed in range(ONSET, ROWS)])
    alone = named(sound + [placed("template", seed, size=15.0) for seed in range(ONSET, ROWS)])

    assert both.mismatch == MismatchCause.TEMPLATE
    assert "; truncated sampling, too: " in both.why
    assert ", too: " not in alone.why


def test_truncated_sampling_is_not_called_a_temperature_too():
    """It makes the distribution sharper, as a temperature does."""
    assert ", too: " not in named(run(from_onset(min_p(0.2)))).why
