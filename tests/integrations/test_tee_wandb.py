"""Mirroring wandb: what is recorded, under which run, and that wandb never notices."""

import logging
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
import wandb
from wandb_offline import offline_runs

import rlwatch
from rlwatch.errors import ConfigError, MissingExtraError, StoreError
from rlwatch.integrations.wandb import run_id
from rlwatch.records import ORIGIN

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """wandb says nothing, and no identity comes from outside."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("RLWATCH_RUN_ID", raising=False)
    yield
    wandb.finish()


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "runs")


@pytest.fixture
def tee(store):
    """Begins a mirror that ends with the test."""
    begun = []

    def begin(**kwargs):
        begun.append(rlwatch.tee_wandb(**{"store": store, **kwargs}))
        return begun[-1]

    yield begin
    for one in begun:
        one.untee()


@pytest.fixture
def recorded(store):
    """Of a run: step -> what was recorded at it, its records merged."""

    def read(run):
        steps = {}
        assert run.flush()
        for record in rlwatch.open_store(store).records(run.info.run_id):
            steps.setdefault(record.step, {}).update(record.metrics)
        return steps

    return read


def said(caplog):
    """What rlwatch said."""
    return [record.getMessage() for record in caplog.records if record.name == "rlwatch"]


def disabled(**kwargs):
    """A wandb run that writes nothing."""
    return wandb.init(mode="disabled", **kwargs)


@pytest.mark.parametrize("first", ["tee", "init"])
def test_rows_are_recorded_whether_the_mirror_or_the_run_comes_first(tee, first, recorded):
    """Through wandb.log and run.log alike."""
    if first == "tee":
        mirror, theirs = tee(), disabled()
    else:
        theirs, mirror = disabled(), tee()
    wandb.log({"loss": 1.0})
    theirs.log({"loss": 2.0})

    assert recorded(mirror.run) == {0: {"loss": 1.0}, 1: {"loss": 2.0}}


def test_a_row_in_parts_is_one_step(tee, recorded):
    """commit=False parts belong to the row that is committed after them."""
    mirror = tee()
    disabled()
    wandb.log({"a": 1}, commit=False)
    wandb.log({"b": 2}, commit=False)
    wandb.log({"c": 3})
    wandb.log({"d": 4})

    assert recorded(mirror.run) == {0: {"a": 1, "b": 2, "c": 3}, 1: {"d": 4}}


def test_parts_follow_the_axis_of_the_part_that_holds_it(tee, recorded):
    """Also those logged before it, as wandb puts them into one row."""
    mirror = tee()
    disabled()
    for step in (10, 20):
        wandb.log({"kl": step / 100}, commit=False)
        wandb.log({"train/loss": 1.0, "train/global_step": step})

    assert recorded(mirror.run) == {
        10: {"kl": 0.1, "train/loss": 1.0, "train/global_step": 10},
        20: {"kl": 0.2, "train/loss": 1.0, "train/global_step": 20},
    }


def test_a_part_no_row_follows_is_recorded_when_the_run_ends(tee, recorded):
    """Nothing logged is lost."""
    mirror = tee()
    disabled()
    wandb.log({"a": 1})
    wandb.log({"b": 2}, commit=False)
    wandb.finish()

    assert recorded(mirror.run) == {0: {"a": 1}, 1: {"b": 2}}


def test_a_tensor_in_a_part_is_kept_as_it_was(tee, recorded):
    """Overwritten before its row is committed."""
    mirror, loss = tee(), torch.tensor(1.0)
    disabled()
    wandb.log({"loss": loss}, commit=False)
    loss.fill_(5.0)
    wandb.log({"x": 0})

    assert recorded(mirror.run)[0]["loss"] == 1.0


def test_the_global_step_of_huggingface_is_the_step_and_its_none_is_nan(tee, recorded):
    """TRL writes None where every value was NaN; a None elsewhere is no measurement."""
    mirror = tee()
    disabled()
    wandb.log({"note": None, "x": 1})
    wandb.log({"train/entropy": None, "train/loss": 0.5, "train/global_step": 3})
    steps = recorded(mirror.run)

    assert steps[0] == {"x": 1}
    assert steps[3]["train/loss"] == 0.5
    assert steps[3]["train/entropy"] != steps[3]["train/entropy"]


def test_declared_axes_are_heeded_before_and_after_the_run_begins_here(tee, recorded):
    """define_metric comes before the first row, which is what begins our run."""
    mirror = tee()
    disabled()
    wandb.define_metric("a/*", step_metric="a/step")
    wandb.log({"a/step": 5, "a/x": 1})
    wandb.define_metric("b/*", step_metric=wandb.define_metric("b/step"))

    assert list(recorded(mirror.run)) == [5]


def test_the_run_is_named_as_wandb_knows_it_without_secrets(tee):
    """Project, name, tags and configuration, also what was configured after the run began."""
    mirror = tee(tags=["mine"])
    theirs = disabled(project="math", name="seed3", config={"lr": 1e-6, "wandb_api_key": "k", "hub": {"token": "t"}})
    theirs.config.update({"beta": 0.1})
    wandb.log({"x": 1})
    info = mirror.run.info

    assert (info.project, info.name, info.tags) == ("math", "seed3", ("mine",))
    assert info.run_id == f"math-{theirs.id}"
    given = {name: value for name, value in info.config.items() if name != ORIGIN}
    assert given == {"lr": 1e-6, "wandb_api_key": "[redacted]", "hub": {"token": "[redacted]"}, "beta": 0.1}


def test_each_wandb_run_is_a_run_and_ends_with_it(tee, store):
    """Several in one process, one after the other and at once."""
    mirror = tee()
    with disabled(project="a") as first:
        first.log({"x": 1})
        second = disabled(project="b", reinit="create_new")
        second.log({"x": 2})
        first.log({"x": 3})
    second.finish(exit_code=2)
    store = rlwatch.open_store(store)
    runs = {run.project: run for run in store.runs()}

    assert [run.info.project for run in mirror.runs] == ["a", "b"]
    assert {p: (r.state, r.state_reason) for p, r in runs.items()} == {
        "a": ("finished", ""),
        "b": ("crashed", "wandb finished with exit code 2"),
    }
    assert [record.metrics["x"] for record in store.records(runs["a"].run_id)] == [1, 3]


def test_an_exception_that_leaves_the_run_is_how_it_ended(tee, store):
    """``with disabled() as run:``"""
    tee()

    def train():
        with disabled() as theirs:
            theirs.log({"x": 1})
            raise ZeroDivisionError("no such reward")

    with pytest.raises(ZeroDivisionError):
        train()
    (run,) = rlwatch.open_store(store).runs()

    assert (run.state, run.state_reason) == ("crashed", "ZeroDivisionError: no such reward")


def test_a_run_that_wandb_resumes_is_resumed(tee):
    """The same id in wandb is the same run here, in its next attempt."""
    mirror = tee()
    for _ in range(2):
        with disabled(project="p", id="x1") as theirs:
            theirs.log({"x": 1})

    assert [(run.info.run_id, run.info.attempt) for run in mirror.runs] == [("p-x1", 1), ("p-x1", 2)]


@pytest.mark.parametrize("given", ["argument", "variable"])
def test_an_identity_the_user_gives_is_that_of_the_first_run(tee, monkeypatch, given):
    """The next ones go by wandb's own."""
    if given == "variable":
        monkeypatch.setenv("RLWATCH_RUN_ID", "mine")
    mirror = tee(run_id="mine") if given == "argument" else tee()
    for name in ("x1", "x2"):
        with disabled(project="p", id=name) as theirs:
            theirs.log({"x": 1})

    assert [run.info.run_id for run in mirror.runs] == ["mine", "p-x2"]


def test_a_given_run_takes_every_row_and_is_left_open(tee, recorded, store):
    """Beside a watched trainer: the user's own rows join its run."""
    with rlwatch.init(store=store) as run:
        mirror = rlwatch.tee_wandb(run=run)
        for _ in range(2):
            with disabled() as theirs:
                theirs.log({"x": 1}, step=4)
        mirror.untee()

        assert run.active
        assert mirror.runs == [run]
        assert recorded(run) == {4: {"x": 1}}


def test_after_untee_wandb_is_as_it_was(tee, recorded):
    """Its functions are its own again, and nothing more is recorded."""
    before = wandb.Run.log, wandb.Run.finish, wandb.Run.define_metric, wandb.Run.__exit__
    mirror = tee()
    disabled()
    wandb.log({"x": 1})
    bound = wandb.log
    mirror.untee()
    bound({"x": 2})
    wandb.log({"x": 3})
    mirror.untee()

    assert before == (wandb.Run.log, wandb.Run.finish, wandb.Run.define_metric, wandb.Run.__exit__)
    assert recorded(mirror.run) == {0: {"x": 1}}
    assert not mirror.run.active


def test_leaving_the_context_stops_mirroring(recorded, store):
    """As untee does."""
    with rlwatch.tee_wandb(store=store) as mirror:
        disabled()
        wandb.log({"x": 1})
    wandb.log({"x": 2})

    assert recorded(mirror.run) == {0: {"x": 1}}


def test_what_wandb_refuses_is_raised_and_not_recorded(tee, recorded):
    """The user's error is the user's."""
    mirror = tee()
    disabled()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        wandb.log(3)
    wandb.log({"x": 1})

    assert list(recorded(mirror.run).values()) == [{"x": 1}]


def test_a_run_that_cannot_be_made_is_said_once_and_wandb_goes_on(tee, monkeypatch, caplog):
    """At the first row it is training already: nothing may be raised."""
    mirror = tee()
    monkeypatch.setattr("rlwatch.integrations.tee.init", lambda **kwargs: 1 / 0)
    theirs = disabled()
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        wandb.log({"x": 1})
        wandb.log({"x": 2})

    assert said(caplog) == [
        f"rlwatch does not record wandb run {theirs.id} (it goes on as without): ZeroDivisionError: division by zero"
    ]
    assert mirror.run is None
    assert dict(wandb.summary) == {"x": 2}


def test_an_error_of_rlwatch_never_reaches_the_loop(tee, monkeypatch, caplog):
    """It is counted on the run, said once, and the mirror switched off after some."""
    mirror = tee()
    disabled()
    wandb.log({"x": 0})
    monkeypatch.setattr("rlwatch.integrations.wandb.scalars", lambda *a, **k: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        for _ in range(6):
            wandb.log({"x": 1})

    assert mirror.run.counters["errors"] == 3
    assert len(said(caplog)) == 2
    assert dict(wandb.summary) == {"x": 1}


def test_rows_of_several_threads_are_all_recorded(tee, recorded):
    """Parts held back are recorded once each, whichever thread commits them."""
    mirror = tee()
    disabled()
    wandb.log({"begin": 1})

    def log(name):
        for i in range(100):
            wandb.log({f"{name}{i}": 1}, commit=i % 3 == 0)

    threads = [threading.Thread(target=log, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wandb.finish()
    names = [name for record in recorded(mirror.run).values() for name in record]

    assert sorted(names) == sorted(["begin", *(f"{n}{i}" for n in "abcd" for i in range(100))])


def test_a_forked_child_is_not_mirrored(tee, recorded):
    """The parent's run is not its to write, nor does it begin one of its own."""
    mirror = tee()
    disabled()
    child = os.fork()
    if child == 0:
        wandb.log({"x": 9})
        os._exit(0 if mirror.run is None else 1)
    _, status = os.waitpid(child, 0)
    wandb.log({"x": 1})

    assert status == 0
    assert recorded(mirror.run) == {0: {"x": 1}}


def test_wandb_is_mirrored_once(tee):
    """Twice would record every row twice."""
    tee()
    with pytest.raises(ConfigError, match="mirrored already; call untee"):
        tee()


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"projct": "x"}, ConfigError, "no argument 'projct'; those of rlwatch.init are: .*project"),
        ({"store": "nosuch://x"}, StoreError, "nosuch"),
        ({"webhook_url": "ftp://x"}, ConfigError, "webhook"),
        ({"run": object(), "project": "x"}, ConfigError, "run= and project="),
    ],
)
def test_wrong_settings_are_raised_at_once_and_change_nothing(tmp_path, kwargs, error, words, store):
    """Not at the first row."""
    before = wandb.Run.log
    with pytest.raises(error, match=words):
        rlwatch.tee_wandb(**{"store": str(tmp_path), **kwargs} if "run" not in kwargs else kwargs)

    assert wandb.Run.log is before


def test_a_wandb_without_the_functions_we_know_is_refused(monkeypatch):
    """One clear error with its version."""
    monkeypatch.delattr(wandb.Run, "log")
    with pytest.raises(ConfigError, match=r"does not know this wandb \(.*\): no Run.log"):
        rlwatch.tee_wandb()


def test_a_disabled_run_of_an_older_wandb_is_mirrored(tee, recorded):
    """Its functions are put on the instance, before or after the mirror begins."""

    def old():
        theirs, rows = begin(mode="disabled", id=f"old{len(made)}"), []
        theirs.log = lambda data, *_, **__: rows.append(data)
        theirs.finish = lambda *_, **__: None
        wandb.log = theirs.log
        made.append((theirs, rows))
        return theirs

    made, begin = [], wandb.init
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wandb, "init", old)
        wandb.init()
        mirror = tee()
        wandb.log({"x": 1})
        wandb.init().log({"x": 2})
        wandb.log({"x": 3}, step=7)
        made[0][0].finish()
        mirror.untee()

    assert [rows for _, rows in made] == [[{"x": 1}], [{"x": 2}, {"x": 3}]]
    assert [recorded(run) for run in mirror.runs] == [{0: {"x": 1}}, {0: {"x": 2}, 7: {"x": 3}}]


def test_without_wandb_the_message_says_what_to_install(monkeypatch):
    """The one import error a user can meet."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"tee_wandb\(\) needs the package 'wandb'.*rlwatch-monitor\[wandb\]"):
        rlwatch.tee_wandb()


def test_asking_for_the_name_imports_neither_wandb_nor_torch():
    """``import rlwatch`` and the function itself are light."""
    code = "import rlwatch, sys; rlwatch.tee_wandb; print([m for m in ('wandb', 'torch') if m in sys.modules])"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(("project", "theirs"), [("math", "a b"), (None, "x/y"), ("../up", "1"), ("ü", "z" * 200)])
def test_an_id_that_is_no_directory_name_gets_one_that_stays_its_own(project, theirs, store):
    """Cut and cleaned, with a checksum so that two ids stay two."""
    from rlwatch.store import check_run_id

    name = run_id(project, theirs)
    check_run_id(name)

    assert name == run_id(project, theirs)
    assert name != run_id(project, f"{theirs}!")


def offline(directory, **kwargs):
    """A wandb run that writes beneath ``directory`` and looks for no server."""
    directory.mkdir(exist_ok=True)
    return wandb.init(mode="offline", dir=str(directory), project="p", **kwargs)


def program(directory):
    """Some of everything a user logs; returns what each call returned."""
    returned = []
    with offline(directory, config={"lr": 1}) as theirs:
        theirs.define_metric("axis")
        for step in range(4):
            row = {"loss": step, "n": {"x": 1}, "h": wandb.Histogram([1, 2])}
            returned.append(wandb.log(row, commit=step % 2 == 0))
        returned.append(theirs.log({"late": 1}, step=9))
        returned.append(theirs.log({"t": "text", "y": 2.5}))
        returned.append(wandb.log({"old": 1}, step=2))
        returned.append(theirs.log(data={"by name": 1}, step=20, commit=True))
    return returned


def test_an_offline_run_holds_the_same_with_and_without(tee, tmp_path, recorded):
    """Its rows, its files and what every call returned; what wandb dropped as too old is kept here."""
    seen = []
    for name in ("plain", "mirrored"):
        mirror = tee() if name == "mirrored" else None
        returned = program(tmp_path / name)
        (run,) = offline_runs(tmp_path / name)
        seen.append((returned, run.plain, run.alerts, sorted(p.name for p in (tmp_path / name).rglob("*.*"))))
    files = [[re.sub(r"\w{8}(?=\.wandb)|\d{8}_\d{6}-\w{8}", "", f) for f in sorted(s[3])] for s in seen]

    assert seen[0][:3] == seen[1][:3]
    assert files[0] == files[1]
    assert [row["_step"] for row in seen[0][1]] == [0, 1, 2, 9, 20]
    assert recorded(mirror.run) == {
        0: {"loss": 0, "n.x": 1},
        1: {"loss": 2, "n.x": 1},
        2: {"loss": 3, "n.x": 1, "old": 1},
        9: {"late": 1, "y": 2.5},
        20: {"by name": 1},
    }


def test_our_steps_are_wandbs_own(tee, tmp_path, recorded):
    """Row for row, where nothing else says a step: read back from what wandb wrote."""
    mirror = tee()
    with offline(tmp_path) as theirs:
        for i in range(12):
            theirs.log({"i": i}, step=[None, 3 * i][i % 3 == 1], commit=[None, True][i % 2])
    (run,) = offline_runs(tmp_path)

    assert {row["_step"]: row["i"] for row in run.rows} == {s: row["i"] for s, row in recorded(mirror.run).items()}
