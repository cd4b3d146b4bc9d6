"""The controller: every command is carried out by all ranks or by none, and answered once."""

import itertools
from contextlib import nullcontext

import pytest

from rlwatch.clock import ManualClock
from rlwatch.control.mailbox import LATE, PendingCommand
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.commands import BROKEN_OFF, FAILED, GRACE_S, STOPPED, UNSHARED, Controller, PauseState
from rlwatch.recorder.losses import Counters
from rlwatch.records import Command, CommandStatus, Event

numbers = itertools.count()


class FakeRun:
    """Commands in, answers and events out."""

    def __init__(self, *commands):
        self.queue, self.answers, self.events = list(commands), [], []
        self.counters, self.active = Counters(), True

    def has_commands(self, *, for_all_ranks=False):
        return bool(self.queue)

    def commands(self, *, for_all_ranks=False):
        taken, self.queue = self.queue, []
        return [PendingCommand(command, self.answers.append) for command in taken]

    def event(self, kind, step=None, **body):
        self.events.append(Event(kind, step, body))

    @property
    def results(self):
        return [(a.command.kind, a.status.value, a.step, a.result) for a in self.answers]


class Handler:
    """Refuses, fails or reports, as told."""

    def __init__(self, kind="wave", refusal=None, error=None, report=None):
        self.kind, self.refusal, self.error, self.report = kind, refusal, error, report or {}
        self.calls = []

    def check(self, command):
        if self.refusal:
            raise RLWatchError(self.refusal)

    def __call__(self, command):
        self.calls.append(command)
        if self.error:
            raise self.error
        return self.report


class Several:
    """Rank 0 of two, the other of which does as the test says."""

    rank, world_size = 0, 2

    def __init__(self, refusal=None, dead=False):
        self.refusal, self.dead, self.overs, self.left = refusal, dead, 0, 0

    def meets(self, step, *, wanted, staying=False):
        return wanted

    def leave(self):
        self.left += 1

    def share(self, commands):
        return [] if self.dead else list(commands)

    def agree(self, refusal):
        return refusal or self.refusal

    def over(self):
        self.overs += 1


def command(kind="wave", **args):
    return Command(f"c{next(numbers)}", "r", kind, args, requested_by="ann@lab", why="because")


def controller(run, *handlers, ranks=None, latest=dict, **kwargs):
    return Controller(ErrorBoundary(run), handlers, ranks, latest, **kwargs)


def test_a_command_is_carried_out_answered_and_recorded():
    """Who, why, with what and what came of it."""
    asked = command(hands=2)
    run, handler = FakeRun(asked), Handler(report={"summary": "waved twice"})
    controller(run, handler).obey(7)

    assert handler.calls == [asked]
    assert run.results == [("wave", "done", 7, "waved twice")]
    (event,) = run.events
    assert (event.kind, event.step) == ("command", 7)
    assert event.body == {
        "command": "wave",
        "args": {"hands": 2},
        "report": {"summary": "waved twice"},
        "by": "ann@lab",
        "why": "because",
        "id": asked.command_id,
    }


def test_a_report_without_summary_is_answered_in_its_own_words():
    """Nothing is lost between the handler and the person."""
    run = FakeRun(command())
    controller(run, Handler(report={"hands": 2, "seconds": 1.5})).obey(1)

    assert run.results == [("wave", "done", 1, "hands: 2, seconds: 1.5")]


def test_a_reset_is_an_event_of_its_own_with_the_kl_before_it():
    """Detectors and charts look for ``reference_reset``."""
    run = FakeRun(command("reset-reference"))
    reset = Handler("reset-reference", report={"summary": "reference = policy", "optimizer": "keep"})
    controller(run, reset, latest=lambda: {"policy/kl_ref_k3": 0.25}).obey(3)

    assert run.results == [("reset-reference", "done", 3, "KL 0.25 -> 0, reference = policy")]
    (event,) = run.events
    assert event.kind == "reference_reset"
    assert (event.body["kl_before"], event.body["optimizer"], event.body["by"]) == (0.25, "keep", "ann@lab")


def test_without_a_measured_kl_none_is_claimed():
    """Not measured is not zero."""
    run = FakeRun(command("reset-reference"))
    controller(run, Handler("reset-reference", report={"summary": "reference = policy"})).obey(3)

    assert run.results[0][3] == "reference = policy"
    assert run.events[0].body["kl_before"] is None


def test_what_no_handler_can_do_is_rejected_with_what_can_be_done():
    """The person reads the list."""
    run = FakeRun(command("explode"))
    controller(run, Handler()).obey(1)

    ((_, status, _, reason),) = run.results
    assert status == "rejected"
    assert "'explode'" in reason
    assert "pause, resume, undo, wave" in reason
    assert run.events == []


def test_a_refusal_is_the_answer_and_nothing_happens():
    """The handler is not called, no event is written."""
    run, handler = FakeRun(command()), Handler(refusal="my hands are tied")
    controller(run, handler).obey(2)

    assert run.results == [("wave", "rejected", 2, "my hands are tied")]
    assert (handler.calls, run.events) == ([], [])


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("boom"), FAILED), (RLWatchError("half the tensors are missing"), None)]
)
def test_what_fails_inside_the_trainer_is_answered_and_training_goes_on(error, reason):
    """Our own failures are counted; a refusal that comes late keeps its words."""
    run = FakeRun(command(), command("jump"))
    controller(run, Handler(error=error), Handler("jump")).obey(2)

    assert [r[1] for r in run.results] == ["failed" if reason else "rejected", "done"]
    assert run.results[0][3] == (reason or str(error))
    assert run.counters["errors"] == (1 if reason else 0)


def test_a_handler_that_fails_again_and_again_is_left_alone():
    """After three failures of one kind the rest is rejected untried; other kinds still work."""
    run, handler = FakeRun(*(command() for _ in range(5)), command("jump")), Handler(error=RuntimeError("boom"))
    controller(run, handler, Handler("jump")).obey(1)

    assert len(handler.calls) == 3
    assert [r[1] for r in run.results] == ["failed"] * 3 + ["rejected"] * 2 + ["done"]


def test_an_interrupt_leaves_no_command_unanswered():
    """Ctrl-C passes through, and the person is told."""
    run = FakeRun(command(), command("jump"))
    with pytest.raises(KeyboardInterrupt):
        controller(run, Handler(error=KeyboardInterrupt()), Handler("jump")).obey(1)

    assert [r[1:] for r in run.results] == [("failed", 1, BROKEN_OFF), ("rejected", 1, STOPPED)]


def test_all_ranks_act_or_none():
    """The other rank refuses: this one does not act."""
    run, handler = FakeRun(command()), Handler()
    controller(run, handler, ranks=Several(refusal="rank 1: its weights are not finite")).obey(4)

    assert handler.calls == []
    assert run.results == [("wave", "rejected", 4, "rank 1: its weights are not finite")]


def test_a_rank_that_does_not_answer_is_named_and_nothing_is_done():
    """The command is not left hanging."""
    run, handler = FakeRun(command()), Handler()
    controller(run, handler, ranks=Several(dead=True)).obey(4)

    assert handler.calls == []
    assert run.results == [("wave", "rejected", 4, UNSHARED)]


@pytest.mark.parametrize("error", [None, OSError("broken"), KeyboardInterrupt()])
def test_the_other_ranks_are_let_go_however_a_round_ends(error):
    """Done, failed, interrupted or of a kind this rank does not know: nobody waits for a verdict that never comes."""
    ranks = Several()
    obeying = controller(FakeRun(command(), command("unknown")), Handler(error=error), ranks=ranks)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        obeying.obey(1)

    assert (ranks.overs, ranks.left) == (1, 1)


def test_another_rank_acts_on_what_rank_0_shares_and_answers_nothing():
    """Its run is inert."""
    asked = command()

    class Other(Several):
        rank = 1

        def meets(self, step, *, wanted, staying=False):
            assert not wanted  # nothing is due
            return not handler.calls

        def share(self, commands):
            return [asked]

    run, handler = FakeRun(), Handler()
    run.active = False
    controller(run, handler, ranks=Other()).obey(4)

    assert handler.calls == [asked]
    assert run.answers == []


def test_a_command_waits_in_the_run_for_the_boundary_where_all_ranks_meet():
    """Another rank has passed this one: it is neither taken nor answered before, and not asked for twice."""

    class Later(Several):
        def __init__(self):
            super().__init__()
            self.asked = []

        def meets(self, step, *, wanted, staying=False):
            self.asked.append((step, wanted))
            return wanted and step >= 8

    run, handler, ranks = FakeRun(command()), Handler(), Later()
    steward = controller(run, handler, ranks=ranks)
    steward.obey(7)
    assert (len(run.queue), run.answers, handler.calls) == (1, [], [])
    steward.obey(8)

    assert [r[:3] for r in run.results] == [("wave", "done", 8)]
    assert ranks.asked == [(7, True), (8, True), (8, False)]


def test_what_is_due_is_asked_for_once_at_a_boundary():
    """A handler that still finds it due, because it could not do it, does not hold the loop up."""

    class Limited(Handler):
        def due(self, step):
            return command("wave")

    handler = Limited(refusal="not now")
    controller(FakeRun(), handler, ranks=Several()).obey(7)
    assert handler.calls == []


def test_all_ranks_vote_also_on_what_none_can_do():
    """A rank without such a handler says so, rather than keep rank 0 waiting for its vote."""

    class Counting(Several):
        votes = ()

        def agree(self, refusal):
            self.votes += (refusal,)
            return super().agree(refusal)

    ranks = Counting()
    run = FakeRun(command("explode"))
    controller(run, ranks=ranks).obey(1)
    assert [vote.startswith("this trainer cannot do 'explode'") for vote in ranks.votes] == [True]
    assert run.results[0][3] == ranks.votes[0]


def test_without_a_run_nothing_happens():
    """An error boundary whose run was never made."""
    handler = Handler()
    Controller(ErrorBoundary(None), [handler]).obey(1)
    assert handler.calls == []


class Person:
    """Sleeps for the trainer: a manual clock moves on, and commands arrive after some rounds."""

    def __init__(self, run, arrivals):
        self.run, self.arrivals, self.clock, self.rounds = run, arrivals, ManualClock(), 0
        self.hold = PauseState(self.clock, self.sleep)

    def sleep(self, seconds):
        self.rounds += 1
        self.clock.advance(seconds)
        self.run.queue.extend(self.arrivals.get(self.rounds, []))


def test_a_paused_trainer_waits_for_resume():
    """It keeps listening, and says how long it waited."""
    run = FakeRun(command("pause", minutes=10))
    person = Person(run, {4: [command("resume")]})
    controller(run, hold=person.hold).obey(9)

    assert person.rounds == 4
    assert [r[:3] for r in run.results] == [("pause", "done", 9), ("resume", "done", 9)]
    assert run.results[1][3] == "resumed after 2 s"
    assert [e.body["command"] for e in run.events] == ["pause", "resume"]


def test_other_commands_are_carried_out_while_paused_and_stop_ends_the_pause():
    """A person pauses to act."""
    run = FakeRun(command("pause", minutes=10))
    person = Person(run, {1: [command()], 2: [command("pause")], 3: [command("stop")]})
    controller(run, Handler(), Handler("stop"), hold=person.hold).obey(9)

    assert person.rounds == 3
    assert [r[:2] for r in run.results] == [
        ("pause", "done"),
        ("wave", "done"),
        ("pause", "rejected"),
        ("stop", "done"),
    ]


def test_a_pause_ends_by_itself_when_its_time_is_up():
    """Nobody needs to remember it; the event says who resumed."""
    run = FakeRun(command("pause", minutes=1))
    person = Person(run, {})
    controller(run, hold=person.hold).obey(9)

    assert person.rounds == 120
    assert [e.body["command"] for e in run.events] == ["pause", "resume"]
    assert run.events[1].body["by"] == "rlwatch"
    assert len(run.answers) == 1


def test_a_pause_ends_with_the_run():
    """A run that was finished has nobody to resume it."""
    run = FakeRun(command("pause", minutes=60))
    person = Person(run, {})
    run_sleep = person.sleep
    person.hold = PauseState(person.clock, lambda s: (run_sleep(s), setattr(run, "active", False)))
    controller(run, hold=person.hold).obey(9)

    assert person.rounds == 1


def test_a_held_rank_that_hears_nothing_any_more_goes_on_by_itself():
    """Rank 0 died while all were paused."""

    class Widow(Several):
        rank = 1
        heard = 0

        def meets(self, step, *, wanted, staying=False):
            assert staying == bool(self.heard)
            self.heard += 1
            return self.heard == 1

        def share(self, commands):
            return [command("pause", minutes=1)]

    run = FakeRun()
    run.active = False
    person = Person(run, {})
    controller(run, ranks=Widow(), hold=person.hold).obey(9)

    assert person.rounds == (60 + GRACE_S) / 0.5


def test_a_pause_of_no_length_is_refused():
    """The row may have been written by anyone."""
    run = FakeRun(command("pause", minutes=0))
    controller(run).obey(1)
    assert run.results[0][1] == "rejected"
    assert "minutes=0 is not a number above 0" in run.results[0][3]


def test_what_rank_0_decides_by_itself_is_carried_out_and_not_answered():
    """An order is nobody's command: no event, no answer; a refusal is its result."""
    run, handler = FakeRun(), Handler("keep")
    steward = controller(run)
    assert steward.order(handler, None, 3) is None
    assert steward.order(handler, command("keep"), 3).report == {}
    assert steward.order(Handler("keep", refusal="disk full"), command("keep"), 3).refusal == "disk full"
    assert (len(handler.calls), run.events, run.answers) == (1, [], [])


def test_a_command_with_a_time_limit_is_taken_back_when_it_is_due():
    """By the handler's own word, and recorded as rlwatch's."""

    class Limited(Handler):
        def due(self, step):
            return command("wave", back=True) if step == 7 else None

    run, handler = FakeRun(), Limited()
    steward = controller(run, handler)
    for step in (6, 7, 8):
        steward.obey(step)

    assert [asked.args for asked in handler.calls] == [{"back": True}]
    assert [(e.step, e.body["command"]) for e in run.events] == [(7, "wave")]
    assert run.answers == []


def test_resume_without_a_pause_is_refused():
    """The words say so."""
    run = FakeRun(command("resume"))
    controller(run).obey(1)
    assert run.results == [("resume", "rejected", 1, "training is not paused")]


def test_the_second_answer_does_not_count():
    """A handler's command is answered by the controller alone."""
    run = FakeRun(command())
    controller(run, Handler()).obey(1)
    assert [a.status for a in run.answers] == [CommandStatus.DONE]


def test_a_command_whose_time_runs_out_while_others_are_asked_is_not_begun():
    """An earlier command takes long, or a rank lets the vote wait."""
    late = [False, False, True]
    run = FakeRun(command(), command("jump"))
    run.commands = lambda **_: (
        [PendingCommand(each, run.answers.append, lambda: late.pop(0)) for each in (run.queue.pop(0), run.queue.pop(0))]
        if run.queue
        else []
    )
    wave, jump = Handler(), Handler("jump")
    late[:] = [False, True]
    controller(run, wave, jump).obey(1)

    assert [(r[0], r[1]) for r in run.results] == [("wave", "done"), ("jump", "expired")]
    assert (len(wave.calls), jump.calls) == (1, [])


def test_all_ranks_are_told_that_it_is_too_late():
    """Rank 0 says so when all are ready: none may act alone."""
    run, said = FakeRun(), []

    class Slow(Several):
        def agree(self, refusal):
            said.append(refusal)
            return refusal

    waiter = PendingCommand(command(), run.answers.append, lambda: len(said) > 0)
    run.commands = lambda **_: [waiter] if not waiter.answered else []
    run.has_commands = lambda **_: not waiter.answered
    handler = Handler()
    controller(run, handler, ranks=Slow()).obey(1)

    assert said == [None, LATE]
    assert (handler.calls, [r[1] for r in run.results]) == ([], ["expired"])


def test_what_is_broken_off_has_failed():
    """Ctrl-C in the middle: nobody knows how far it came."""
    run = FakeRun(command())
    with pytest.raises(KeyboardInterrupt):
        controller(run, Handler(error=KeyboardInterrupt())).obey(1)

    assert run.results == [("wave", "failed", 1, BROKEN_OFF)]


def test_a_reset_may_be_recorded_once_its_step_is_measured():
    """Where that comes after the boundary: with the KL of its own step, or with none."""
    later = {}
    run = FakeRun(command("reset-reference"))
    reset = Handler("reset-reference", report={"summary": "reference = policy"})
    Controller(ErrorBoundary(run), [reset], latest=lambda: {"policy/kl_ref_k3": 9.0}, measured=later.__setitem__).obey(
        3
    )
    assert (run.events, [r[3] for r in run.results]) == ([], ["reference = policy"])
    later[3]({"policy/kl_ref_k3": 0.25})

    assert [(event.step, event.body["kl_before"]) for event in run.events] == [(3, 0.25)]
