"""Small-batch runs of TRL for the corpus: tasks, the order of their problems, starts, sparse and resumed logs."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def tasks():
    if BENCHMARKS not in sys.path:
        sys.path.append(BENCHMARKS)
    from forecast import trl_tasks

    return trl_tasks


@pytest.fixture(scope="module")
def jobs(tasks):
    from forecast import trl_jobs

    return trl_jobs.jobs(300, 5, deck=trl_jobs.Deck.SMALL)


@pytest.mark.parametrize("task", ["arithmetic", "sorting", "copying", "reversing", "brackets", "lookup", "dialogue"])
def test_a_task_has_answers_of_bounded_length_that_its_tokenizer_can_say(tasks, task):
    """The hardest problems are longer than the easiest."""
    rng = random.Random(1)
    by_degree = [[tasks.TASKS[task](degree, rng) for _ in range(200)] for degree in tasks.DEGREES]

    assert {len(wanted) <= tasks.LONGEST[task] for some in by_degree for _, wanted in some} == {True}
    assert {c for some in by_degree for pair in some for c in "".join(pair)} <= {*"0123456789=", *tasks.SIGNS}
    lengths = [sum(len(prompt + wanted) for prompt, wanted in some) for some in by_degree]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("task", "prompt", "wanted"),
    [
        ("arithmetic", "47+8=", "55"),
        ("sorting", "3152=", "1235"),
        ("copying", "31=", "31"),
        ("reversing", "312=", "213"),
        ("brackets", "([()=", "])"),
        ("lookup", "a3c9?c=", "9"),
        ("dialogue", "a3;b4;a5;=", "b6;"),
    ],
)
def test_answers_follow_their_rule(tasks, task, prompt, wanted):
    """Told by a rule of its own for each."""

    def right(asked):
        text = asked.rstrip("=")
        if task == "arithmetic":
            return str(sum(map(int, text.split("+"))))
        if task == "brackets":
            while any(pair in text for pair in ("()", "[]", "{}")):
                for pair in ("()", "[]", "{}"):
                    text = text.replace(pair, "")
            return "".join({"(": ")", "[": "]", "{": "}"}[c] for c in reversed(text.lstrip(")]}")))
        if task == "lookup":
            pairs, key = text.split("?")
            return pairs[pairs.index(key) + 1]
        if task == "dialogue":
            return f"b{(int(text[-2]) + 1) % 10};"
        return {"sorting": "".join(sorted(text)), "copying": text, "reversing": text[::-1]}[task]

    assert right(prompt) == wanted
    rng = random.Random(2)
    for degree in tasks.DEGREES:
        for _ in range(50):
            asked, told = tasks.TASKS[task](degree, rng)
            assert told == (right(asked) or ";")


def nothing(_kind, _step):
    """No fault of the data."""
    return 0.0


def test_problems_come_again_an_epoch_later_where_the_data_return(tasks):
    """32 problems of 4 a batch: 8 batches an epoch."""
    data = tasks.Data(size=32, returns=True, sway=1.0, block=2)
    made = tasks.problems(data, 24, 4, 24, nothing, seed=3)

    assert made[:32] == made[32:64] == made[64:96]
    assert made[:4] != made[4:8]


def test_a_curriculum_turns_hard_at_its_step(tasks):
    """Sorting: the longer the harder."""
    data = tasks.Data(first=1.0, last=4.0, switch=21)
    made = tasks.problems(data, 40, 8, 40, nothing, seed=1)
    early, late = (sum(len(wanted) for _, wanted in part) / len(part) for part in (made[:160], made[160:]))

    assert early < 3.0
    assert late > 4.5


@pytest.mark.parametrize(("kind", "distinct", "possible"), [("narrow data", 1, True), ("hard data", 30, False)])
def test_a_fault_of_the_data_begins_at_its_step(tasks, kind, distinct, possible):
    """One problem for ever, or answers that nothing can be."""
    made = tasks.problems(tasks.Data(), 40, 4, 40, lambda k, s: float(k == kind and s >= 21), seed=1)

    assert len(set(made[:80])) > 30
    assert (len(set(made[80:])) <= distinct) is (distinct == 1)
    assert all(("?" not in wanted) is possible for _, wanted in made[80:])


def test_runs_are_as_people_make_them(jobs, tasks):
    """1 to 8 prompts of 4 to 16 answers, every task, loss and cadence, adapters; healthy and failing in proportion."""
    settings = [job.setting for job in jobs]

    assert {s.batch // s.generations for s in settings} == {1, 2, 4, 8}
    assert {s.generations for s in settings} == {4, 8, 16}
    assert {s.data.task for s in settings} == set(tasks.TASKS)
    assert {s.logging_steps for s in settings} == {1, 2, 5, 10, 20}
    assert {"grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo"} == {s.loss_type for s in settings}
    assert {bool(s.lora) for s in settings if not s.engine} == {True, False}
    assert not any(s.lora for s in settings if s.engine)
    assert min(s.steps for s in settings) >= 150
    assert 0.4 < sum(job.family == "healthy" for job in jobs) / len(jobs) < 0.65
    assert {job.family == "healthy" for job in jobs if job.setting.resumed} == {True, False}


def test_a_rate_warms_up_and_decays(jobs):
    """From nothing to the rate to a tenth of it."""
    setting = replace(jobs[0].setting, faults=(), lr=1e-3, warmup=10, decay="linear", steps=100)

    assert [setting.lr_at(step) for step in (1, 10, 100)] == pytest.approx([1e-4 * 0.991, 9.1e-4, 1e-4])


@pytest.fixture(scope="module")
def starts(tasks, tmp_path_factory):
    """With one start, taught briefly."""
    from forecast.trl_graded import graded_start

    folder = tmp_path_factory.mktemp("starts")
    graded_start("sorting", 0, 0.03, folder)
    return folder


@pytest.mark.torch
def test_prompts_of_many_lengths_are_sampled_as_each_would_be_alone(starts):
    """Log-probs of what was drawn are those of the policy on the prompt alone."""
    import torch
    from forecast.trl_start import sample
    from transformers import Qwen2ForCausalLM

    policy = Qwen2ForCausalLM.from_pretrained(starts / "sorting-0-0.03").eval()
    asked = [[7, 8, 9, 14], [5, 14], [4, 6, 8, 10, 12, 14]]
    drawn = sample(policy, asked, 5, torch.Generator().manual_seed(1))
    for prompt, ids, logps in zip(asked, drawn.ids, drawn.logps, strict=True):
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        alone = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert logps == pytest.approx(alone.tolist(), abs=1e-4)


@pytest.mark.torch
def test_a_sparse_log_of_a_resumed_run_has_the_trainers_own_rows(jobs, starts):
    """Adapters, a row every four steps; stopped after 9 and resumed from 6, it goes on to its end."""
    from forecast.trl_runs import train

    (job,) = [job for job in jobs if job.recipe == "small_resumed"][:1]
    data = replace(job.setting.data, task="sorting", enough=0.03)
    small = {"trainer": "grpo", "steps": 12, "batch": 8, "generations": 4, "logging_steps": 4, "resumed": (9, 6)}
    small |= {"lora": 4, "engine": "", "num_iterations": 1, "steps_per_generation": 1, "accumulation": 1, "longest": 6}
    columns, end = train(replace(job, setting=replace(job.setting, data=data, **small)), starts)

    assert end == "finished"
    assert columns["step"] == [4, 8, 12]
    assert all(0.0 <= value <= 1.0 for value in columns["truth/acc"])
    assert {"reward/mean", "optim/grad_norm", "len/mean", "loss/policy"} <= set(columns)
    assert not any(name.startswith("mismatch/") for name in columns)
