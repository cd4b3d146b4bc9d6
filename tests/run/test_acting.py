"""An action policy in a live run: a command like a person's, or a record of why not."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import rlwatch
from rlwatch.alerts.config import ACTIONS, default_toml, load_config
from rlwatch.alerts.engine import DecisionReason
from rlwatch.control.policy import PermittedAction
from rlwatch.errors import ConfigError, ControlUnavailableError, StoreBusyError
from rlwatch.records import Alert, AlertState, CommandStatus, RunInfo, Severity
from rlwatch.run.alerting import ACTION_EVENT, Acting, actions_of, rescue_of
from rlwatch.store.url import open_store


def alert(step=100, kind="kl_saturation"):
    return Alert(f"a{step}", "r", "rule", kind, Severity.WARNING, AlertState.FIRING, step - 5, step, "KL is flat")


def outcome(*alerts, reason=DecisionReason.HELD_FOR):
    return SimpleNamespace(findings=(), transitions=tuple(SimpleNamespace(alert=a, reason=reason) for a in alerts))


def acting(store, **kwargs):
    """The policy with one action, and the events it records."""
    events = []
    given = {"name": "due", "kinds": ("kl_saturation",), "do": "reset-reference", "dry_run": False, **kwargs}
    policy = Acting(
        [PermittedAction(**given)], store, "r", lambda kind, step, **body: events.append((kind, step, body))
    )
    return policy, events


def a_store(name):
    store = open_store(f"memory://acting-{name}")
    store.open_run(RunInfo("r"))
    return store


def test_an_alert_that_fires_becomes_a_command_with_who_and_why():
    """Queued as a person's would be, and recorded as an event."""
    store = a_store("asked")
    policy, events = acting(store, args={"optimizer": "keep"})
    policy(outcome(alert()))
    (command,) = store.commands("r")

    assert (command.kind, command.args, command.status) == (
        "reset-reference",
        {"optimizer": "keep"},
        CommandStatus.QUEUED,
    )
    assert command.requested_by == "policy:due"
    assert command.why == "kl_saturation since step 95: KL is flat"
    assert [(kind, step, body["outcome"]) for kind, step, body in events] == [(ACTION_EVENT, 100, "requested")]
    assert not command.force


def test_a_dry_run_asks_nothing_and_says_what_it_would_have_asked():
    """With the same budget and cool-down."""
    store = a_store("dry")
    policy, events = acting(store, dry_run=True, most=2, cooldown_steps=50)
    for step in (100, 120, 160, 400):
        policy(outcome(alert(step)))

    assert store.commands("r") == []
    assert [body["outcome"] for _, _, body in events] == ["dry run", "refused", "dry run", "refused"]
    assert "cools down until step 150" in events[1][2]["why_not"]
    assert "budget of 2" in events[3][2]["why_not"]


def test_only_what_is_published_is_acted_upon():
    """Not an alert that waits, flickers or ends."""
    store = a_store("silent")
    policy, events = acting(store)
    for reason in (
        DecisionReason.FIRST_PENDING,
        DecisionReason.STILL_FIRING_SILENT,
        DecisionReason.RESOLVED,
        DecisionReason.CONDITION_GONE,
    ):
        policy(outcome(alert(), reason=reason))
    policy(outcome(alert(kind="kl_drift")))

    assert store.commands("r") == []
    assert events == []


def test_a_refusal_is_recorded_once_for_each_alert_and_reason():
    """However often the alert gets worse; another reason, and another alert, are news."""
    policy, events = acting(a_store("worse"), most=2, cooldown_steps=50)
    policy(outcome(alert(100)))
    first = alert(110)
    for step in (110, 115, 120):
        policy(outcome(replace(first, step=step), reason=DecisionReason.ESCALATED))
    policy(outcome(alert(130)))
    policy(outcome(alert(160)))
    policy(outcome(replace(first, step=170), reason=DecisionReason.ESCALATED))

    assert [(step, body["alert"], body.get("why_not")) for _, step, body in events] == [
        (100, "a100", None),
        (110, "a110", "it cools down until step 150"),
        (130, "a130", "it cools down until step 150"),
        (160, "a160", None),
        (170, "a110", "its budget of 2 in this run is spent"),
    ]


def test_a_run_relived_asks_once():
    """The same alert at the same step has the same key; the budget is read from the store."""
    store = a_store("relived")
    acting(store)[0](outcome(alert()))
    again, events = acting(store)
    again(outcome(alert()))
    again(outcome(alert(900)))

    assert len(store.commands("r")) == 1
    assert [body["outcome"] for _, _, body in events] == ["refused", "refused"]


def test_a_busy_store_is_asked_again_later():
    """Nothing is lost, nothing raised."""
    store, busy = a_store("busy"), [True]

    class Busy:
        def commands(self, run_id):
            if busy[0]:
                raise StoreBusyError("locked")
            return store.commands(run_id)

        def submit(self, command):
            return store.submit(command)

    policy, events = acting(Busy())
    policy(outcome(alert()))
    assert events == []
    busy[0] = False
    policy(outcome())

    assert len(store.commands("r")) == 1
    assert len(events) == 1


def test_a_store_without_commands_is_said_once_for_each_alert():
    """On a network file system nobody can be asked."""

    class Nowhere:
        def commands(self, run_id):
            raise ControlUnavailableError("not available on a network file system")

    policy, events = acting(Nowhere())
    policy(outcome(alert()))

    assert events[0][2]["outcome"] == "refused"
    assert "network file system" in events[0][2]["why_not"]


CONFIG = """
[[actions]]
name = "slow down"
kinds = ["nonfinite"]
do = "lower-lr"
args = { scale = 0.3 }
min_severity = "critical"
dry_run = false
"""


def written(tmp_path, text):
    path = tmp_path / "rlwatch.toml"
    path.write_text(text)
    return path


def test_a_live_run_asks_itself_what_its_configuration_permits(tmp_path):
    """From the file through detector, alert and policy to a queued command."""
    with rlwatch.init(store=tmp_path / "runs", config_file=written(tmp_path, CONFIG), run_id="r") as run:
        for step in range(1, 30):
            run.log({"optim/grad_norm": 1.0, "policy/entropy": 0.5, "loss/policy": 0.1}, step=step)
        for step in range(30, 34):
            run.log({"optim/grad_norm": float("nan"), "policy/entropy": float("nan")}, step=step)
        run.flush()
    store = open_store(tmp_path / "runs")
    (command,) = store.commands("r")
    (event,) = [event for event in store.events("r") if event.kind == ACTION_EVENT]

    assert (command.kind, command.args["scale"], command.requested_by) == ("lower-lr", 0.3, "policy:slow down")
    assert event.body["outcome"] == "requested"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ('do = "lower-lr"\nargs = { scale = 0.3 }', 'do = "lower"'),
        ("dry_run = false", "dry_runs = false"),
        ('kinds = ["nonfinite"]', 'kinds = "nonfinite"'),
    ],
)
def test_a_wrong_permission_is_refused_before_the_run_begins(tmp_path, wrong, says):
    """Naming the file."""
    path = written(tmp_path, CONFIG.replace(wrong, says))
    with pytest.raises(ConfigError, match=r"rlwatch\.toml"):
        rlwatch.init(store=tmp_path / "runs", config_file=path)


def test_two_permissions_of_one_name_are_refused(tmp_path):
    """Their commands could not be told apart."""
    with pytest.raises(ConfigError, match="more than one is named 'slow down'"):
        rlwatch.init(store=tmp_path / "runs", config_file=written(tmp_path, CONFIG * 2))


def test_a_rescue_is_permitted_by_the_owners_file_alone(tmp_path):
    """Tried out by default; a file in a store permits none; one that is out of range is named."""
    permitted = rescue_of(load_config(written(tmp_path, "[[rescue]]\nprobe = 3\nscale = 1\n")))
    store = tmp_path / "store"
    store.mkdir()
    written(store, "[[rescue]]\ndry_run = false\n")
    foreign = load_config(store_root=store, env={})

    assert (permitted.probe, permitted.scale, permitted.dry_run) == (3, 1, True)
    assert rescue_of(foreign) is None
    assert "[[rescue]]" in foreign.refused
    with pytest.raises(ConfigError, match=r"rlwatch.toml.*scale must be above 0"):
        rescue_of(load_config(written(tmp_path, "[[rescue]]\nscale = 0.0\n")))
    with pytest.raises(ConfigError, match="rescue"):
        load_config(written(tmp_path, "[[rescue]]\n[[rescue]]\n"))


def test_a_live_run_knows_its_permission(tmp_path):
    """From the file that it was given; without one there is none."""
    file = written(tmp_path, "[[rescue]]\nmost = 1\n")
    with rlwatch.init(store=tmp_path / "a", config_file=file) as run:
        assert run.rescue.most == 1
    with rlwatch.init(store=tmp_path / "b", config_file=written(tmp_path, "")) as run:
        assert run.rescue is None


def test_without_the_file_nothing_is_permitted(tmp_path):
    """And with the file that `rlwatch rules init` writes neither: all of it is commented out."""
    config = load_config(written(tmp_path, default_toml()))

    assert actions_of(config) == ()
    assert rescue_of(config) is None
    assert actions_of(load_config(store_root=tmp_path / "nowhere", env={})) == ()
    uncommented = default_toml() + "".join(
        line.removeprefix("# ") + "\n" for line in ACTIONS.split("# [[actions]]")[1].splitlines() if "=" in line
    ).replace("name =", "[[actions]]\nname =", 1)
    (action,) = actions_of(load_config(written(tmp_path, uncommented)))
    assert action.do == "reset-reference"
    assert action.dry_run


@pytest.mark.parametrize("permitted", [True, False])
def test_a_live_run_names_settings_that_changed_where_a_rescue_is_permitted(tmp_path, permitted):
    """It follows them for the policy alone: that costs time, and nothing else of a live run reads them."""
    file = written(tmp_path, "[[rescue]]\n" if permitted else "")
    run = rlwatch.init(store=tmp_path / "runs", config_file=file, source="trl/grpo", sigterm=False, forecast=False)
    for step in range(1, 121):
        gone = step >= 90
        reward = 0.02 if gone else 0.3 + 0.4 * min(step / 60, 1.0) + 0.01 * (step % 3)
        row = {"reward": reward, "entropy": 2.5 if gone else 1.0, "kl": 0.01, "grad_norm": 1.0}
        run.log(row | {"learning_rate": 1e-3 if step >= 80 else 1e-5}, step=step)
    run.flush(30.0)
    deadline = time.monotonic() + 60.0
    while not run.health().alerts and time.monotonic() < deadline:
        time.sleep(0.05)
    named = [(one.metric, one.since, one.before) for one in run.health().named]
    run.finish()

    assert named == ([("optim/lr", 80, 1e-5)] if permitted else [])
