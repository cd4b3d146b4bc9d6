"""What verl's policies say, kept as text and measured; here without verl."""

import math
import threading

import pytest
import torch

from rlwatch.integrations.completions import KeepCompletions
from rlwatch.integrations.level import Level
from rlwatch.integrations.verl.batch import BatchSettings, StepBatch
from rlwatch.integrations.verl.driver import Texts
from rlwatch.integrations.verl.settings import VerlSettings

EVERY = KeepCompletions(every=2, rows=2)


class Letters:
    """Ids are letters; counts what it decodes, and refuses a second thread as Hugging Face tokenizers do."""

    decoded = 0

    def __init__(self):
        self.thread = None

    def __deepcopy__(self, memo):
        return Letters()

    def decode(self, ids, **_):
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident(), "already borrowed"
        Letters.decoded += 1
        return "".join(chr(96 + token) for token in ids)

    def encode(self, text, **_):
        return [ord(letter) - 96 for letter in text]


class Run:
    """Remembers the completions it is told of."""

    def __init__(self):
        self.kept = []

    def log_completions(self, batch):
        self.kept.append(batch)


def jagged(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(*, padding=(), tools=(), **changes):
    """Four responses of two prompts; ``tools``: rows whose first token a tool wrote."""
    said = [[8, 9], [8, 15], [1, 8, 1], [14, 15, 14, 5]]
    data = {
        "prompts": jagged([1], [1], [2, 2], [2, 2]),
        "responses": jagged(*said),
        "response_mask": jagged(*([1] * len(row) for row in said)),
        "loss_mask": jagged(*([0 if i in tools else 1] + [1] * (len(row) - 1) for i, row in enumerate(said))),
        "rm_scores": jagged(*([0.0] * (len(row) - 1) + [i / 4] for i, row in enumerate(said))),
        "uid": ["p", "p", "q", "q"],
        "data_source": ["greet", "greet", "exclaim", "exclaim"],
    }
    tags = [{"is_padding": row in padding} for row in range(4)]
    return StepBatch.of(["p_0_0", "p_1_0", "q_0_0", "q_1_0"], tags, {**data, **changes}, 1)


def texts_of(keep=None, level=Level.FULL):
    return Texts(VerlSettings(level, completions=keep), Letters())


def report(texts, given):
    """Of one batch, waited for."""
    texts.offer(Run(), 1, given, BatchSettings())
    return texts.take(wait=True)


def test_nothing_is_kept_unless_it_is_asked_for():
    """Neither are prompts fetched."""
    run, texts = Run(), texts_of(level=Level.TOKENS)

    texts.offer(run, 1, batch(), BatchSettings())

    assert run.kept == []
    assert texts.fields == ()
    assert texts.take() == {}


def test_the_best_and_the_worst_with_what_is_known_of_them():
    """Of four responses two are kept, without padding, and only those are decoded."""
    run, texts, Letters.decoded = Run(), texts_of(EVERY, Level.TOKENS), 0

    texts.offer(run, 1, batch(), BatchSettings())
    (kept,) = run.kept

    assert texts.fields == ("prompts", "extra_fields")
    assert kept.columns["prompt"] == ["a", "bb"]
    assert kept.columns["completion"] == ["hi", "none"]
    assert kept.columns["reward"].tolist() == [0.0, 0.75]
    assert kept.columns["length"].tolist() == [2, 4]
    assert kept.columns["group"].tolist() == [0, 1]
    assert kept.columns["task"] == ["greet", "exclaim"]
    assert Letters.decoded == 4


def test_a_sample_is_taken_every_so_many_steps():
    """Steps 1, 3 and 5 of five."""
    run, texts = Run(), texts_of(EVERY, Level.TOKENS)

    for step in range(1, 6):
        texts.offer(run, step, batch(), BatchSettings())

    assert [kept.step for kept in run.kept] == [1, 3, 5]


def test_rows_of_padding_are_not_kept():
    """verl fills a batch up to a multiple of its ranks."""
    run, texts = Run(), texts_of(KeepCompletions(), Level.TOKENS)

    texts.offer(run, 1, batch(padding=(1, 3)), BatchSettings())

    assert run.kept[0].columns["completion"] == ["hi", "aha"]
    assert run.kept[0].columns["prompt"] == ["a", "bb"]


def test_what_is_not_known_is_no_column():
    """No rewards, groups or tasks."""
    run, texts = Run(), texts_of(EVERY, Level.TOKENS)
    given = batch()
    del given.tokens["rm_scores"]
    given.named.clear()

    texts.offer(run, 1, given, BatchSettings())

    assert not {"reward", "advantage", "kl", "group", "task"} & set(run.kept[0].columns)


def test_advantage_kl_and_what_reward_functions_told_are_kept():
    """Of whole responses: means over their tokens; None is no number, and words are no reward."""
    run, texts = Run(), texts_of(KeepCompletions(), Level.TOKENS)
    lengths = [2, 2, 3, 4]
    told = [
        {"reward_extra_info": {"acc": i % 2 == 1, "format": None if i == 2 else 0.5, "pred": "x"}} for i in range(4)
    ]
    given = batch(
        extra_fields=told,
        advantages=jagged(*([i - 1.5] * n for i, n in enumerate(lengths))),
        old_log_probs=jagged(*([-1.0] * n for n in lengths)),
        ref_log_prob=jagged(*([-1.0 - i] * n for i, n in enumerate(lengths))),
    )

    texts.offer(run, 1, given, BatchSettings())
    columns = run.kept[0].columns

    assert columns["advantage"].tolist() == [-1.5, -0.5, 0.5, 1.5]
    assert columns["kl"] == pytest.approx([math.exp(-i) - 1 + i for i in range(4)])
    assert columns["reward/acc"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert columns["reward/format"][1] == 0.5
    assert math.isnan(columns["reward/format"][2])
    assert "reward/pred" not in columns
    assert columns["prompt_id"][0] == columns["prompt_id"][1] != columns["prompt_id"][2]


def test_text_is_measured_on_a_thread_of_its_own():
    """Each thread has a tokenizer: those of Hugging Face refuse to be shared. Ids survive the way through text."""
    texts = texts_of(EVERY)

    measured = report(texts, batch())
    texts.close()

    assert measured["text/retok_exact"] == 1.0
    assert {"text/zlib_ratio", "text/garbled"} & measured.keys()


def test_ids_of_a_tool_are_not_encoded_again():
    """Between turns no tokenizer would find the same error boundaries; the text itself is measured."""
    measured = report(texts_of(), batch(tools=(0, 1, 2, 3)))

    assert "text/retok_exact" not in measured
    assert "text/garbled" in measured


@pytest.mark.parametrize("rows", [0, 4])
def test_a_batch_of_padding_alone_has_no_text(rows):
    """Nor does one whose probe is closed."""
    run, texts = Run(), texts_of(EVERY)
    if rows:
        texts.close()

    texts.offer(run, 1, batch(padding=range(4 - rows)), BatchSettings())

    assert len(run.kept) == (1 if rows else 0)
    assert texts.take(wait=True) == {}
