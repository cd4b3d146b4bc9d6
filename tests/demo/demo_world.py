"""A run as the demo would leave it, written by hand: curves, findings, commands, alerts, messages, deliveries."""

from dataclasses import dataclass, field, replace
from itertools import count

from rlwatch.demo import Recipe
from rlwatch.demo.checks import look
from rlwatch.records import (
    CRASH_FORECAST,
    Alert,
    AlertState,
    Command,
    CommandStatus,
    Event,
    Finding,
    OutboxMessage,
    OutboxStatus,
    RunInfo,
    RunState,
    Severity,
    StepRecord,
)
from rlwatch.store.memory import MemoryStore
from rlwatch.view import stored_diagnosis

RUN = "demo-1"
RECIPE = Recipe()
RESET, REFUSED = 90, 240
NOW = 1_000_000.0
_worlds = count()


def healthy(step):
    """Reward rises, entropy falls, KL is level at 0.4 until the reset and starts again from nothing."""
    since = step if step <= RESET else step - RESET - 1
    return {
        "reward": 0.1 + 0.4 * min(1.0, step / 150),
        "entropy": 1.4 - 0.9 * min(1.0, step / 150),
        "kl": 0.4 * min(1.0, since / 20),
        "frac_reward_zero_std": 0.02,
        "learning_rate": RECIPE.learning_rate_at(step),
    }


def dead(step):
    return {"reward": -0.18, "entropy": 0.001, "kl": 2.5, "frac_reward_zero_std": 1.0}


def finding(kind, severity, step, message="so it is"):
    return Finding(kind, kind, severity, step, step, message, seq=step)


def alert(kind, severity, step, **changes):
    made = Alert(
        f"a-{kind}", RUN, "rule", kind, severity, AlertState.FIRING, step, step, f"{kind}!", detector=kind, fired_at=NOW
    )
    return replace(made, **changes)


def command(number, status, step, result):
    return Command(
        f"c{number}", RUN, "reset-reference", status=status, requested_by="ann", why="why not",
        idempotency_key=str(number), created_at=NOW + number, finished_step=step, result=result,
    )  # fmt: skip


@dataclass
class Post:
    """A delivery as the receiver tells of it."""

    severity: str = "critical"
    verified: bool | None = True
    text: str = "[firing critical] all is lost"

    @property
    def payload(self):
        return {"text": self.text, "alert": {"severity": self.severity}}


@dataclass
class World:
    """Everything that can be true or not; ``facts()`` puts it into a store and looks."""

    steps: int = RECIPE.steps
    curve: object = healthy
    death: int | None = 230
    findings: list = field(
        default_factory=lambda: [
            finding("kl_saturation", Severity.INFO, 80, "flat"),
            finding(CRASH_FORECAST, Severity.WARNING, 205, "a failure is likely"),
            finding("entropy_collapse", Severity.WARNING, 212),
            finding("entropy_collapse", Severity.CRITICAL, 235),
        ]
    )
    commands: list = field(
        default_factory=lambda: [
            command(1, CommandStatus.DONE, RESET, "KL 0.4 -> 0"),
            command(2, CommandStatus.REJECTED, REFUSED, "refused: entropy_collapse since step 212"),
        ]
    )
    alerts: list = field(default_factory=lambda: [alert("entropy_collapse", Severity.CRITICAL, 235)])
    events: list = field(default_factory=lambda: [Event("reference_reset", RESET, {"exact": True})])
    outbox: list = field(
        default_factory=lambda: [OutboxMessage("m1", RUN, "a-1", "webhook", {}, status=OutboxStatus.SENT)]
    )
    state: RunState = RunState.FINISHED

    def row(self, step):
        late = self.death is not None and step >= self.death
        return dead(step) if late else self.curve(step)

    def store(self):
        store = MemoryStore(f"demo-world-{next(_worlds)}")
        writer = store.open_run(RunInfo(RUN, project="demo", source="trl/grpo"))
        rows = [StepRecord(step, self.row(step), seq=step) for step in range(1, self.steps + 1)]
        writer.write([*rows, *self.findings, *self.events])
        for wish in self.commands:
            settle(store, wish)
        store.put_alerts(self.alerts, self.outbox)
        if self.state is not RunState.RUNNING:
            writer.finish(self.state, "", NOW)
        writer.close()
        return store

    def facts(self):
        return look(self.store(), RUN)

    def diagnosis(self):
        store = self.store()
        return stored_diagnosis(store, store.run(RUN))


def settle(store, wish):
    """Bring a command into the state it is said to be in, the way a trainer would."""
    store.submit(replace(wish, status=CommandStatus.QUEUED, result="", finished_step=None))
    if wish.status is CommandStatus.QUEUED:
        return
    store.claim(RUN, NOW)
    if wish.status is not CommandStatus.CLAIMED:
        store.settle(RUN, wish.command_id, wish.status, NOW, step=wish.finished_step, result=wish.result)
