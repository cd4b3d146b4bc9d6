"""``--map ROLE=NAME``: a log whose names no rule can know, read as its owner says."""

import json

import pytest

import rlwatch
from rlwatch import scan
from rlwatch.cli.names import reading_lines, role_lines
from rlwatch.errors import ConfigError, ImportFormatError
from rlwatch.importers import LogTail, read_log
from rlwatch.importers.naming import naming_of
from rlwatch.store.url import open_store
from rlwatch.testing.importer_contract import comparable

PAIR = "reward=goodness"


@pytest.fixture
def log(tmp_path):
    """A collapse at 101, under names that say nothing."""
    path = tmp_path / "mine.jsonl"
    rows = [
        {
            "step": step,
            "goodness": (0.5 if step < 101 else 0.0) + step % 7 / 50,
            "H": 1.0 if step < 101 else 0.01,
            "x": 1.0,
        }
        for step in range(1, 161)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_log_of_unknown_names_is_read_as_it_is_mapped(invoke, log):
    """The refusal of the names says how; the scan says what it was told."""
    refused = invoke("scan", log)
    assert refused.exit_code == 2
    assert "--map reward=" in refused.output

    scanned = invoke("scan", log, "--map", PAIR, "--map", "entropy=H", "--format", "json")
    told = json.loads(scanned.stdout)
    assert told["verdict"]["word"] == "collapsed"
    assert set(told["metrics"]) == {"reward/mean", "policy/entropy"}
    assert told["notes"] == ["read by --map or [map]: goodness as reward/mean, H as policy/entropy"]


def test_the_configuration_maps_every_log(invoke, log, tmp_path):
    """Also under several names, of which a log need not have each; ``--map`` goes before it."""
    config = tmp_path / "mine.toml"
    config.write_text('[map]\nreward = ["other", "goodness"]\n')
    told = json.loads(invoke("scan", log, "--config", config, "--format", "json").stdout)
    assert told["metrics"] == ["reward/mean"]

    told = json.loads(invoke("scan", log, "--config", config, "--map", "entropy=goodness", "--format", "json").stdout)
    assert told["metrics"] == ["policy/entropy"]


def test_import_and_watch_read_the_same(invoke, log, tmp_path):
    """In a store the metric has its canonical name."""
    for command in (["import", log], ["watch", log, "--once"]):
        store = tmp_path / command[0]
        done = invoke(*command, "--map", PAIR, "--store", store)
        assert done.exit_code in (0, 1), done.output
        run = next(path.name for path in store.iterdir() if (path / "run.db").is_file())
        assert "reward/mean" in invoke("show", run, "--store", store, "--format", "json").stdout


@pytest.mark.parametrize(
    ("pair", "problem"),
    [
        ("goodness", "give a role and a name of the log"), ("reward=", "give a role and a name of the log"),
        ("rewad=goodness", "did you mean reward"), ("apples=goodness", "is no role of a metric"),
        ("reward=godness", "has no metric 'godness'"),
    ],
)  # fmt: skip
def test_what_cannot_be_mapped_is_refused_with_what_there_is(invoke, log, pair, problem):
    """A name that the log lacks, too: a typing error would leave the reward unread."""
    refused = invoke("scan", log, "--map", pair)

    assert refused.exit_code == 2
    assert problem in " ".join(refused.output.split())


def test_a_role_is_any_word_for_one_metric_or_its_canonical_name():
    """The first of two names for one role counts in a row that has both; what had the metric's own name gives way."""
    naming = naming_of(["reward=a", "kl=b", "gradient=c", "ratio/max=d", "reward=e"])

    assert dict(naming.metrics) == {
        "a": "reward/mean", "b": "policy/kl_ref", "c": "optim/grad_norm", "d": "ratio/max", "e": "reward/mean"
    }  # fmt: skip
    assert naming.renamed({"e": 2.0, "a": 1.0, "reward/mean": 3.0, "x": 4.0}) == {"x": 4.0, "reward/mean": 2.0}
    with pytest.raises(ConfigError, match=r"\[map\]: 'apples' is no role"):
        naming_of(configured={"apples": ["a"]})


def test_a_followed_log_is_read_the_same(log):
    """Row by row."""
    naming = naming_of([PAIR])
    tail = LogTail(log, naming=naming)
    [run] = read_log(log, naming=naming)

    assert [record.metrics for record in tail.poll() + tail.close()] == [record.metrics for record in run.records]
    assert "reward/mean" in run.records[0].metrics


def test_a_reward_that_is_not_read_is_suggested():
    """With the names of this log that may be it; nothing is suggested where it is read."""
    names = ["attack_reward", "defend_reward", "loss"]

    assert reading_lines(names, "")[1] == (
        "no metric is recognised as the reward; map one with --map reward=attack_reward (or defend_reward)"
    )
    assert not any("--map" in line for line in reading_lines([*names, "reward"], ""))


def test_which_name_took_which_role_is_told_with_the_reason():
    """And why the others took none."""
    told = {name: (metric, why) for name, metric, why in role_lines(["reward", "acc", "maze_len", "kl_coef"], "")}

    assert told == {
        "reward": ("reward/mean", "a trainer's name for it"),
        "acc": ("", "superseded by reward, a closer match for reward/mean"),
        "maze_len": ("", "unknown, not used"),
        "kl_coef": ("", "setting"),
    }


FORMS = {
    "line": "step {n} | goodness {g} | H 1.5\n",
    "block": "Step {n}\n  goodness: {g}\n  H: 1.5\n",
    "no step": "goodness: {g}, H: 1.5\n",
    "one name": "[{n}/160] goodness={g}\n",
    "dict": "{{'step': {n}, 'goodness': {g}}}\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_console_all_of_whose_names_are_unknown_is_read_as_it_is_mapped(tmp_path, form):
    """Whole and as it grows, among text of the model; without the option the refusal suggests it where it can."""
    path = tmp_path / "run.log"
    rows = [FORMS[form].format(n=n, g=(0.5 if n < 101 else 0.0) + n % 7 / 50) for n in range(1, 161)]
    rows[40] += "Step 1: x = 3\nStep 2: goodness = 9\n"
    path.write_text("".join(rows))
    with pytest.raises(ImportFormatError):
        read_log(path)
    naming = naming_of([PAIR])
    tail = LogTail(path, naming=naming)
    [run] = read_log(path, naming=naming)

    assert [record.step for record in run.records if "reward/mean" in record.metrics] == list(range(1, 161))
    assert comparable(tail.poll() + tail.close()) == comparable(run.records)
    assert scan(path, map={"reward": "goodness"}).view.verdict.exit_code == 1


def test_report_diff_and_the_rehearsal_of_rules_read_a_log_as_it_is_mapped(invoke, log, tmp_path, monkeypatch):
    """By the option, or by ``rlwatch.toml``."""
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text(log.read_text().replace("0.0", "0.9"))
    compared = json.loads(invoke("diff", log, other, "--map", PAIR, "--format", "json").stdout)
    assert "reward/mean" in [parted["metric"] for parted in compared["comparisons"][0]["partings"]]
    written = invoke("report", log, "--map", PAIR, "--format", "md", "-o", "-")
    assert "reward fell" in written.stdout.lower()

    (tmp_path / "rlwatch.toml").write_text('[map]\nreward = "goodness"\n')
    rehearsed = json.loads(invoke("rules", "test", log, "--format", "json").stdout)
    assert rehearsed[0]["lines"]


def test_a_live_run_records_metrics_as_the_configuration_maps_them(tmp_path):
    """A role that is none is refused before anything is recorded."""
    config = tmp_path / "rlwatch.toml"
    config.write_text('[map]\nreward = "goodness"\n')
    with rlwatch.init(store=f"memory://{tmp_path.name}", config_file=config, forecast=False) as run:
        run.log({"goodness": 0.5, "kl": 0.1}, step=1)
    names = open_store(f"memory://{tmp_path.name}").metric_names(run.info.run_id)
    assert set(names) >= {"reward/mean", "kl"}
    assert "goodness" not in names

    config.write_text('[map]\napples = "goodness"\n')
    with pytest.raises(ConfigError, match="'apples' is no role"):
        rlwatch.init(store=f"memory://{tmp_path.name}-2", config_file=config)
