"""What is no log of a training: records of an evaluation, and of single responses, are never numbered and judged."""

import json

import pytest

from rlwatch.errors import ImportFormatError
from rlwatch.importers import LogTail, read_data, read_log
from rlwatch.importers.naming import naming_of
from rlwatch.importers.single_records import of_single

EPISODES = [{"episode_id": f"9f{number:04x}", "domain": "shop", "reward": number % 7 / 7} for number in range(60)]
ANSWERS = [{"question": f"How many are {number} and 2?", "correct": number % 3 == 0} for number in range(60)]
SCORES = [{"score": number % 5 / 5} for number in range(60)]
COMPLETIONS = [
    {"global_step": number, "prompt_idx": number % 9, "completion_preview": "so it is", "reward": 0.3}
    for number in range(1, 60)
]


@pytest.mark.parametrize(
    "document",
    [
        {"summary": {"mean_reward": 0.3}, "records": EPISODES}, EPISODES, {"results": [row | {"score": 0.5} for row in ANSWERS]}, SCORES, COMPLETIONS,
        [{"uuid": "a1", "score": 0.5, "response_length": 90}] * 9,
        [{"step": number, "reward": 0.5, "completion": "text of a response"} for number in range(9)],
    ],
)  # fmt: skip
def test_records_of_single_responses_are_refused(tmp_path, document):
    """With what they are, and what to give instead."""
    (tmp_path / "results.json").write_text(json.dumps(document))

    with pytest.raises(ImportFormatError, match=r"holds records .*; give the trainer's log, which has a row a step"):
        read_log(tmp_path / "results.json")


def test_lines_of_single_responses_are_left_out_with_a_count(tmp_path):
    """Beside rows of a training; a file of nothing else is refused."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in COMPLETIONS))
    with pytest.raises(ImportFormatError, match=r"59 x a record of a single response or episode"):
        read_log(log)

    rows = [{"step": step, "loss": 0.1, "reward": 0.5, "sample": "text"} for step in range(1, 9)]
    log.write_text("".join(json.dumps(row) + "\n" for row in (*rows, *COMPLETIONS)))
    [run] = read_log(log)
    assert (len(run.records), {skipped.reason: skipped.count for skipped in run.skipped}) == (
        8,
        {"'sample' is not a number": 8, "a record of a single response or episode, no row of a step": 59},
    )


def test_a_table_of_a_training_is_read_beside_the_samples_of_its_document(tmp_path):
    """The samples are named as left out."""
    history = [{"loss": 0.1, "reward": number / 10} for number in range(10)]
    (tmp_path / "out.json").write_text(json.dumps({"history": history, "samples": COMPLETIONS}))
    [run] = read_log(tmp_path / "out.json")

    assert [record.metrics["reward"] for record in run.records] == [number / 10 for number in range(10)]
    assert "'samples': records of single responses" in run.skipped[0].reason


@pytest.mark.parametrize(
    "rows",
    [
        [{"loss": 0.1, "reward": 0.5}] * 9,  # numbered, as before
        [{"mean_reward": 0.5, "reward_std": 0.1}] * 9,
        [{"step": number, "reward": 0.5} for number in range(9)],
        [{"step": number, "reward": 0.5, "run_id": "a", "date": "2026-01-01 10:00"} for number in range(9)],
        [{"step": number, "reward": 0.5, "kl": 0.1, "completion": "a sampled text"} for number in range(9)],
        [{"epoch": number, "reward": 0.5, "prompt_template": "r1 of deepseek"} for number in range(9)],
        {"reward": [0.1, 0.2, 0.3]},
    ],
)
def test_rows_of_a_training_are_read_whatever_stands_beside_them(rows):
    """A sampled text, settings, and times are no sign of a record."""
    [run] = read_data(rows)

    assert len(run.records) == len(rows if isinstance(rows, list) else rows["reward"])


def test_a_field_is_one_of_records_only_by_what_it_holds():
    """A length under the name of the text it is of; a flag under that of a text."""
    assert of_single({"response": 350.0, "reward": 0.5}) == ""
    assert of_single({"include_stop_str_in_output": True, "reward": 0.5}) == ""
    assert of_single({"sample_id": 7, "reward": 0.5}) == "sample_id"
    assert of_single({"rollout_id": 7, "reward": 0.5}) == ""
    assert of_single({"correct": True, "reward": 0.5}) == "correct"
    assert of_single({"correct": 0.7, "reward": 0.5}) == ""


def test_a_table_with_a_line_for_each_response_is_refused(tmp_path):
    """A number under a name of a text is no text, and a column of a loss makes it a training."""
    table = tmp_path / "samples.csv"
    lines = [f"{step},{step % 5},a sampled text,0.5" for step in range(1, 20)]
    table.write_text("\n".join(["step,prompt_idx,completion,reward", *lines]))
    with pytest.raises(ImportFormatError, match="19 x a record of a single response"):
        read_log(table)

    for header, line in (("step,response,reward", "{},350,0.5"), ("step,completion,reward,loss", "{},a text,0.5,0.1")):
        table.write_text("\n".join([header, *(line.format(step) for step in range(1, 20))]))
        [run] = read_log(table)
        assert len(run.records) == 19


def responses(**more):
    """Eight rows at each step, of rewards that differ."""
    return [{"step": step, "reward": (step * 7 + k * 3) % 11 / 11, **more} for step in range(1, 30) for k in range(8)]


GRADED = [{"step": number, "reward": float(number * 7 % 5 < 2), "response_length": number} for number in range(60)]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (responses(), "several rows at each step"), (responses(length=90.0), "several rows at each step"),
        (GRADED, "'reward' 0 or 1 in each row"),
    ],
)  # fmt: skip
def test_rows_of_single_responses_that_say_a_step_are_refused_whole_and_as_they_grow(tmp_path, rows, says):
    """Of a response a row, with neither text nor id; whoever knows better may say so."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))

    with pytest.raises(ImportFormatError, match=f"{says}.* single responses"):
        read_log(log)
    with pytest.raises(ImportFormatError, match=says):
        LogTail(log).poll()
    [run] = read_log(log, naming=naming_of(["reward=reward"]))
    assert "reward/mean" in run.records[0].metrics


@pytest.mark.parametrize(
    "rows",
    [
        responses(loss=0.1), responses(reward_std=0.1), [{"step": n, "reward": float(n < 40)} for n in range(80)],
        [{"step": n, "reward": 0.01 * n} for n in range(40) for _ in range(4)],
        [{"step": n, "reward": float(n * 7 % 5 < 2), "kl": 0.1} for n in range(60)],
    ],
)  # fmt: skip
def test_rows_that_may_be_of_a_training_are_not_refused(tmp_path, rows):
    """What only a training has, a reward that breaks once, rows that each rank wrote."""
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert len(read_log(tmp_path / "log.jsonl")[0].records) >= 40


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"Question {n}: score: 0.{n}, correct: {n % 2}\n" for n in range(1, 60)),
        json.dumps({"scores": [0.1, 0.5] * 30, "lengths": [90, 80] * 30}),
    ],
)
def test_scores_without_a_step_are_not_numbered(tmp_path, text):
    """On a console or in columns."""
    (tmp_path / "run.log").write_text(text)

    with pytest.raises(ImportFormatError, match=r"no known format|without a step"):
        read_log(tmp_path / "run.log")
