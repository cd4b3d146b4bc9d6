"""Runs of several ranks: how they find each other, what each may do, and how they part."""

import logging
import socket
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from preloaded import run_program

import rlwatch
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.ranks import APART, OneRank, RunRanks, StoreMeeting, begin_together, meeting
from rlwatch.link.wire import HubAddress, LinkError
from rlwatch.records import Command, CommandStatus, SpikeBatch
from rlwatch.run.ranks import join
from rlwatch.store.url import open_store

BESIDE = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "processes")]


class Place:
    """A meeting within one process."""

    def __init__(self, **said):
        self.kept = said

    def put(self, name, text):
        self.kept[name] = text

    def get(self, name):
        return self.kept.get(name)

    @property
    def said(self):
        return self.kept["address"]


def linked(run):
    """Whether the other rank finds rank 0."""
    return run.ranks.settled(20.0)


class SeenFromAfar:
    """The same meeting, for a rank of another machine: rank 0's is not its own."""

    def __init__(self, place):
        self.put = place.put
        self._place = place

    def get(self, name):
        text = self._place.get(name)
        if name == "address" and text:
            return replace(HubAddress.from_text(text), machine="another machine").to_text()
        return text


@dataclass
class Parcel:
    step: int
    number: int = 1
    spikes: tuple = ()

    def ready(self):
        return True

    def encode(self):
        return str(self.number).encode()

    def merged(self, others):
        return {"sum": float(self.number + sum(map(int, others.values())))}, self.spikes


def begin(tmp_path, rank, world_size=2, **kwargs):
    return rlwatch.init(
        store=str(tmp_path), run_id="r", rank=rank, world_size=world_size, sigterm=False, **kwargs
    )  # fmt: skip


@pytest.fixture
def pair(tmp_path):
    """Rank 0 and rank 1 of one run, linked."""
    place, first, other = Place(), begin(tmp_path, 0), begin(tmp_path, 1)
    join(other, place)  # whoever comes first
    join(first, place)
    assert linked(other)
    yield first, other
    other.finish(deadline_s=5.0)
    first.finish(deadline_s=5.0)


def recorded(tmp_path):
    return {record.step: dict(record.metrics) for record in open_store(tmp_path).records("r")}


def test_a_rank_that_is_not_linked_is_inert(tmp_path):
    """As every rank but 0 always was."""
    run = begin(tmp_path, 1)
    run.log({"x": 1.0}, step=1)
    run.send(Parcel(1))

    assert (run.active, run.linked, run.measures, run.ranks) == (False, False, False, None)
    assert run.finish()


def test_a_linked_rank_measures_without_recording(pair):
    """Only rank 0 is active."""
    first, other = pair

    assert (first.rank, first.active, first.linked, first.measures) == (0, True, True, True)
    assert (other.rank, other.active, other.linked, other.measures) == (1, False, True, True)


def test_a_rank_that_hangs_is_named_with_its_stage_and_its_stack(tmp_path, pair, monkeypatch):
    """Rank 0 goes on; the other one tells it from the thread that sends, and that it goes on again."""
    monkeypatch.setenv("RLWATCH_STALL_S", "0.5")
    first, other = pair

    def events(kind):
        return [event for event in open_store(tmp_path).events("r") if event.kind == kind]

    with other.stages.stage("reward"):
        end = time.monotonic() + 60.0
        while not events("stalled") and time.monotonic() < end:
            with first.stages.stage("update"):
                time.sleep(0.05)
    [stall] = events("stalled")
    while not events("stall_over") and time.monotonic() < end:
        other.stages.end_step(1)
        time.sleep(0.05)

    assert (stall.body["rank"], stall.body["stage"], stall.body["what"]) == (1, "reward", "starved")
    assert stall.body["says"].startswith("rank 1 is in stage reward since ")
    assert "test_a_rank_that_hangs_is_named_with_its_stage_and_its_stack" in str(stall.body["threads"][0]["stack"])
    assert [event.body["rank"] for event in events("stall_over")] == [1]


def test_steps_are_recorded_whole_and_before_what_was_logged_after_them(tmp_path, pair):
    """The log row of a step follows its statistics."""
    first, other = pair
    for step in (1, 2, 3):
        first.send(Parcel(step, 1))
        first.log({"loss": 0.5}, step=step)
        other.send(Parcel(step, 10 * step))
        other.log({"loss": 99.0}, step=step)
    assert first.flush(20.0)

    rows = open_store(tmp_path).records("r")
    assert [dict(row.metrics) for row in rows] == [
        part for step in (1, 2, 3) for part in ({"sum": 1 + 10.0 * step, "rlwatch/ranks": 2.0}, {"loss": 0.5})
    ]
    assert first.ranks.latest == {"sum": 31.0}
    assert other.ranks.latest == {}


def test_extreme_tokens_are_stored_with_their_rank(tmp_path, pair):
    """Whoever's they are."""
    first, other = pair
    first.send(Parcel(1, spikes=(SpikeBatch(1, {"logp": [-20.0]}, rank=1),)))
    other.send(Parcel(1))
    assert first.flush(20.0)

    (batch,) = open_store(tmp_path).spikes("r")
    assert batch.rank == 1


def test_commands_reach_every_rank_as_they_are(pair):
    """Arguments, who and why."""
    first, other = pair
    command = Command("c1", "r", "set-kl-coef", {"value": 0.25, "why not": None}, True, requested_by="ann", why="KL")

    def on(run, asked):
        ranks, end = RunRanks(ErrorBoundary(run)), time.monotonic() + 60.0
        while not ranks.meets(5, wanted=bool(asked), staying=True):
            assert time.monotonic() < end, "the ranks never met"
            time.sleep(0.001)
        heard = ranks.share(asked)
        return heard, ranks.agree("no" if ranks.rank == 1 else None)

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(on, first, [command]), pool.submit(on, other, [])]
        answers = [result.result(90) for result in results]

    assert answers == [([command], "rank 1: no")] * 2
    assert answers[1][0][0].status is CommandStatus.QUEUED


def test_ranks_that_are_not_linked_refuse_every_command(tmp_path):
    """One of several must not act alone."""
    run = begin(tmp_path, 0)
    ranks = RunRanks(ErrorBoundary(run))
    command = Command("c", "r", "stop")

    assert (ranks.rank, ranks.world_size) == (0, 2)
    assert ranks.meets(1, wanted=True)
    assert not ranks.meets(1, wanted=False)
    assert ranks.share([command]) == ranks.order([command]) == [command]
    assert ranks.agree(None) == APART
    assert ranks.agree("a reason") == "a reason"
    run.finish()


@pytest.mark.parametrize("ranks", [OneRank(), RunRanks(ErrorBoundary(None))], ids=["one", "no run"])
def test_one_rank_agrees_with_itself(ranks):
    """No link, no refusal but its own."""
    command = Command("c", "r", "stop")

    assert ranks.meets(1, wanted=True)
    assert ranks.share([command]) == ranks.order([command]) == [command]
    assert ranks.agree(None) is None
    assert ranks.agree("no") == "no"
    assert (ranks.rank, ranks.world_size) == (0, 1)


def test_a_run_of_one_rank_has_nobody_to_meet(tmp_path):
    """No port is opened, nothing is asked."""
    run = begin(tmp_path, 0, world_size=1)
    join(run, Place())

    assert not run.linked
    run.finish()


def test_a_rank_that_hears_nothing_of_rank_0_goes_on_unlinked(tmp_path, caplog):
    """It waits nowhere, says so after a while, and measures nothing from then on; training is not stopped for it."""
    run = begin(tmp_path, 1)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        join(run, Place(), hope_s=0.5)
        assert run.measures
        assert not linked(run)

    assert not run.measures
    assert run.ranks.meets(1, wanted=False, staying=False) is False
    assert "rank 1 is not linked to rank 0" in caplog.text
    assert "rlwatch must be set up on every rank" in caplog.text
    assert run.finish(deadline_s=20.0)


def test_a_rank_that_cannot_reach_rank_0_goes_on_unlinked(tmp_path, caplog):
    """A wall between the machines."""
    place = Place(address='{"machine": "elsewhere", "hosts": ["localhost"], "port": 1, "token": "x"}')
    run = begin(tmp_path, 1)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        join(run, place, hope_s=0.1)
        assert not linked(run)

    assert not run.measures
    assert "cannot be reached" in caplog.text
    run.finish(deadline_s=0.1)


def test_a_rank_whose_meeting_is_gone_goes_on_unlinked(tmp_path, caplog):
    """The store of the process group ended with the process that held it."""

    class Gone(Place):
        def get(self, name):
            raise RLWatchError("the store of the process group does not answer")

    run = begin(tmp_path, 1)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        join(run, Gone())
        assert not linked(run)

    assert not run.measures
    assert "does not answer" in caplog.text
    assert run.finish(deadline_s=20.0)


def test_where_rank_0_does_not_record_the_others_are_told_at_once(tmp_path, caplog):
    """They do not wait for it, and say nothing."""
    place, first, other = Place(), begin(tmp_path, 0), begin(tmp_path, 1)
    first.finish()
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        join(first, place)
        join(other, place)
        assert not linked(other)

    assert place.said == ""
    assert not other.measures
    assert caplog.messages == []


def test_where_rank_0_cannot_listen_everybody_goes_on_unlinked(tmp_path, monkeypatch, caplog):
    """One warning, by rank 0; nobody waits."""
    place, first, other = Place(), begin(tmp_path, 0), begin(tmp_path, 1)

    def refuse(*_, **__):
        raise PermissionError("not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        join(first, place)
        join(other, place)
        assert not linked(other)

    assert (first.active, first.linked, other.measures) == (True, False, False)
    (words,) = caplog.messages
    assert words.startswith("the ranks are not linked: only rank 0's share of the batch is measured (")
    assert words.endswith(": not permitted)")
    first.finish()


def test_joining_twice_is_joining_once(pair):
    """A callback may be told twice that training begins."""
    before = [run.ranks for run in pair]
    for run in pair:
        join(run, Place())

    assert [run.ranks for run in pair] == before


def test_rank_0_may_leave_first(tmp_path, pair):
    """What another rank measures afterwards is nobody's; it trains on, and ends at once."""
    first, other = pair
    other.send(Parcel(1, 10))
    first.send(Parcel(1))
    assert first.finish(deadline_s=20.0)
    other.send(Parcel(2))

    assert other.ranks.meets(2, wanted=False, staying=False) is False
    assert other.finish(deadline_s=5.0)
    assert recorded(tmp_path) == {1: {"sum": 11.0, "rlwatch/ranks": 2.0}}


def test_a_run_that_ended_is_no_longer_linked(pair):
    """And takes nothing more."""
    for run in reversed(pair):
        run.finish(deadline_s=5.0)
        run.send(Parcel(9))

        assert (run.linked, run.measures, run.ranks) == (False, False, None)


def test_training_again_links_anew(tmp_path):
    """A second attempt has a hub of its own."""
    for attempt in (1, 2):
        place, first, other = Place(), begin(tmp_path, 0), begin(tmp_path, 1)
        join(first, place)
        join(other, place)
        other.send(Parcel(1, 10 * attempt))
        first.send(Parcel(1))
        assert other.finish(deadline_s=5.0)
        assert first.finish(deadline_s=5.0)

    sums = [record.metrics["sum"] for record in open_store(tmp_path).records("r")]
    assert sums == [11.0, 21.0]


def test_a_forked_child_of_either_rank_is_inert_and_the_link_lives(tmp_path):
    """Data-loader workers hold copies of the connections: they must neither use nor end them."""
    script = textwrap.dedent(f"""
        import os, sys
        sys.path[:0] = {BESIDE!r}
        from test_linked_runs import Parcel, Place, begin, join
        place, first, other = Place(), begin({str(tmp_path)!r}, 0), begin({str(tmp_path)!r}, 1)
        join(first, place), join(other, place)
        assert other.ranks.settled(20.0)
        pid = os.fork()
        if pid == 0:
            quiet = not (first.linked or other.linked or first.measures or other.measures)
            first.send(Parcel(1)), other.send(Parcel(1))
            first.finish(), other.finish()
            os._exit(0 if quiet else 1)
        assert os.waitpid(pid, 0)[1] == 0
        first.send(Parcel(1)), other.send(Parcel(1, 10))
        assert first.flush(20.0)
        other.finish(), first.finish()
    """)
    run_program(script, check=True)

    assert recorded(tmp_path) == {1: {"sum": 11.0, "rlwatch/ranks": 2.0}}


def test_what_a_rank_measured_is_sent_when_its_process_exits(tmp_path):
    """Without anybody saying so; and rank 0 waits for a rank that is late in setting up."""
    place, first = Place(), begin(tmp_path, 0)
    join(first, place)
    first.send(Parcel(1))
    script = textwrap.dedent(f"""
        import sys
        sys.path[:0] = {BESIDE!r}
        from test_linked_runs import Parcel, Place, begin, join
        place, other = Place(address={place.said!r}), begin({str(tmp_path)!r}, 1)
        join(other, place)
        other.send(Parcel(1, 10))
    """)
    run_program(script, check=True)

    assert first.finish(deadline_s=20.0)
    assert recorded(tmp_path)[1] == {"sum": 11.0, "rlwatch/ranks": 2.0}


class Store:
    """The key-value store of a process group, without one."""

    def __init__(self):
        self.kept = {}

    def set(self, key, value):
        self.kept[key] = value.encode()

    def check(self, keys):
        return set(keys) <= self.kept.keys()

    def get(self, key):
        return self.kept[key]


def test_ranks_meet_over_the_store_of_their_process_group():
    """Each meeting has keys of its own, and nobody waits in the store for one that is not there."""
    store = Store()
    first, second = StoreMeeting(store), StoreMeeting(store)
    first.put("address", "here")

    assert (first.get("address"), first.get("far"), second.get("address")) == ("here", None, None)


def test_a_store_that_is_gone_is_one_clear_error():
    """Whatever torch raises, and its many lines."""

    class Gone(Store):
        def check(self, keys):
            raise RuntimeError("failed to recv\nException raised from\nframe #1")

    with pytest.raises(RLWatchError, match=r"^the store of the process group does not answer: failed to recv$"):
        StoreMeeting(Gone()).get("address")


def test_without_a_process_group_there_is_no_meeting(tmp_path):
    """A run begun there is an ordinary one."""
    assert meeting() is None

    run = begin_together(lambda: begin(tmp_path, 0))
    assert run.active
    assert not run.linked
    run.finish()


def test_an_error_at_set_up_is_raised_and_the_others_do_not_wait(monkeypatch):
    """Rank 0 tells them that it will not be there."""
    said = {}
    store = SimpleNamespace(set=said.__setitem__)
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 0}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def broken():
        raise ConfigError("no such store")

    with pytest.raises(ConfigError, match="no such store"):
        begin_together(broken)
    assert [(name.rpartition("/")[2], text) for name, text in said.items()] == [("address", "")]


def test_no_port_is_open_to_the_network_until_a_rank_of_another_machine_is_there(tmp_path):
    """Whether or not the launcher says how many ranks a machine has."""
    place, first, other = Place(), begin(tmp_path, 0, world_size=3), begin(tmp_path, 1, world_size=3)
    join(first, place)
    join(other, place)
    assert linked(other)
    assert HubAddress.from_text(place.said).hosts == ("127.0.0.1",)

    late = begin(tmp_path, 2, world_size=3)
    join(late, SeenFromAfar(place))
    assert linked(late)
    assert HubAddress.from_text(place.said).hosts != ("127.0.0.1",)
    for run in (other, late, first):
        run.finish(deadline_s=5.0)


def test_where_all_ranks_are_on_one_machine_rank_0_does_not_look_for_others(tmp_path, monkeypatch):
    """``LOCAL_WORLD_SIZE`` says so, as torchrun sets it: whatever the store says, no port is opened to the network."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    place, run = Place(far="1"), begin(tmp_path, 0)
    join(run, place)

    assert not run.ranks.seeks
    assert HubAddress.from_text(place.said).hosts == ("127.0.0.1",)
    run.finish()


def test_what_is_said_wrongly_of_the_link_shows_at_set_up(tmp_path, monkeypatch):
    """Before a run is begun; a port that is taken is an error where it was asked for."""
    monkeypatch.setenv("RLWATCH_LINK_PORT", "ssh")
    with pytest.raises(ConfigError, match="RLWATCH_LINK_PORT must be a port"):
        begin_together(lambda: begin(tmp_path, 0))
    monkeypatch.delenv("RLWATCH_LINK_PORT")

    place, run = Place(), begin(tmp_path, 0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LinkError, match="cannot listen"):
        join(run, place, link=f"127.0.0.1:{taken.getsockname()[1]}")
    assert place.said == ""
    run.finish()
