"""Nothing of ours reaches training: hostile values and calls, failures in every hook and thread of ours.

Two tables. Each hostile call is made on a live run, and what is logged after it must be stored; each failure is injected
into one small training, which must end bit for bit as it does unwatched. Every loss is counted.
"""

from __future__ import annotations

import ast
import logging
import os
import signal
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import rlwatch
from rlwatch.alerts.outbox import DeliveryThread
from rlwatch.clipping import LayerClip, LayerMaxNorm, LayerMedian, SkipOnSpike
from rlwatch.clipping.layer_clip import LayerLayout
from rlwatch.control.mailbox import Mailbox, PendingCommand
from rlwatch.error_boundary import LIMIT, ErrorBoundary, run_forever
from rlwatch.integrations.learning_rate import SCALE, StepScale
from rlwatch.integrations.localising import Localise
from rlwatch.integrations.openrlhf.driver import RLWatchLogger
from rlwatch.integrations.tee import Patches
from rlwatch.integrations.verl.attach import Backend
from rlwatch.monitor.watchman import WatchmanThread
from rlwatch.notify.registry import ConsoleNotifier
from rlwatch.records import Command, CompletionBatch, RunState, SpikeBatch
from rlwatch.store.url import open_store
from rlwatch.text import Sample, TextProbe

pytestmark = pytest.mark.torch


class BareError(Exception):
    """Of no family."""


class MuteError(Exception):
    """Whose text cannot be had."""

    def __str__(self):
        raise KeyError("no text")


ERRORS = {
    "KeyError": KeyError("k"),
    "OSError": OSError(28, "no space left on device"),
    "AssertionError": AssertionError(),
    "RecursionError": RecursionError("maximum recursion depth exceeded"),
    "MemoryError": MemoryError(),
    "BareError": BareError("x"),
    "MuteError": MuteError(),
}
METHODS = ("__getattr__", "__float__", "__index__", "__len__", "__iter__", "__repr__", "__bool__", "__eq__")
PROPERTIES = ("dtype", "device", "full_tensor", "__class__")


def hostile(method: str, error: BaseException, base: type = object) -> object:
    """An object one of whose methods or properties raises."""

    def raises(*_args, **_kwargs):
        raise error

    inside = {method: property(raises) if method in PROPERTIES else raises}
    if method == "__eq__":
        inside["__hash__"] = raises
    return type("Hostile", (base,), inside)()


class DotDict(dict):
    """As configurations have it: a missing attribute raises KeyError."""

    __getattr__ = dict.__getitem__


class Lazy(Mapping):
    """A mapping that computes its entries, and fails."""

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def __getitem__(self, name):
        return self._or_raise("__getitem__", 1.0)

    def __iter__(self):
        return iter(self._or_raise("__iter__", ["a"]))

    def __len__(self):
        return self._or_raise("__len__", 1)

    def keys(self):
        return self._or_raise("keys", ["a"])

    def _or_raise(self, place, value):
        if place == self.fails:
            raise OSError(place)
        return value


class Growing(UserDict):
    """Changes while it is read."""

    def __iter__(self):
        for name in self.data:
            self.data[f"{name}+"] = 1.0
            yield name


def freed():
    tensor = torch.tensor(1.0)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(depth: int) -> list:
    inner: list = []
    for _ in range(depth):
        inner = [inner, inner]
    return inner


def cycle() -> dict:
    circle: dict = {}
    circle["again"] = [circle, circle]
    return circle


class Recorded:
    """A run with its store; ``survives`` does something to it and looks whether it still records."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.run = rlwatch.init(store=store, sigterm=False)
        self.run.log({"good": 0.0}, step=0)  # at the first call, a step that is none is an error of the set-up
        self.step = 0

    def survives(self, call: Callable[[rlwatch.Run, int], object]) -> int:
        """Make the call and log something good at its step and after it; how much more is counted as lost."""
        self.step += 2
        before = self._lost()
        call(self.run, self.step)
        self.run.log({"good": float(self.step)}, step=self.step + 1)
        assert self.run.flush(60.0)
        stored = open_store(self.store).last_values(self.run.info.run_id)
        assert stored["good"] == (self.step + 1, float(self.step))
        return self._lost() - before

    def _lost(self) -> int:
        """What is not kept beside the database until it is stored is not lost."""
        return sum(count for name, count in self.run.counters.snapshot().items() if name != "unkept")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Iterator[Recorded]:
    made = Recorded(tmp_path_factory.mktemp("hostile") / "runs")
    yield made
    assert made.run.finish(deadline_s=60.0)


# ---------------------------------------------------------------- hostile values of run.log


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", [*METHODS, *PROPERTIES])
def test_a_hostile_value_costs_itself_only(recorded, method, error):
    """Whatever it raises when it is looked at: the values beside it are stored, and it is counted."""
    value = hostile(method, ERRORS[error])
    lost = recorded.survives(lambda run, step: run.log({"bad": value, "beside": 2.0}, step=step))

    assert lost == 1
    stored = open_store(recorded.store).last_values(recorded.run.info.run_id)
    assert stored["beside"] == (recorded.step, 2.0)
    assert "bad" not in stored


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_value_that_wants_to_exit_on_our_thread_costs_itself_only(recorded, error):
    """No signal reaches the writer thread, so it cannot be meant."""
    value = hostile("__float__", error)

    assert recorded.survives(lambda run, step: run.log({"bad": value, "beside": 2.0}, step=step)) == 1


VALUES = {
    "dotdict": (DotDict(lr=0.1), 1),
    "huge integer": (10**400, 1),
    "huge text": ("x" * 10**6, 1),
    "generator": ((x for x in [1.0]), 1),
    "type": (float, 1),
    "cyclic": (cycle(), 1),
    "exponential": (nested(60), 1),
    "meta tensor": (torch.ones((), device="meta"), 1),
    "sparse tensor": (torch.ones(2, 2).to_sparse(), 1),
    "complex tensor": (torch.tensor(1j), 1),
    "freed tensor": (freed(), 1),
    "nested tensor": (torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), 1),
    "quantized tensor": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), 1),
    "tensor with a graph": (torch.ones((), requires_grad=True) * 2, 0),
    "boolean tensor": (torch.tensor(True), 0),
    "surrogate text": ("\ud800", 1),
    "object array": (np.array([object()], dtype=object), 1),
    "dates": (np.datetime64("2024-01-01"), 1),
}


@pytest.mark.parametrize("name", VALUES)
def test_an_odd_value_costs_itself_only(recorded, name):
    """Lost or not, the record around it is stored and no other value is."""
    value, lost = VALUES[name]
    assert recorded.survives(lambda run, step: run.log({"odd": value, "beside": 3.0}, step=step)) == lost
    stored = open_store(recorded.store).last_values(recorded.run.info.run_id)
    assert stored["beside"] == (recorded.step, 3.0)


METRICS = {
    "None": None,
    "a number": 3,
    "a text": "abc",
    "pairs of nothing": [1, 2],
    "keys fail": Lazy("keys"),
    "entries fail": Lazy("__getitem__"),
    "iteration of a subclass fails": hostile("__iter__", KeyError("k"), UserDict),
    "grows": Growing({"a": 1.0, "b": 2.0}),
    "hostile": hostile("__getattr__", KeyError("k")),
    "a class": dict,
}


@pytest.mark.parametrize("name", METRICS)
def test_a_hostile_mapping_is_one_lost_record(recorded, name):
    """Counted once; training hears nothing."""
    assert recorded.survives(lambda run, step: run.log(METRICS[name], step=step)) == 1


STEPS = {
    "None": None,
    "text": "7",
    "float": 7.5,
    "negative": -1,
    "huge": 10**30,
    "beyond 64 bits": 2**63,
    "true": True,
    "nan": float("nan"),
    "tensor of two": torch.ones(2),
    "meta tensor": torch.ones((), dtype=torch.int64, device="meta"),
    "float tensor": torch.tensor(1.5),
    "index fails": hostile("__index__", OSError("gone")),
    "repr fails": hostile("__repr__", KeyError("k")),
    "everything fails": hostile("__getattr__", AssertionError()),
    "a mapping": {},
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("call", ["log", "event", "log_spikes", "log_completions"])
def test_a_strange_step_is_one_lost_record(recorded, call, name):
    """Whichever call it is given to. An event may be of no step."""
    step = STEPS[name]
    made = {
        "log": lambda run: run.log({"a": 1.0}, step=step),
        "event": lambda run: run.event("note", step, why="x"),
        "log_spikes": lambda run: run.log_spikes(SpikeBatch(step, {"logp": np.zeros(1)})),
        "log_completions": lambda run: run.log_completions(CompletionBatch(step, {"prompt": ["x"]})),
    }[call]
    lost = recorded.survives(lambda run, _: made(run))

    assert lost == (0 if call == "event" and step is None else 1)


@pytest.mark.parametrize("step", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=["int64", "uint8", "tensor"])
def test_a_step_that_counts_is_taken_whatever_it_is_made_of(recorded, step):
    """Nothing is lost."""
    assert recorded.survives(lambda run, _: run.log({"a": 1.0}, step=step)) == 0


class Name(str):
    """Whose text cannot be had."""

    __slots__ = ()

    def __str__(self):
        raise OSError("no name")


NAMES = {
    "None": (None, 0),
    "tuple": (("a", 1), 0),
    "surrogate": ("\udc80", 0),
    "a million characters": ("n" * 10**6, 0),
    "empty": ("", 0),
    "mute": (Name("x"), 1),
    "number": (3, 0),
    "null byte": ("a\0b", 0),
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("value", [1.0, torch.tensor(1.0)], ids=["float", "tensor"])
def test_a_strange_name_costs_nothing_else(recorded, kind, value):
    """What has a text is stored under it."""
    name, lost = NAMES[kind]
    counted = recorded.survives(lambda run, step: run.log({name: value, "beside": 4.0}, step=step))

    assert counted == lost
    stored = open_store(recorded.store).last_values(recorded.run.info.run_id)
    assert stored["beside"] == (recorded.step, 4.0)


# ---------------------------------------------------------------- hostile calls of the other methods

HATEFUL = [
    hostile(method, error) for method, error in zip([*METHODS, *PROPERTIES], 2 * list(ERRORS.values()), strict=False)
]
CALLS: dict[str, tuple[Callable[[rlwatch.Run, int], object], int]] = {
    "spikes of nothing": (lambda run, step: run.log_spikes(None), 1),
    "spikes of another kind": (lambda run, step: run.log_spikes(CompletionBatch(step, {})), 1),
    "spikes of hostile columns": (lambda run, step: run.log_spikes(SpikeBatch(step, {"logp": HATEFUL[3]})), 1),
    "spikes without columns": (lambda run, step: run.log_spikes(SpikeBatch(step, HATEFUL[0])), 1),
    "spikes of a hostile reason": (
        lambda run, step: run.log_spikes(SpikeBatch(step, {"a": np.ones(1)}, HATEFUL[5])),
        1,
    ),
    "completions of hostile text": (
        lambda run, step: run.log_completions(CompletionBatch(step, {"prompt": HATEFUL})),
        1,
    ),
    "completions of nothing": (lambda run, step: run.log_completions(3), 1),
    "an event of hostile values": (lambda run, step: run.event("note", step, a=HATEFUL, b={"c": HATEFUL}), 0),
    "an event of a dotdict": (lambda run, step: run.event("note", step, config=DotDict(a=DotDict())), 0),
    "an event that holds itself": (lambda run, step: run.event("note", step, a=cycle()), 0),
    "an event without end": (lambda run, step: run.event("note", step, a=nested(60)), 0),
    "an event of hostile keys": (lambda run, step: run.event("note", step, a={(1, 2): 3, None: 4}), 0),
    "an event of tensors": (
        lambda run, step: run.event("note", step, a=torch.ones(2), b=torch.ones((), device="meta")),
        0,
    ),
    "an event of surrogates": (lambda run, step: run.event("\udc80", step, **{"\udc80": "\udc80"}), 0),
    "an event of no kind": (lambda run, step: run.event(None, step), 0),
    "an event of a hostile kind": (lambda run, step: run.event(HATEFUL[5], step), 1),
    "a listener that is none": (lambda run, step: run.listen(3), 1),
    "a flush until nowhere": (lambda run, step: run.flush("soon"), 1),
    "a flush until never": (lambda run, step: run.flush(HATEFUL[0]), 1),
    "commands for hostile ranks": (lambda run, step: run.commands(for_all_ranks=HATEFUL[6]), 1),
    "health": (lambda run, step: run.health(), 0),
    "a call without a step": (lambda run, step: run.log({"a": 1.0}), 1),
    "a call with too much": (lambda run, step: run.log({"a": 1.0}, step, 3), 1),
    "a parcel that is none": (lambda run, step: run.send(HATEFUL[0]), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_hostile_call_loses_what_it_brought_and_nothing_else(recorded, name):
    """What cannot be kept is counted, once."""
    call, lost = CALLS[name]
    assert recorded.survives(call) == lost


def test_an_answer_of_a_loop_is_words_whatever_it_is():
    """So that the store can keep it, and the answers behind it."""
    given = [None, 3, b"x", "\udc80", "x" * 10**6, *HATEFUL]
    answers = []
    for answer in given:
        PendingCommand(Command("c", "r", "note"), answers.append).done(answer, step=answer)

    assert len(answers) == len(given)
    for answer in answers:
        assert type(answer.result) is str
        answer.result.encode()
        assert answer.step in (None, 3)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_run_ends_whatever_it_is_told_about_its_end(tmp_path, given):
    """A reason, a deadline or an error that cannot be had: it is finished, and says so."""
    run = rlwatch.init(store=tmp_path, sigterm=False)
    run.log({"a": 1.0}, step=1)
    if given == 2:
        run.__exit__(MuteError, MuteError(), None)
    else:
        assert run.finish("crashed", HATEFUL[5], deadline_s=[HATEFUL[0], float("nan")][given])

    stored = open_store(tmp_path).run(run.info.run_id)
    assert (stored.state, stored.last_step) == (RunState.CRASHED, 1)


# ---------------------------------------------------------------- where and when calls are made


def test_after_the_end_every_call_does_nothing(tmp_path):
    """Also hostile ones: nothing is recorded, nothing counted, nothing raised."""
    with rlwatch.init(store=tmp_path, sigterm=False) as run:
        run.log({"a": 1.0}, step=1)
    before = dict(run.counters.snapshot())
    for call, _ in CALLS.values():
        call(run, 2)
    for value in HATEFUL:
        run.log({"a": value}, step=value)

    after = {name: n for name, n in run.counters.snapshot().items() if name not in ("bad_records", "bad_calls")}
    assert after == before


def test_a_forked_child_may_call_what_it_likes(tmp_path):
    """It neither writes nor raises; what its parent records afterwards is stored."""
    run = rlwatch.init(store=tmp_path, sigterm=False)
    pid = os.fork()
    if pid == 0:
        try:
            for call, _ in CALLS.values():
                call(run, 5)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    run.log({"a": 2.0}, step=1)

    assert os.waitstatus_to_exitcode(status) == 0
    assert run.finish(deadline_s=60.0)
    assert open_store(tmp_path).series(run.info.run_id, ["a"])["a"].values.tolist() == [2.0]


def test_threads_log_side_by_side(recorded):
    """Good and hostile records; each bad one is counted, also when several threads count at once."""
    threads, each, raised = 4, 50, []

    def log(run, step):
        try:
            for _ in range(each):
                run.log({"bad": HATEFUL[1], "side": 1.0}, step=step)
                run.log(None, step=step)
        except BaseException as error:
            raised.append(error)

    def together(run, step):
        working = [threading.Thread(target=log, args=(run, step)) for _ in range(threads)]
        for thread in working:
            thread.start()
        for thread in working:
            thread.join()

    assert recorded.survives(together) == 2 * threads * each
    assert raised == []


def test_a_value_that_logs_when_it_is_read_does_no_harm(recorded):
    """Re-entrant, on the writer thread."""

    class Chatty:
        def __float__(self):
            recorded.run.log({"inner": 1.0}, step=recorded.step)
            return 5.0

    assert recorded.survives(lambda run, step: run.log({"outer": Chatty()}, step=step)) == 0


def test_a_handler_of_the_loops_own_log_may_fail(recorded):
    """What we say goes through handlers and filters of the process; their failures are not training's."""

    class Failing(logging.Handler):
        def emit(self, record):
            raise OSError("the log's disk is full")

    handler, logger = Failing(), logging.getLogger("rlwatch")
    logger.addHandler(handler)
    try:
        recorded.run.counters._warned.clear()
        assert recorded.survives(lambda run, step: run.log({"bad": HATEFUL[1], "b": 1.0}, step="x")) == 1
        assert ErrorBoundary(recorded.run).attempt("tap", explode, RuntimeError("x")) is None
    finally:
        logger.removeHandler(handler)


def test_at_the_end_of_the_stack_only_the_loop_itself_overflows(recorded):
    """A recursion of the loop's that logs at every depth ends where it ends without us."""
    run, reached = recorded.run, []

    def deeper(depth):
        try:
            run.log({"bad": HATEFUL[1]}, step=depth)
        except RecursionError as error:
            calls = [frame for frame in iter_frames(error) if frame != "deeper"]
            reached.append(calls)
        deeper(depth + 1)

    with pytest.raises(RecursionError):
        deeper(0)
    assert [calls for calls in reached if len(calls) > 1] == []
    recorded.survives(lambda *_: None)


def iter_frames(error):
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_name
        trace = trace.tb_next


class AlarmError(Exception):
    """What a time limit of the loop's own raises."""


@pytest.fixture
def alarmed():
    """A handler of SIGUSR1 that raises ``raises.error``."""
    raises = SimpleNamespace(error=AlarmError("time is up"))

    def handler(number, frame):
        raise raises.error

    before = signal.signal(signal.SIGUSR1, handler)
    yield raises
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [AlarmError("time is up"), TimeoutError(), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_signal_handler_raises_within_our_work_is_the_loops_own(recorded, alarmed, error):
    """A time limit, a preemption notice, Ctrl-C: the very object reaches the loop, from wherever we were."""
    alarmed.error = error

    class Signalling(Mapping):
        def __getitem__(self, name):
            return 1.0

        def __len__(self):
            return 1

        def __iter__(self):
            os.kill(os.getpid(), signal.SIGUSR1)
            return iter(["a"])

    with pytest.raises(type(error)) as raised:
        recorded.run.log(Signalling(), step=1)
    assert raised.value is error

    with pytest.raises(type(error)) as raised:
        ErrorBoundary(recorded.run).attempt("tap", os.kill, os.getpid(), signal.SIGUSR1)
    assert raised.value is error


def test_calls_within_a_signal_handler_record(recorded):
    """As a loop's own SIGTERM handler may: a note, a last record, also hostile ones."""

    def handler(number, frame):
        recorded.run.event("preempted", recorded.step)
        recorded.run.log({"bad": HATEFUL[2], "last": 1.0}, step=recorded.step)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert recorded.survives(lambda *_: os.kill(os.getpid(), signal.SIGUSR1)) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


# ---------------------------------------------------------------- hostile inputs of a watcher, of mirrors and callbacks

GOOD = {"logp": -torch.rand(2, 3), "mask": torch.ones(2, 3), "advantages": torch.tensor([1.0, -1.0])}
ODD_TENSORS = [torch.ones(2, 3, device="meta"), torch.ones(2, 3).to_sparse(), torch.ones(2, 3) * 1j, torch.ones(0)]
INPUTS: dict[str, Callable[[rlwatch.Watcher, object], object]] = {
    "observe logp": lambda watcher, bad: watcher.observe(logp=bad, mask=bad),
    "observe beside": lambda watcher, bad: watcher.observe(**GOOD, old_logp=bad, entropy=bad, ids=bad, experts=bad),
    "observe logits": lambda watcher, bad: watcher.observe(logits=bad, ids=bad, mask=bad),
    "rollouts": lambda watcher, bad: watcher.rollouts(rewards=bad, groups=bad, lengths=bad, answers=bad, tasks=bad),
    "rollouts beside": lambda watcher, bad: watcher.rollouts(rewards=[1.0, 0.0], groups=bad, ids=bad, completions=bad),
    "rollouts of rows": lambda watcher, bad: watcher.rollouts(
        rewards=[bad, bad], completions=[bad, bad], prompts=[bad]
    ),
    "step": lambda watcher, bad: watcher.step(bad, loss=bad, lr=bad, grad_norm=bad, mine=bad),
    "saved": lambda watcher, bad: watcher.saved(bad),
    "resumed": lambda watcher, bad: watcher.resumed(bad),
    "load_state_dict": lambda watcher, bad: watcher.load_state_dict(bad),
    "state of hostile parts": lambda watcher, bad: watcher.load_state_dict({"format": 1, "step": bad, "run_id": bad}),
}


@pytest.mark.parametrize("call", INPUTS.values(), ids=INPUTS)
def test_a_hostile_input_of_a_watcher_costs_itself_only(tmp_path, call):
    """The step is recorded with what was good, however often it happens."""
    run = rlwatch.init(store=tmp_path, sigterm=False)
    watcher = rlwatch.Watcher(nn.Linear(2, 2), run=run)
    steps = []
    for bad in [*HATEFUL, *ODD_TENSORS, None, "x", 3, [], {}, object(), 10**400, DotDict()]:
        call(watcher, bad)
        watcher.observe(**GOOD)
        steps.append(watcher.steps.last + 1)
        watcher.step(steps[-1], loss=0.5)
        watcher.obey()
    watcher.finish()

    assert run.finish(deadline_s=60.0)
    stored = open_store(tmp_path).series(run.info.run_id, ["policy/logp_mean", "loss/raw"])
    assert set(steps) <= set(stored["policy/logp_mean"].steps.tolist()) & set(stored["loss/raw"].steps.tolist())


ROW = {f"bad{i}": value for i, value in enumerate([*HATEFUL, DotDict(), cycle(), *ODD_TENSORS, freed()])}


def test_hostile_rows_of_other_trackers_lose_their_hostile_entries_only(tmp_path):
    """However many of them there are: verl's Tracking, OpenRLHF's logger, the log of a Trainer, wandb."""
    wandb = pytest.importorskip("wandb")
    from rlwatch.integrations.transformers.attach import RLWatchCallback

    run = rlwatch.init(store=tmp_path, sigterm=False)
    verl, openrlhf, trainer = Backend(run), RLWatchLogger(run), RLWatchCallback(run)
    with rlwatch.tee_wandb(run=run), wandb.init(mode="disabled") as theirs:
        for step in range(1, 6):
            verl.log({**ROW, "verl": 1.0}, step)
            openrlhf.log_train(step, {**ROW, "openrlhf": 1.0})
            trainer.on_log(None, SimpleNamespace(global_step=step), None, {**ROW, "trainer": 1.0})
            theirs.log({**ROW, "wandb": 1.0, "inside": {**ROW, "wandb": 2.0}}, step=step)
            verl.log(HATEFUL[0], HATEFUL[1])
            openrlhf.log_eval(HATEFUL[2], HATEFUL[3])

    assert run.finish(deadline_s=60.0)
    stored = open_store(tmp_path).last_values(run.info.run_id)
    for name, value in (("verl", 1.0), ("openrlhf", 1.0), ("trainer", 1.0), ("wandb", 1.0), ("inside.wandb", 2.0)):
        assert stored[name][1] == value, name
    assert stored["trainer"][0] == stored["wandb"][0] == 5


# ---------------------------------------------------------------- failures injected into a training


class Policy(nn.Module):
    """Next-token log-probs; dropout, so that a stray random number would show."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(7, 8), nn.Dropout(0.1), nn.Linear(8, 7)

    def forward(self, ids):
        logits = self.head(self.drop(self.embed(ids)).tanh())
        every = logits.log_softmax(-1)
        return every.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(every.exp() * every).sum(-1)


class Nobody:
    """Watches nothing."""

    def forward(self, compute, *args):
        return compute(*args)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def train(make_watcher=None, make_clip=None, prepare=None, steps=5):
    """Everything that training leaves behind, and the watcher."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    watcher = Nobody() if make_watcher is None else make_watcher(policy, optimizer)
    clip = None if make_clip is None else make_clip(policy)
    if prepare is not None:
        prepare(optimizer, watcher)
    for step in range(1, steps + 1):
        watcher.obey()
        ids, advantages = torch.randint(0, 7, (4, 6)), torch.randn(4)
        texts = ["some text"] * 4
        watcher.rollouts(rewards=advantages, groups=2, lengths=[6] * 4, completions=texts, prompts=texts, ids=ids)
        optimizer.zero_grad()
        for rows in torch.arange(4).chunk(2):
            logp, entropy = watcher.forward(policy, ids[rows])
            watcher.observe(
                logp=logp, entropy=entropy, ids=ids[rows], mask=torch.ones(2, 6), advantages=advantages[rows],
                old_logp=logp.detach() - 0.1,
            )  # fmt: skip
            loss = -(logp * advantages[rows, None]).mean() - 0.01 * entropy.mean()
            (loss * (1e4 if step == 3 else 1)).backward()
        watcher.gradients()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0) if clip is None else clip()
        optimizer.step()
        watcher.step(step, loss=loss)
    state = optimizer.state_dict()["state"]
    left = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    left |= {f"{i}.{name}": value for i, entry in state.items() for name, value in entry.items()}
    return {**left, "random": torch.get_rng_state()}, watcher


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def unwatched():
    return train()[0]


def explode(error, *_args, **_kwargs):
    raise error


def out_of_memory(*_args, **_kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def runtime(*_args, **_kwargs):
    raise RuntimeError("boom")


def bare(*_args, **_kwargs):
    raise BareError("boom")


def mute(*_args, **_kwargs):
    raise MuteError


def missing(*_args, **_kwargs):
    raise KeyError("boom")


TORCH, LOCAL = "rlwatch.integrations.torch", "rlwatch.integrations.localising"
INJECTED = {
    # hooks and what is called in the middle of training
    "the hook of the backward": ("rlwatch.gradloc.passes._Reader.__call__", out_of_memory),
    "the hook of the backward, bare": ("rlwatch.gradloc.passes._Reader.__call__", bare),
    "the state of the generators": (f"{TORCH}.attach.RandomState.now", runtime),
    "a forward kept": (f"{TORCH}.localise.LossPasses.ran", missing),
    "a loss pass kept": (f"{TORCH}.localise.LossPasses.observed", out_of_memory),
    "a loss pass added": ("rlwatch.gradloc.passes.RecordedPasses.add", mute),
    "loss passes forgotten": (f"{TORCH}.localise.LossPasses.forget", runtime),
    "a micro-batch read": (f"{TORCH}.batch.BatchReader.read", bare),
    "a micro-batch measured": ("rlwatch.integrations.step_tally.StepTally.add_batch", out_of_memory),
    "gradients read": (f"{TORCH}.taps.read_gradients", out_of_memory),
    "rollouts read": (f"{TORCH}.batch.GenerationReader.read", mute),
    "rollouts measured": (f"{TORCH}.taps.observe_responses", runtime),
    "completions sampled": ("rlwatch.integrations.completions.CompletionSampler.sample", missing),
    "text offered": ("rlwatch.text.TextProbe.offer", runtime),
    "text taken": ("rlwatch.text.TextProbe.take", bare),
    "the learning rate": (f"{TORCH}.commands.Means.rates", missing),
    "the loss": (f"{TORCH}.taps.nonfinite", out_of_memory),
    "the vocabulary": (f"{TORCH}.taps.vocab_size_of", runtime),
    "a step sealed": ("rlwatch.integrations.step_tally.StepTally.seal", out_of_memory),
    "a step copied": ("rlwatch.tensors.transfer.Transfer.__init__", out_of_memory),
    "a step read": ("rlwatch.tensors.transfer.Transfer.read", runtime),
    "a step delivered": ("rlwatch.integrations.step_tally.WholeStep.deliver", mute),
    "commands": (f"{TORCH}.commands.CommandController.obey", bare),
    "a record taken": ("rlwatch.run.run.admit", runtime),
    "an event taken": ("rlwatch.run.run.plain", mute),
    # the localisation of a spike, between the backward and the optimizer's step
    "a spike looked at": (f"{LOCAL}.Localiser.check", out_of_memory),
    "a spike located": (f"{LOCAL}.locate", out_of_memory),
    "tokens attributed": ("rlwatch.gradloc.locate.attribute", out_of_memory),
    "culprits verified": ("rlwatch.gradloc.locate.verify_worthwhile", bare),
    "weights displaced": ("rlwatch.gradloc.direction.Views.__getitem__", out_of_memory),
    "weights put back": ("rlwatch.gradloc.direction.reshard", runtime),
    "a spike recorded": (f"{LOCAL}.record_located", missing),
    "a step left out": ("rlwatch.clipping.skip.SkipOnSpike.decide", bare),
    # threads of ours
    "storing": ("rlwatch.recorder.writer.StoreSink.write", missing),
    "judging": ("rlwatch.monitor.engine.Monitor.observing", bare),
    "layers": ("rlwatch.layers.DerivedLayers.add", runtime),
    "the mailbox": ("rlwatch.control.mailbox.Mailbox.tick", bare),
    "announcing": ("rlwatch.run.alerting.OwnLog.__call__", missing),
    "text measured": ("rlwatch.text.text_report", lambda *_: explode(SystemExit(3))),
}
FINE = {"the hook of the backward", "a spike recorded"}


def watcher_for(tmp_path):
    def make(policy, optimizer):
        localise = Localise(threshold=1e-9, skip=SkipOnSpike(share=1.0))
        given = {"store": tmp_path, "sigterm": False, "localise": localise, "completions": True, "kl_coef": 0.1}
        return rlwatch.Watcher(policy, optimizer, **given)

    return make


def test_the_training_that_failures_are_injected_into_uses_every_part(tmp_path, monkeypatch, unwatched):
    """Each of the table's places is reached, so that nothing is survived by not happening."""
    reached = dict.fromkeys(INJECTED, 0)
    with monkeypatch.context() as patched:
        for name, (place, _) in INJECTED.items():
            owner, _, attribute = place.rpartition(".")
            found = resolved(owner)
            original = getattr(found, attribute)

            def counting(*args, _original=original, _name=name, **kwargs):
                reached[_name] += 1
                return _original(*args, **kwargs)

            static = isinstance(vars(found).get(attribute), staticmethod | classmethod)
            patched.setattr(found, attribute, staticmethod(counting) if static else counting)
        left, watcher = train(watcher_for(tmp_path), prepare=lambda _, watcher: watcher.run.event("note", 0, a=1))
        patched.setattr(watcher.collector.samples.probe, "_last", None)
        watcher.finish()

    assert {name for name, times in reached.items() if not times} <= NOT_ALWAYS
    assert same(left, unwatched)
    assert watcher.run.counters.snapshot() == {}


NOT_ALWAYS = {"announcing"}
"""Only where something is found."""


def resolved(path):
    import importlib

    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise LookupError(path)


@pytest.mark.parametrize(("place", "failure"), INJECTED.values(), ids=INJECTED)
def test_a_failure_of_rlwatch_leaves_training_bit_for_bit_as_it_is(tmp_path, monkeypatch, unwatched, place, failure):
    """Parameters, the optimizer's moments and the random state; and the failure is counted."""
    owner, _, attribute = place.rpartition(".")
    monkeypatch.setattr(resolved(owner), attribute, failure)
    left, watcher = train(watcher_for(tmp_path), prepare=lambda _, watcher: watcher.run.event("note", 0, a=1))
    watcher.finish()

    assert same(left, unwatched)
    assert watcher.run.counters.snapshot() or said_in_the_localisation(tmp_path, watcher) or place.endswith(UNSURE)


UNSURE = ("OwnLog.__call__", "text_report")
"""Not reached in a run without findings; or counted once the thread of the text has come so far."""


def said_in_the_localisation(store, watcher):
    """A model may refuse what is asked of it: the report of the step says so."""
    events = [event.body for event in open_store(store).events(watcher.run.info.run_id)]
    return any(word in str(body) for body in events for word in ("boom", "out of memory"))


def test_a_gradient_hook_that_fails_once_is_not_blamed_on_the_wrong_tokens(tmp_path, monkeypatch):
    """A step with a coefficient missing is not localised, and says so; the next one is."""
    from rlwatch.gradloc.passes import _Reader

    calls, original = [], _Reader.__call__

    def failing_once(self, gradient):
        calls.append(gradient)
        if len(calls) == 2:
            out_of_memory()
        original(self, gradient)

    monkeypatch.setattr(_Reader, "__call__", failing_once)
    _, watcher = train(watcher_for(tmp_path))
    watcher.finish()

    events = open_store(tmp_path).events(watcher.run.info.run_id)
    why_not = {event.step: event.body["why_not"] for event in events if event.kind == "gradient_localised"}
    assert "a coefficient of the loss is missing" in why_not[1]
    assert why_not[2] == why_not[3] == ""
    assert watcher.run.counters["errors"] == 1


def test_a_learning_rate_that_cannot_be_lowered_is_the_loops_own(monkeypatch, unwatched):
    """All groups are scaled or none, and the step is taken."""
    error_boundary = ErrorBoundary()

    class Unscalable:
        def __rmul__(self, rate):
            raise RuntimeError("boom")

        def __ne__(self, other):
            return True

    def prepare(optimizer, _):
        optimizer.param_groups[0][SCALE] = Unscalable()
        StepScale(optimizer, error_boundary, scheduled=False)

    assert same(train(prepare=prepare)[0], unwatched)
    assert error_boundary.errors == LIMIT


@pytest.mark.parametrize("place", ["norms", "gradients"])
def test_layer_clipping_that_fails_leaves_the_global_clip(monkeypatch, unwatched, place):
    """As if it had never been asked for: no gradient is touched before all that can fail is over."""
    made = []

    def broken(policy):
        made.append(LayerClip(policy, LayerMedian(), max_norm=1.0))
        return made[0]

    monkeypatch.setattr(LayerLayout, place, out_of_memory)
    left, _ = train(make_clip=broken)

    assert same(left, unwatched)
    assert made[0].error_boundary.errors == LIMIT


def test_a_rule_of_clipping_that_raises_leaves_the_global_clip(unwatched):
    """And what was done is told as it was: nothing is said of layers."""

    class Falling(LayerMaxNorm):
        def scales(self, norms, seen, state):
            if falling:
                raise MuteError
            return super().scales(norms, seen, state)

    falling, made = [], []

    def make(policy):
        made.append(LayerClip(policy, Falling(each=1e9), max_norm=1.0))
        falling.append(True)
        return made[0]

    left, _ = train(make_clip=make)

    assert same(left, unwatched)
    assert set(made[0].clip().metrics()) == {"optim/grad_norm"}


# ---------------------------------------------------------------- failures injected into a Trainer


HF = "rlwatch.integrations.transformers"
IN_A_TRAINER = {
    "whether to look": (f"{HF}.taps.TrainerTaps._looks", missing),
    "the loss": (f"{HF}.taps.loss_stats", out_of_memory),
    "gradients read": (f"{HF}.taps.model_norms", out_of_memory),
    "gradients added": (f"{HF}.taps.TrainerTaps._add_gradients", mute),
    "clipped layers found": (f"{HF}.taps.clipping_of", bare),
    "clipped layers added": (f"{HF}.taps.TrainerTaps._add_clipped", runtime),
    "layers clipped": ("rlwatch.clipping.layer_clip.LayerClip.by_layer", out_of_memory),
    "the norm before clipping": (f"{HF}.layer_clipping._before_clipping", out_of_memory),
    "a step taken": (f"{HF}.taps.TrainerTaps.take", bare),
    "a step delivered": (f"{HF}.attach.StepCallback.deliver", mute),
    "commands": (f"{HF}.commands.LoopControl.obey", runtime),
    "the log": (f"{HF}.attach.scalars", missing),
    "the end": (f"{HF}.attach.RLWatchCallback.end", bare),
}


def trained(folder, *, watched):
    """A small ``transformers.Trainer``, its layers clipped by a rule that never scales; its weights and counters."""
    transformers = pytest.importorskip("transformers")
    from rlwatch.integrations.transformers import clip_layers, watch

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.drop = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 1)]), nn.Dropout(0.2)

        def forward(self, x, y):
            hidden = self.drop(torch.tanh(self.layers[0](x)))
            return {"loss": (self.layers[1](hidden).squeeze(-1) - y).square().mean()}

    torch.manual_seed(0)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))
    settings = {"use_cpu": True, "max_steps": 5, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
    settings |= {"disable_tqdm": True, "learning_rate": 1e-2, "max_grad_norm": 0.1, "seed": 3}
    trainer = transformers.Trainer(
        model=Net(),
        args=transformers.TrainingArguments(output_dir=str(folder / "out"), **settings),
        train_dataset=[{"x": row, "y": row.sum()} for row in x],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    run = None
    if watched:
        run = rlwatch.init(store=folder / "runs", sigterm=False)
        watch(trainer, run=run)
        clip_layers(trainer, LayerMaxNorm(each=1e9))
    trainer.train()
    if run is not None:
        assert run.finish(deadline_s=60.0) in (True, False)
    left = {f"{i}": parameter.detach().clone() for i, parameter in enumerate(trainer.model.parameters())}
    return {**left, "random": torch.get_rng_state()}, trainer, run


@pytest.fixture(scope="module")
def unwatched_trainer(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("unwatched"), watched=False)[0]


@pytest.mark.parametrize("name", [None, *IN_A_TRAINER])
def test_a_failure_of_rlwatch_leaves_a_trainer_as_it_is(tmp_path, monkeypatch, unwatched_trainer, name):
    """All its steps, bit for bit; without a failure nothing is counted, with one something is."""
    if name is not None:
        place, failure = IN_A_TRAINER[name]
        owner, _, attribute = place.rpartition(".")
        monkeypatch.setattr(resolved(owner), attribute, failure)
    left, trainer, run = trained(tmp_path, watched=True)

    assert trainer.state.global_step == 5
    assert same(left, unwatched_trainer)
    counted = bool(run.counters.snapshot())
    assert counted == (name not in NOT_ON_THE_RUN)


NOT_ON_THE_RUN = {None, "layers clipped", "the norm before clipping"}
"""Layer clipping has no run: it warns."""


# ---------------------------------------------------------------- training's own errors


class LoopError(Exception):
    """Training's own."""


def passing(error):
    """A function of training's that fails, and how often it was called."""
    calls = []

    def work(*args, **kwargs):
        calls.append(args)
        raise error

    return work, calls


def wrapped_by_a_watcher(work, tmp_path):
    watcher = rlwatch.Watcher(nn.Linear(1, 1), store=tmp_path, sigterm=False)
    return lambda: watcher.forward(work, 1)


def wrapped_by_a_mirror(work, tmp_path):
    owner = SimpleNamespace(log=work)
    Patches().around(owner, "log", before=lambda *_: None, after=lambda *_: None)
    return lambda: owner.log(1)


def wrapped_by_a_trainer(work, tmp_path):
    from rlwatch.integrations.transformers.taps import TrainerTaps

    trainer = SimpleNamespace(training_step=work, model=nn.Linear(1, 1))
    TrainerTaps(trainer, ErrorBoundary()).tap_loss()
    return lambda: trainer.training_step(1)


def wrapped_by_trl(work, tmp_path):
    from rlwatch.gradloc.passes import RecordedPasses
    from rlwatch.integrations.trl.localise import METHOD, LossPassTap

    trainer = SimpleNamespace(**{METHOD: work})
    LossPassTap(trainer, ErrorBoundary(), RecordedPasses()).attach(lambda: True)
    return lambda: getattr(trainer, METHOD)(None, compute_entropy=True)


def wrapped_by_verl(work, tmp_path):
    from rlwatch.gradloc.passes import RecordedPasses
    from rlwatch.integrations.verl.localise import EngineLossPassTap

    engine = SimpleNamespace(forward_step=work)
    EngineLossPassTap(engine, ErrorBoundary(), RecordedPasses()).attach()
    return lambda: engine.forward_step(None, loss_function=None, forward_only=False)


def wrapped_by_the_end_of_training(work, tmp_path):
    from rlwatch.integrations.transformers.attach import report_crashes

    run = rlwatch.init(store=tmp_path, sigterm=False)
    trainer = SimpleNamespace(train=work)  # without a state: looking for the step fails, too
    report_crashes(trainer, SimpleNamespace(run=run, error_boundary=ErrorBoundary(run)), None)
    return trainer.train


def wrapped_by_a_run(work, tmp_path):
    def training():
        with rlwatch.init(store=tmp_path, sigterm=False):
            work(1)

    return training


def wrapped_by_the_block_of_a_watcher(work, tmp_path):
    def training():
        with rlwatch.Watcher(nn.Linear(1, 1), store=tmp_path, sigterm=False):
            work(1)

    return training


WRAPPERS = [value for name, value in list(globals().items()) if name.startswith("wrapped_by_")]


@pytest.mark.parametrize("wrapped", WRAPPERS)
@pytest.mark.parametrize(
    "error", [LoopError("x"), MuteError(), torch.OutOfMemoryError("x"), KeyboardInterrupt(), SystemExit(3)]
)
def test_an_error_of_trainings_own_passes_as_it_is(tmp_path, wrapped, error):
    """The very object, and what raised it ran once."""
    work, calls = passing(error)
    with pytest.raises(type(error)) as raised:
        wrapped(work, tmp_path)()

    assert raised.value is error
    assert len(calls) == 1


# ---------------------------------------------------------------- threads of ours


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), BareError("x"), GeneratorExit()])
def test_a_thread_of_rlwatch_survives_whatever_is_raised_in_it(error):
    """It is told, and the work begins anew until it is done."""
    told, rounds = [], []

    def work():
        rounds.append(1)
        if len(rounds) < 3:
            raise error

    def failed(got):
        told.append(got)
        raise error

    thread = threading.Thread(target=run_forever, args=(work, failed), kwargs={"pause_s": 0.0})
    thread.start()
    thread.join(60.0)

    assert not thread.is_alive()
    assert told == [error, error]


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


class Exploding:
    """A store whose outbox raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getattr__(self, name: str) -> object:
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), KeyError("k"), MuteError()])
def test_delivery_goes_on_whatever_a_round_raises(error):
    """Counted, told to the run, and tried again; it ends when it is asked to."""
    failures = []
    thread = DeliveryThread(Exploding(error), {"c": ConsoleNotifier()}, poll_s=0.001, failed=failures.append)
    thread.start()
    until(lambda: thread.failures >= 3)

    assert thread.stop(60.0)
    assert len(failures) == thread.failures
    assert set(failures) == {error}


@pytest.mark.parametrize("error", [SystemExit(3), KeyError("k"), MuteError()])
def test_a_watchman_looks_again_whatever_a_look_raises(error):
    """Every ten seconds, however often it failed."""
    looks = []
    thread = WatchmanThread(SimpleNamespace(look=lambda: looks.append(1) or explode(error)), every_s=0.001)
    thread.start()
    until(lambda: len(looks) >= 3)
    thread.stop(60.0)

    assert thread.failures == len(looks)


def test_a_listener_that_fails_ends_neither_the_others_nor_the_judging(tmp_path):
    """Counted; whoever listens behind it hears."""
    heard = []
    with rlwatch.init(store=tmp_path, sigterm=False) as run:
        run.listen(lambda _: explode(SystemExit(3)))
        run.listen(heard.append)
        run.log({"loss/raw": 1.0}, step=1)
        run.log({"loss/raw": float("nan")}, step=2)
        run.log({"loss/raw": 1.0}, step=3)

    assert heard
    assert run.counters["errors"] == len(heard)
    assert open_store(tmp_path).findings(run.info.run_id)


def test_a_tokenizer_that_wants_to_exit_ends_no_training():
    """What is raised on the thread of the text comes back as an error, which ends at the error boundary."""

    class Exiting:
        def decode(self, ids):
            raise SystemExit(3)

    probe, error_boundary = TextProbe(Exiting(), seconds=0.0), ErrorBoundary()
    assert probe.offer([Sample(ids=[1, 2])])

    assert error_boundary.attempt("text", lambda: probe.take(wait=True)) is None
    assert error_boundary.errors == 1
    probe.close()


def test_an_exit_in_the_statistics_of_verl_is_counted():
    """The step is lost; the next one is computed."""
    error_boundary = ErrorBoundary()

    assert error_boundary.guard_background("statistics", explode, SystemExit(3)) is None
    assert error_boundary.guard_background("statistics", int, "3") == 3
    assert error_boundary.errors == 1


def test_the_mailbox_asks_again_after_a_store_that_failed(tmp_path):
    """What was answered meanwhile is settled then."""

    class Store:
        failing, settled = True, []

        def settle(self, *args, **kwargs):
            if self.failing:
                raise BareError("not now")
            self.settled.append((args, kwargs))

        def commands(self, *_):
            return []

        def claim(self, *_):
            return [Command("c", "r", "note")]

    store = Store()
    clock = SimpleNamespace(monotonic=time.monotonic, now=time.time)
    mailbox = Mailbox(store, "r", clock)
    mailbox.take()
    mailbox.tick()
    (waiting,) = mailbox.take()
    waiting.done(HATEFUL[5], step=HATEFUL[2])
    with pytest.raises(BareError):
        mailbox.tick()
    store.failing = False
    mailbox.tick()

    assert len(store.settled) == 1


# ---------------------------------------------------------------- every hook, also those to come

GUARDS = ("hook", "contained")
OURS_ALONE = {
    "rlwatch/gradloc/distributed.py": "on the model while we run it again, within the localisation's own guard",
    "rlwatch/gradloc/broken.py": "the same",
}


def test_every_hook_we_register_is_guarded():
    """By the error boundary, in the very call that registers it."""
    root = Path(rlwatch.__file__).parent
    found, bare_ones = 0, []
    for path in root.rglob("*.py"):
        text = path.read_text()
        if "register_" not in text or str(path.relative_to(root.parent)) in OURS_ALONE:
            continue
        guarded = {name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign) for name in _made(node)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and _registers(node.func):
                found += 1
                if not (_guards(node.args[0]) or getattr(node.args[0], "id", None) in guarded):
                    bare_ones.append(f"{path}:{node.lineno}")

    assert found >= 6
    assert bare_ones == []


def _registers(function: ast.expr) -> bool:
    name = getattr(function, "attr", "")
    return name.startswith("register_") and name.endswith("hook")


def _guards(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Call) and getattr(argument.func, "attr", getattr(argument.func, "id", "")) in GUARDS


def _made(node: ast.Assign) -> Iterator[str]:
    """Names that are assigned guarded functions."""
    for target in node.targets:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for name, value in zip(names, values, strict=False):
            if isinstance(name, ast.Name) and _guards(value):
                yield name.id


THREADS = {
    "rlwatch/recorder/writer.py": "its loop and every call of a sink hold whatever is raised",
    "rlwatch/recorder/judge_thread.py": "every turn holds whatever is raised",
    "rlwatch/monitor/watchman.py": "run_forever",
    "rlwatch/alerts/outbox.py": "run_forever",
    "rlwatch/link/hub.py": "run_forever",
    "rlwatch/link/spoke.py": "its loop holds whatever is raised: the link is given up, ranks that wait are let go",
    "rlwatch/link/rounds.py": "what its ear raises is as if the connection had broken",
    "rlwatch/run/machine.py": "run_forever, and every look is sheltered",
    "rlwatch/cli/serve.py": "no training in its process: who serves watches the children and ends with them",
    "rlwatch/run/ranks.py": "every look holds whatever is raised",
    "rlwatch/integrations/verl/attach.py": "Run.finish, which holds whatever is raised",
    "rlwatch/run/run.py": "waits for a signal's number, nothing else",
    "rlwatch/notify/mail.py": "of one message: what it raises is what became of it",
    "rlwatch/notify/http.py": "a timer that closes one request, contained",
    "rlwatch/text.py": "of one report: what it raises is taken with it",
    "rlwatch/integrations/snapshots.py": "ErrorBoundary.guard_background, and a full disk is said",
    "rlwatch/integrations/canaries.py": "of one scoring: each call of a reward function holds whatever is raised",
    "rlwatch/integrations/step_tally.py": "ErrorBoundary.guard_background, which both who submit go through",
}
"""Where threads of ours are made, and what holds what is raised in them."""


def test_every_thread_of_rlwatch_is_known():
    """A new one must say here what becomes of an error in it."""
    root = Path(rlwatch.__file__).parent
    made = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name in ("Thread", "Timer", "ThreadPoolExecutor"):
                made.add(str(path.relative_to(root.parent)))

    assert {path for path in made if not path.startswith("rlwatch/testing/")} == THREADS.keys()
