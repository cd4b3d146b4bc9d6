"""What a loop passes of a micro-batch: the right answer, or the reason why there is none."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_loop import fresh_policy

import rlwatch
from rlwatch.integrations.torch.batch import BatchReader, LossSettings
from rlwatch.tensors.entropy import token_entropy
from rlwatch.tensors.observe import observe

pytestmark = pytest.mark.torch
LENGTHS = (4, 2, 1)
ROWS, WIDTH, VOCABULARY = len(LENGTHS), max(LENGTHS), 7


def read(**inputs):
    """(batch, refusals)."""
    reader = BatchReader(LossSettings(clip=(0.2, 0.28)))
    return reader.read(inputs), reader.refused


def mask():
    return torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


def tokens(seed, *, dtype=torch.float32):
    return -torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def everything():
    generator = torch.Generator().manual_seed(9)
    return {
        "logp": tokens(0),
        "mask": mask(),
        "entropy": -tokens(1),
        "old_logp": tokens(2),
        "ref_logp": tokens(3),
        "rollout_logp": tokens(4),
        "advantages": torch.randn(ROWS, generator=generator),
        "ids": torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator),
        "staleness": torch.tensor([0, 1, 2]),
        "environment": torch.zeros(ROWS, WIDTH, dtype=torch.bool),
    }


def numbers(batch):
    """What the batch measures, as floats; what was not measured is absent."""
    settled = {name: stat.settle() for name, stat in observe(batch).items()}
    return {name: float(stat.value()) for name, stat in settled.items() if float(stat.count) > 0}


def same_numbers(one, other, *, rel=1e-6):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert other[name] == pytest.approx(value, rel=rel, abs=1e-6, nan_ok=True), name


# --- what fits -----------------------------------------------------------------------------------


def test_everything_that_fits_is_taken_and_nothing_keeps_a_graph():
    """Detached, as they are, with the clip of the loss."""
    inputs = {**everything(), "logp": tokens(0).requires_grad_() * 1}
    batch, refused = read(**inputs)

    assert refused == {}
    assert batch.clip == (0.2, 0.28)
    for name, value in inputs.items():
        assert torch.equal(getattr(batch, name), value.detach()), name
        assert not getattr(batch, name).requires_grad


def test_logp_and_mask_are_enough():
    """All else is absent, never a stand-in."""
    batch, refused = read(logp=tokens(0), mask=mask())

    assert refused == {}
    assert {name for name in everything() if getattr(batch, name) is not None} == {"logp", "mask"}


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, WIDTH)])
def test_advantages_may_be_of_responses_or_of_tokens(shape):
    """Any of the shapes loops use."""
    batch, refused = read(logp=tokens(0), mask=mask(), advantages=torch.ones(shape))

    assert refused == {}
    assert batch.token_advantages.shape[0] == ROWS


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_a_mask_is_of_any_type(kind):
    """Bool, or 0 and 1."""
    batch, _ = read(logp=tokens(0), mask=mask().to(kind))

    same_numbers(numbers(read(logp=tokens(0), mask=mask())[0]), numbers(batch))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_measured_as_they_are(dtype):
    """Widened, not rounded further: equal to the same values given in float32."""
    inputs = {k: v.to(dtype) if torch.is_floating_point(v) else v for k, v in everything().items()}
    wide = {k: v.float() if torch.is_floating_point(v) else v for k, v in inputs.items()}

    batch, refused = read(**inputs)

    assert refused == {}
    same_numbers(numbers(read(**wide)[0]), numbers(batch), rel=1e-5)


def test_tensors_that_lie_otherwise_in_memory_are_the_same_numbers():
    """Transposed, strided and expanded."""
    inputs = everything()
    odd = {k: v.T.contiguous().T if v.dim() == 2 else v for k, v in inputs.items()}
    odd["old_logp"] = inputs["old_logp"].repeat_interleave(2, 1)[:, ::2]

    batch, refused = read(**odd)

    assert refused == {}
    assert not batch.logp.is_contiguous()
    same_numbers(numbers(read(**inputs)[0]), numbers(batch))


# --- rows of unequal length ------------------------------------------------------------------------


def rows_of(x):
    return [row[:n] for row, n in zip(x, LENGTHS, strict=True)]


def jagged(x):
    return torch.nested.nested_tensor(rows_of(x), layout=torch.jagged)


def strided(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(rows_of(x))


@pytest.mark.parametrize("make", [jagged, strided, rows_of], ids=["jagged", "strided", "list"])
def test_nested_tensors_and_lists_of_rows_measure_what_padded_ones_do(make):
    """Without a mask: all there is counts."""
    padded = everything()
    ragged = {k: make(v) if v.dim() == 2 else v for k, v in padded.items() if k != "mask"}

    batch, refused = read(**ragged)

    assert refused == {}
    same_numbers(numbers(read(**padded)[0]), numbers(batch))


def test_a_mask_beside_nested_rows_hides_more_but_shows_nothing_that_is_not_there():
    """Both decide."""
    on = mask()
    on[0, 0] = False
    batch, _ = read(logp=jagged(tokens(0)), mask=on)

    assert torch.equal(batch.mask, on)
    assert torch.equal(read(logp=rows_of(tokens(0)), mask=torch.ones(ROWS, WIDTH))[0].mask, mask())


def test_padded_and_nested_inputs_may_be_mixed():
    """Only the tokens count."""
    inputs = everything()
    mixed = {**inputs, "old_logp": jagged(inputs["old_logp"]), "ids": rows_of(inputs["ids"])}

    batch, refused = read(**mixed)

    assert refused == {}
    same_numbers(numbers(read(**inputs)[0]), numbers(batch))


def test_a_row_that_is_too_short_inside_the_mask_is_not_filled_up():
    """The missing log-prob is a NaN that is counted, not a 0."""
    short = rows_of(tokens(2))
    short[0] = short[0][:3]
    batch, refused = read(logp=tokens(0), mask=mask(), old_logp=short)

    assert refused == {"old_logp": "it has shape (3, 3) where logp has (3, 4)"}
    assert batch.old_logp is None
    again, _ = read(logp=tokens(0), mask=mask(), old_logp=[short[0], tokens(2)[1], short[2]])
    assert numbers(again)["nonfinite/old_logp"] == 1


def test_rows_of_other_lengths_are_other_rows():
    """Of the same width, so only the lengths tell."""
    batch, refused = read(logp=rows_of(tokens(0)), old_logp=rows_of(tokens(2))[::-1])

    assert refused == {"old_logp": "its rows have lengths (1, 2, 4) where those of logp have (4, 2, 1)"}
    assert batch.old_logp is None


# --- nothing to measure ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, WIDTH), (ROWS, 0), (0, 0)])
def test_a_batch_without_a_token_is_no_batch_and_no_mistake(shape):
    """No responses, or none longer than 0."""
    assert read(logp=torch.zeros(shape), mask=torch.zeros(shape)) == (None, {})
    assert read(logp=[torch.zeros(0)] * shape[0])[0] is None


def test_an_empty_mask_measures_nothing_and_fails_nowhere():
    """No token, no number: not even a 0."""
    inputs = {**everything(), "mask": torch.zeros(ROWS, WIDTH)}
    batch, refused = read(**inputs)
    measured = numbers(batch)

    assert refused == {}
    assert [name for name in measured if name.startswith(("policy/", "ratio/", "mismatch/", "text/"))] == []
    assert not any(math.isnan(value) for value in measured.values())


def test_rows_that_are_masked_as_a_whole_do_not_count():
    """The same numbers as without them, but for what is said of responses."""
    inputs = everything()
    on = inputs["mask"].clone()
    on[1] = False
    some = [0, 2]

    hidden = numbers(read(**{**inputs, "mask": on})[0])
    without = numbers(read(**{k: v[some] for k, v in inputs.items()})[0])

    tokenwise = {name for name in without if name.startswith(("policy/", "ratio/", "mismatch/"))}
    assert len(tokenwise) > 20
    same_numbers({n: without[n] for n in tokenwise}, {n: v for n, v in hidden.items() if n in tokenwise})


def test_padding_may_hold_anything():
    """NaN and infinities outside the mask change nothing."""
    inputs, spoilt = everything(), everything()
    for name in ("logp", "old_logp", "ref_logp", "rollout_logp", "entropy"):
        spoilt[name][~mask()] = math.nan if name != "entropy" else math.inf

    same_numbers(numbers(read(**inputs)[0]), numbers(read(**spoilt)[0]))


def test_what_is_not_a_number_inside_the_mask_shows():
    """NaN and -inf are counted, and no mean hides them."""
    inputs = everything()
    inputs["logp"][0, 0], inputs["logp"][0, 1] = math.nan, -math.inf
    measured = numbers(read(**inputs)[0])

    assert measured["nonfinite/logp"] == 2
    assert math.isnan(measured["policy/logp_mean"])


# --- what does not fit -------------------------------------------------------------------------------

TOO_WIDE = torch.zeros(ROWS, WIDTH + 1)
MISFITS = [
    ("old_logp", TOO_WIDE, "it has shape (3, 5) where logp has (3, 4)"),
    ("ref_logp", torch.zeros(ROWS + 1, WIDTH), "it has shape (4, 4) where logp has (3, 4)"),
    ("rollout_logp", torch.zeros(ROWS), "it has shape (3,) where logp has (3, 4)"),
    ("entropy", torch.zeros(ROWS, WIDTH, 2), "it has shape (3, 4, 2) where logp has (3, 4)"),
    ("advantages", torch.zeros(ROWS + 1), "it has shape (4,) where logp has (3, 4)"),
    ("ids", torch.zeros(ROWS, WIDTH), "it is of torch.float32 where whole numbers are needed"),
    ("staleness", torch.zeros(ROWS, WIDTH), "it has shape (3, 4) where (3,) is needed: one for each response"),
    (
        "experts",
        torch.zeros(ROWS, WIDTH, dtype=torch.int64),
        "it has shape (3, 4) where logp has (3, 4) and routing needs (B, T, layers, k)",
    ),
    ("environment", "yes", "it is no tensor and holds no rows of numbers: got 'yes'"),
    ("ref_logp", [["a"], ["b"], ["c"]], "it is no tensor and holds no rows of numbers: got ['a']"),
]


@pytest.mark.parametrize(("name", "value", "reason"), MISFITS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_left_out_alone(name, value, reason):
    """With its shape and the one it should have; the rest is measured as if it had not been passed."""
    inputs = {k: v for k, v in everything().items() if k != name}
    batch, refused = read(**inputs, **{name: value})

    assert refused == {name: reason}
    assert getattr(batch, name) is None
    same_numbers(numbers(read(**inputs)[0]), numbers(batch))


@pytest.mark.parametrize(
    ("inputs", "refused"),
    [
        ({"mask": mask()}, {"logp": "neither logp= nor logits= with ids= was given"}),
        ({"logp": tokens(0)}, {"mask": "it was not given: which of the tokens are not padding?"}),
        ({"logp": tokens(0), "mask": TOO_WIDE}, {"mask": "it has shape (3, 5) where logp has (3, 4)"}),
        (
            {"logp": tokens(0)[0], "mask": mask()},
            {
                "logp": "it has shape (4,) where (B, T) is needed; packed tokens: "
                "torch.nested.nested_tensor_from_jagged(logp, offsets=..., max_seqlen=...)"
            },
        ),
        (
            {"logp": torch.zeros(ROWS, WIDTH, dtype=torch.int64), "mask": mask()},
            {"logp": "it is of torch.int64, which holds no log-probs"},
        ),
        ({}, {"logp": "neither logp= nor logits= with ids= was given"}),
    ],
)
def test_without_log_probs_and_a_mask_nothing_can_be_read(inputs, refused):
    """Nobody guesses which tokens are padding."""
    assert read(**inputs) == (None, refused)


def test_a_sharded_tensor_is_refused_with_the_way_out():
    """A shard is not the batch."""

    class Sharded(torch.Tensor):
        def full_tensor(self):
            raise AssertionError("nobody gathers here")

    batch, refused = read(logp=tokens(0), mask=mask(), ref_logp=torch.zeros(ROWS, WIDTH).as_subclass(Sharded))

    assert batch.ref_logp is None
    assert refused["ref_logp"].startswith("it is a DTensor: pass what this rank holds")


def test_another_device_is_not_waited_for():
    """What lies on a device is not fetched to the CPU; what lies on the CPU may go to the device."""
    _, refused = read(logp=tokens(0), mask=mask(), old_logp=torch.zeros(ROWS, WIDTH, device="meta"))
    there, _ = read(logp=tokens(0).to("meta"), mask=mask(), old_logp=tokens(2))

    assert refused == {"old_logp": "it is on meta where logp is on the CPU"}
    assert there.old_logp.device == there.mask.device == torch.device("meta")


# --- logits ------------------------------------------------------------------------------------------


def logits(dtype=torch.float32):
    return torch.randn(ROWS, WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(5)).to(dtype)


def test_logits_give_entropy_and_log_probs():
    """Those of log_softmax."""
    inputs = everything()
    batch, refused = read(logits=logits(), ids=inputs["ids"], mask=mask())
    full = logits().log_softmax(-1)

    assert refused == {}
    assert torch.allclose(batch.logp, full.gather(-1, inputs["ids"][..., None])[..., 0], atol=1e-6)
    assert torch.allclose(batch.entropy, -(full.exp() * full).sum(-1), atol=1e-6)


def test_what_was_given_itself_is_not_computed():
    """Logits only fill in."""
    inputs = everything()
    batch, _ = read(**inputs, logits=logits())
    half, _ = read(logp=inputs["logp"], mask=mask(), logits=logits())

    assert torch.equal(batch.logp, inputs["logp"])
    assert torch.equal(batch.entropy, inputs["entropy"])
    assert torch.allclose(half.entropy, token_entropy(logits()))


def test_logits_are_divided_by_the_temperature():
    """Entropy is that of the distribution that was sampled from."""
    reader = BatchReader(LossSettings(temperature=2.0))
    batch = reader.read({"logp": tokens(0), "mask": mask(), "logits": logits()})

    assert torch.allclose(batch.entropy, token_entropy(logits() / 2.0), atol=1e-6)


@pytest.mark.parametrize("make", [jagged, strided, rows_of], ids=["jagged", "strided", "list"])
def test_logits_of_unequal_rows_are_not_padded_before_they_are_small(make):
    """The same numbers; the rows one by one, or all tokens at once."""
    ids = everything()["ids"]
    whole, _ = read(logits=logits(), ids=ids, mask=mask())
    batch, refused = read(logits=make(logits()), ids=make(ids))

    assert refused == {}
    same_numbers(numbers(whole), numbers(batch), rel=1e-5)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (torch.zeros(ROWS, WIDTH + 1, dtype=torch.int64), "it has shape (3, 4, 7) where ids has (3, 5)"),
        ([[0]] * 4, "it has 3 rows where ids has 4"),
    ],
)
def test_logits_that_do_not_go_with_the_ids_are_refused(ids, reason):
    """And with them the log-probs they were to give."""
    batch, refused = read(logits=logits(), ids=ids, mask=mask())

    assert batch is None
    assert refused["logits"].startswith(reason)
    assert "logp" in refused


@given(
    rows=st.integers(0, 4),
    width=st.integers(0, 5),
    seed=st.integers(0, 99),
    broken=st.sampled_from(["none", "nan", "inf", "masked"]),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_no_batch_whatever_its_shape_makes_it_raise(rows, width, seed, broken, kind):
    """Any size, precision and emptiness: numbers or nothing, never an exception."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda: -torch.rand(rows, width, generator=generator).to(kind)  # noqa: E731
    on = torch.rand(rows, width, generator=generator) < (0.0 if broken == "masked" else 0.7)
    logp = make()
    if broken in ("nan", "inf") and logp.numel():
        logp[0, 0] = math.nan if broken == "nan" else -math.inf
    batch, refused = read(
        logp=logp, mask=on, old_logp=make(), ref_logp=make(), rollout_logp=make(), entropy=-make(),
        advantages=torch.randn(rows, generator=generator), staleness=torch.zeros(rows),
        ids=torch.randint(0, 5, (rows, width), generator=generator),
    )  # fmt: skip

    assert refused == {}
    if batch is not None:
        measured = numbers(batch)
        assert measured.get("nonfinite/logp", 0) <= 1
        assert bool(on.any()) == ("policy/logp_mean" in measured)


def test_gradients_of_micro_batches_are_compared_where_the_loop_accumulates(tmp_path):
    """Cleared before or after; what an optimizer step left behind is no gradient of this step."""
    policy = fresh_policy()
    agreed = {}
    for cleared_late in (False, True):
        watcher = rlwatch.Watcher(policy, store=str(tmp_path / str(cleared_late)), name="loop")
        policy.zero_grad()
        for step in (1, 2):
            for part in range(3):
                ids = torch.randint(1, 8, (2, 5), generator=torch.Generator().manual_seed(part))
                logp = policy(ids).log_softmax(-1)[..., 0]
                watcher.observe(logp=logp, mask=torch.ones_like(logp))
                if cleared_late and part == 0:
                    policy.zero_grad()
                logp.mean().backward()
            watcher.gradients()
            if not cleared_late:
                policy.zero_grad()
            watcher.step(step, loss=0.1)
            agreed[cleared_late, step] = dict(watcher.latest)
        watcher.finish()
        agreed[cleared_late, 2] = dict(watcher.latest)

    assert 0 < agreed[False, 2]["optim/grad_agreement"] <= 1
    assert "optim/grad_agreement" not in agreed[True, 2]
