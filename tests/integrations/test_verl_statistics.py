"""One global step put together of the batch and of all workers; here without verl or Ray."""

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlwatch.error_boundary import LIMIT, ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import encoded_batches
from rlwatch.integrations.step_tally import WAITING, StepTally, encoded_tally, merge_workers
from rlwatch.integrations.verl.batch import BatchSettings, StepBatch
from rlwatch.integrations.verl.driver import Fetched, Statistics
from rlwatch.integrations.verl.settings import VerlSettings
from rlwatch.integrations.verl.taps import EverMarked, gradient_stats, step_stats
from rlwatch.recorder.losses import Counters
from rlwatch.records import CULPRITS, DISTRIBUTIONS, LOCALISED, SpikeBatch
from rlwatch.tensors.gradnorm import grad_norms
from rlwatch.tensors.mergeable import Mean, merge
from rlwatch.tensors.tokens import TokenBatch


class Run:
    """Remembers what it is told."""

    def __init__(self):
        self.active, self.counters, self.logged, self.spikes, self.events = True, Counters(), [], [], []

    def log(self, metrics, step):
        self.logged.append((step, dict(metrics)))

    def log_spikes(self, batch):
        self.spikes.append(batch)

    def event(self, kind, step, **body):
        self.events.append((kind, step, body))


@pytest.fixture
def run():
    return Run()


@pytest.fixture
def stats(run):
    made = Statistics(ErrorBoundary(run), VerlSettings(Level.FULL))
    yield made
    made.close()


def tally_of(*values):
    tally = StepTally()
    tally.add_stats({"ratio/mean": Mean.of(torch.tensor(values), torch.ones(len(values)))})
    return tally


def update_on(rank, *values):
    return {"rank": rank, "parcel": encoded_tally(tally_of(*values), 5), "errors": 0}


def batch():
    rows = {
        name: torch.nested.as_nested_tensor([torch.tensor(row) for row in given], layout=torch.jagged)
        for name, given in {
            "responses": [[5, 2], [6, 7, 8]],
            "response_mask": [[1, 1], [1, 1, 1]],
            "old_log_probs": [[-1.0, -20.0], [-1.0, -1.0, -1.0]],
            "rm_scores": [[0.0, 1.0], [0.0, 0.0, 0.0]],
        }.items()
    }
    return StepBatch.of(["a_0_0", "a_1_0"], [{}, {}], rows, 5)


def test_ranks_merge_exactly(stats, run):
    """Ranks with different numbers of tokens: the mean of all tokens, not of the ranks' means."""
    stats.submit(5, None, lambda: [update_on(1, 4.0), update_on(0, 1.0, 1.0, 1.0)])
    stats.close()

    assert run.logged == [(5, {"ratio/mean": pytest.approx(7 / 4)})]


def test_batch_and_update_are_one_record(stats, run):
    """What the driver read of the batch, what the workers measured, and what never changes."""
    stats.numbers["policy/vocab_size"] = 16.0
    stats.submit(5, Fetched(batch), lambda: [update_on(0, 1.0)])
    stats.close()

    ((step, metrics),) = run.logged
    assert step == 5
    assert metrics["ratio/mean"] == 1.0
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["policy/vocab_size"] == 16.0


def test_log_probs_of_the_batch_are_those_before_the_update(stats, run):
    """Their non-finite ones are the old policy's."""
    stats.submit(5, Fetched(batch), None)
    stats.close()

    assert run.logged[0][1]["nonfinite/old_logp"] == 0
    assert "nonfinite/logp" not in run.logged[0][1]


def test_what_both_measure_is_the_drivers():
    """It sees each response once; the workers as often as they update on it."""
    workers = {0: encoded_tally(tally_of(9.0), 5)}

    assert merge_workers(5, tally_of(1.0), workers).metrics == {"ratio/mean": 1.0}


def test_extreme_tokens_of_batch_and_workers(stats, run):
    """Each in the columns its side measured, with the worker's rank; text only where it is wanted."""
    old = torch.full((1, 3), -3.0)
    worker = StepTally()
    worker.add_batch(TokenBatch(logp=old + torch.tensor([[0.0, 4.0, 0.0]]), mask=torch.ones(1, 3), old_logp=old))
    stats.decode = lambda ids: "".join(map(str, ids))
    stats.submit(5, Fetched(batch), lambda: [{"rank": 1, "parcel": encoded_tally(worker, 5), "errors": 0}])
    stats.close()

    by_rank = {found.rank: found.columns for found in run.spikes if found.reason != DISTRIBUTIONS}
    assert by_rank[0]["token_id"].tolist() == [2]
    assert by_rank[0]["text"] == ["2"]
    assert by_rank[1]["position"].tolist() == [1]
    assert "text" not in by_rank[1]


def test_localised_spikes_of_all_ranks_are_recorded_and_reported_once(stats, run):
    """Two optimizer steps of one global step; rank 1 has a culprit in the second, rank 0 tells of both."""
    culprit = SpikeBatch(5, {"position": np.array([3]), "cause": ["token ratio"]}, CULPRITS, rank=1)
    nothing = encoded_batches([])
    workers = [
        {"rank": 1, "errors": 0, "localised": [{"batches": nothing}, {"batches": encoded_batches([culprit])}]},
        {"rank": 0, "errors": 0, "localised": [{"batches": nothing, "event": {"norm": n}} for n in (7.0, 9.0)]},
    ]
    stats.submit(5, None, lambda: workers)
    stats.close()

    (found,) = run.spikes
    assert (found.step, found.rank, found.reason) == (5, 1, CULPRITS)
    assert (found.columns["position"].tolist(), found.columns["cause"]) == ([3], ["token ratio"])
    assert run.events == [(LOCALISED, 5, {"norm": 7.0}), (LOCALISED, 5, {"norm": 9.0})]


def test_what_the_budget_refused_is_counted(stats, run):
    """Workers tell how many so far."""
    for total in (2, 2, 5):
        stats.submit(5, None, lambda total=total: [{"rank": 0, "errors": 0, "localisations_refused": total}])
    stats.close()

    assert run.counters["localisations_refused"] == 5


def test_a_localised_spike_that_cannot_be_read_costs_nothing_else(stats, run):
    """A worker of another version."""
    stats.submit(5, None, lambda: [{**update_on(0, 1.0), "localised": [{"batches": b"?"}]}])
    stats.close()

    assert run.logged == [(5, {"ratio/mean": 1.0})]
    assert run.counters["errors"] == 1


def test_a_rank_that_repeats_another_sends_no_parcel(stats, run):
    """Sequence parallelism: several ranks see the same tokens, one tells."""
    stats.submit(5, None, lambda: [update_on(0, 1.0), {"rank": 1, "errors": 0}])
    stats.close()

    assert run.logged[0][1] == {"ratio/mean": 1.0}


def test_workers_that_cannot_answer_cost_their_statistics_only(stats, run, caplog):
    """The batch is recorded all the same, with one warning."""

    def silent():
        raise RLWatchError("the workers did not answer within 120 s")

    with caplog.at_level(logging.WARNING, "rlwatch"):
        for step in range(2):
            stats.submit(step, Fetched(batch), silent)
        stats.close()

    assert [step for step, _ in run.logged] == [0, 1]
    assert run.logged[0][1]["reward/mean"] == pytest.approx(0.5)
    assert caplog.text.count("could not read workers") == 1
    assert run.counters["errors"] == 2


@pytest.mark.parametrize("broken", [lambda: 1 / 0, lambda: SimpleNamespace(token_batch=lambda reading: 1 / 0)])
def test_a_batch_that_cannot_be_read_costs_its_statistics_only(stats, run, broken):
    """A bug of ours there does not lose the workers' half."""
    stats.submit(5, Fetched(broken), lambda: [update_on(0, 1.0)])
    stats.close()

    assert run.logged == [(5, {"ratio/mean": 1.0})]


def test_errors_swallowed_in_workers_are_counted_on_the_run(stats, run):
    """Each once: workers tell their totals."""
    for total in (2, 2, LIMIT):
        stats.submit(5, None, lambda total=total: [{"rank": 0, "errors": total}])
    stats.close()

    assert run.counters["errors"] == LIMIT


def test_a_step_too_many_goes_without(stats, run):
    """Statistics that take longer than training steps must not pile up batches in memory."""
    gate = threading.Event()
    for step in range(WAITING):
        assert stats.thread.room()
        stats.submit(step, None, lambda: gate.wait(10) and [])

    assert not stats.thread.room()
    assert run.counters["dropped"] == 1
    gate.set()


def test_nothing_is_computed_for_a_run_that_ended(stats, run):
    """Between ``finish`` and the end of training."""
    run.active = False

    assert not stats.thread.room()


def test_levels_below_full_leave_out_what_sorts(run):
    """``level=tokens`` on the driver too."""
    for level, there in ((Level.TOKENS, False), (Level.FULL, True)):
        made = Statistics(ErrorBoundary(run), VerlSettings(level))
        made.reading = BatchSettings()
        made.submit(5, Fetched(batch), None)
        made.close()
        assert ("text/repetition" in run.logged[-1][1] or "text/distinct_1" in run.logged[-1][1]) is there


def parameters(*grads):
    for i, grad in enumerate(grads):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor(grad)
        yield f"layers.{i}.weight", parameter


def read(stats):
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def test_of_several_optimizer_steps_the_last_is_reported_and_the_worst():
    """Norms: the last step's, and the largest. Not finite: in any of them."""
    nan = float("nan")
    first = grad_norms(parameters([30.0, 40.0], [nan, 0.0]))
    second = grad_norms(parameters([3.0, 4.0], [0.0, 0.0]))

    both = merge(
        {**gradient_stats(first, torch.tensor(nan), scaled=False), **step_stats(torch.tensor(nan))},
        {**gradient_stats(second, torch.tensor(5.0), scaled=False), **step_stats(torch.tensor(5.0))},
    )
    got = read(both)

    assert got["grad_layer/layers.0"] == 5.0
    assert got["nonfinite/grad"] == 1
    assert got["optim/grad_norm"] == 5.0
    assert got["optim/grad_norm_max"] != got["optim/grad_norm_max"]
    assert got["optim/step_skipped"] == 0.5


def test_scaled_gradients_are_reported_unscaled():
    """float16: verl's norm is without the scale; the layers keep their proportions."""
    norms = grad_norms(parameters([3.0 * 1024, 0.0], [0.0, 4.0 * 1024]))

    got = read(gradient_stats(norms, torch.tensor(5.0), scaled=True))

    assert got["grad_layer/layers.0"] == pytest.approx(3.0)
    assert got["grad_layer/layers.1"] == pytest.approx(4.0)


def test_marks_of_shards_meet_whatever_the_step():
    """One rank saw a NaN in the first optimizer step, another in the second: two parameters."""
    one = torch.tensor([1.0, 0.0, 0.0])
    other = torch.tensor([0.0, 0.0, 1.0])
    here = EverMarked.of(one, 3, 6).merge(EverMarked.of(torch.zeros(3), 3, 6))
    there = EverMarked.of(torch.zeros(3), 3, 6).merge(EverMarked.of(other, 3, 6))

    assert here.across(there).value() == 2
