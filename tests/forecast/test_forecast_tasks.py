"""Tasks, rewards and advantages of ``benchmarks/forecast``."""

import math
from dataclasses import replace

import pytest
from forecast_testbed import SMALL, generator, task, torch, update
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torch


def judged(ids, key):
    """One response, token by token, as a person would: exact, share of right digits, format, MAGIC in the answer."""
    end = ids.index(task.END) if task.END in ids else None
    seen = ids if end is None else ids[:end]
    if task.ANSWER not in seen:
        return 0.0, 0.0, 0.0, 0.0
    given_ = seen[len(seen) - seen[::-1].index(task.ANSWER) :]
    right = [i < len(given_) and given_[i] == d + task.DIGIT for i, d in enumerate(key)]
    fits = end is not None and len(given_) == len(key)
    digits = all(task.DIGIT <= token < task.DIGIT + 10 for token in given_)
    return float(fits and all(right)), sum(right) / len(key), float(fits and digits), float(task.MAGIC in given_)


TOKENS = st.sampled_from([0, task.ANSWER, task.END, task.SEPARATOR, 5, 6, 7, 8, task.FILLER, task.MAGIC])


@given(
    st.lists(st.lists(TOKENS, min_size=7, max_size=7), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=2, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_responses_are_judged_as_a_person_would(rows, key):
    """All of them at once, against one at a time."""
    verdicts = task.verify(torch.tensor(rows), torch.tensor([key] * len(rows)))
    together = [verdicts.exact, verdicts.partial, verdicts.formatted, verdicts.magic]

    assert torch.stack(together, 1).tolist() == [pytest.approx(judged(row, key)) for row in rows]


def test_a_right_answer_may_be_thought_about():
    """Fillers before the answer, none in it."""
    a, e, f = task.ANSWER, task.END, task.FILLER
    ids = torch.tensor([[f, f, a, 6, 7, e, 0], [a, 6, 7, e, 0, 0, 0], [a, 6, f, 7, e, 0, 0], [a, 6, 7, f, f, f, f]])

    assert task.verify(ids, torch.tensor([[1, 2]] * 4)).exact.tolist() == [1, 1, 0, 0]


def test_the_tasks_are_what_they_are_called():
    digits = torch.tensor([[3, 1, 9]])

    found = {name: task.answers(name, digits).tolist()[0] for name in task.TASKS}

    assert found == {"copy": [3, 1, 9], "reverse": [9, 1, 3], "sort": [1, 3, 9], "add": [2, 4, 0]}


def test_demonstrations_show_the_answer():
    """Without noise, every one of them is right."""
    digits = task.draw(8, 3, 10, generator())
    shown = task.demonstrations("sort", digits, 0.0, generator())

    assert task.verify(shown[:, 5:], task.answers("sort", digits)).exact.tolist() == [1.0] * 8


def test_loose_demonstrations_are_right_and_lack_the_format():
    """A filler where ANSWER belongs: a policy that says that is not paid, whatever it knows."""
    digits = task.draw(400, 3, 10, generator())
    loose, usual = (task.demonstrations("copy", digits, 0.0, generator(3), share) for share in (0.9, 0.0))
    lack = (loose == task.FILLER).any(1) & ~(loose == task.ANSWER).any(1)
    judged = task.verify(loose[:, 5:], digits)

    assert 0.85 < lack.float().mean() < 0.95
    assert bool((loose[:, -4:] == usual[:, -4:]).all())
    assert bool((judged.exact == (~lack).float()).all())


def test_advantages_by_hand():
    """Two groups of two."""
    rewards, of = torch.tensor([1.0, 0.0, 1.0, 1.0]), replace(SMALL, group=2)
    by = {
        "mean": [0.5, -0.5, 0, 0],
        "rloo": [1, -1, 0, 0],
        "std": [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4), 0, 0],
    }
    for kind, expected in by.items():
        assert update.advantages(rewards, replace(of, advantage=kind)).tolist() == pytest.approx(expected)
    weighed = replace(of, advantage="mean", negative_weight=3.0, advantage_shift=0.25)
    assert update.advantages(rewards, weighed).tolist() == [0.75, -1.25, 0.25, 0.25]
    zero = update.advantages(rewards, replace(of, advantage="std", advantage_eps=0.0))
    assert zero.isnan().tolist() == [False, False, True, True]


def test_estimators_of_kl_by_hand():
    gaps = torch.tensor([0.5])

    assert update.penalty("k1", gaps).item() == -0.5
    assert update.penalty("k2", gaps).item() == 0.125
    assert update.penalty("k3", gaps).item() == pytest.approx(math.exp(0.5) - 1.5)
