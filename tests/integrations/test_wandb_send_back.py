"""Telling wandb what was found: in its own rows, on its own thread, and nothing else changed."""

import pytest
import wandb
from wandb_offline import offline_runs

import rlwatch
from rlwatch.alerts.rules import Rule
from rlwatch.control.policy import RunHealth
from rlwatch.forecast import Forecast
from rlwatch.integrations.wandb import SendBack
from rlwatch.monitor import MonitorOutcome
from rlwatch.records import Alert, AlertState, Finding, Severity

STEPS = 80


class Finder:
    """A run of ours that finds what the test says."""

    def __init__(self):
        self.findings, self.ear, self.forecast = (), None, None

    def listen(self, listener):
        self.ear = listener

    def health(self):
        return RunHealth(self.findings, forecast=self.forecast)

    def holds(self, **kinds):
        self.findings = tuple(Finding("d", kind, severity, 3, 2, "bad") for kind, severity in kinds.items())

    def fires(self, kind="collapse", state=AlertState.FIRING, severity=Severity.CRITICAL, notify=True):
        alert = Alert("id", "r", "rule", kind, severity, state, onset_step=7, step=9, message="it fell")
        self.ear(MonitorOutcome(transitions=(Told(alert, notify),)))


class Told:
    """What SendBack reads of a transition."""

    def __init__(self, alert, notify):
        self.alert, self.notify = alert, notify


class Theirs:
    """A wandb run that remembers what it was told."""

    def __init__(self):
        self.rows, self.alerts = [], []

    def log(self, data, step=None, commit=None):
        self.rows.append((data, step, commit))

    def alert(self, title, text, level):
        self.alerts.append((title, text, level))


@pytest.fixture
def back():
    run, theirs = Finder(), Theirs()
    return run, theirs, SendBack(run, theirs, Theirs.log)


def test_a_healthy_run_says_nothing(back):
    """No row, no metric, no alert."""
    _, theirs, send = back
    send.row(None)

    assert (theirs.rows, theirs.alerts) == ([], [])


def test_a_finding_is_a_metric_while_it_holds_and_zero_after(back):
    """1, 2, 3 for info, warning, critical; kinds never seen are absent."""
    run, theirs, send = back
    for kinds in ({"a": Severity.INFO}, {"a": Severity.CRITICAL, "b": Severity.WARNING}, {}):
        run.holds(**kinds)
        send.row(4)

    assert [row for row, _, _ in theirs.rows] == [
        {"rlwatch/a": 1},
        {"rlwatch/a": 3, "rlwatch/b": 2},
        {"rlwatch/a": 0, "rlwatch/b": 0},
    ]


def test_metrics_go_into_the_row_that_comes(back):
    """Its step, and left open for it."""
    run, theirs, send = back
    run.holds(a=Severity.INFO)
    send.row(4)
    send.row(None)

    assert [(step, commit) for _, step, commit in theirs.rows] == [(4, False), (None, False)]


@pytest.mark.parametrize(("severity", "level"), [("info", "INFO"), ("warning", "WARN"), ("critical", "ERROR")])
def test_a_firing_alert_is_said_once_at_wandbs_level(back, severity, level):
    """With what was found and since when."""
    run, theirs, send = back
    run.fires(severity=Severity(severity))
    send.row(None)
    send.row(None)

    assert theirs.alerts == [("rlwatch: collapse since step 7", "it fell", level)]


def test_a_title_is_as_short_as_wandb_wants_it(back):
    """Less than 64 characters."""
    run, theirs, send = back
    run.fires(kind="k" * 100)
    send.alerts()

    assert len(theirs.alerts[0][0]) == 63


def test_what_does_not_fire_or_shall_not_be_told_is_not(back):
    """Pending and resolved alerts, and those a rule keeps quiet."""
    run, theirs, send = back
    run.fires(state=AlertState.PENDING)
    run.fires(state=AlertState.RESOLVED)
    run.fires(notify=False)
    send.alerts()

    assert theirs.alerts == []


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """wandb says nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        yield


def collapse(theirs, tee):
    """A training whose entropy falls to nothing; each row waits until it was judged, as a slow training would."""
    for step in range(STEPS):
        theirs.log({"policy/entropy": 1.0 if step < 40 else 1e-4, "policy/vocab_size": 64, "i": step})
        if tee is not None:
            tee.run.flush()


@pytest.fixture(scope="module")
def collapses(tmp_path_factory):
    """The same collapse logged to offline wandb three times: alone, mirrored, and told what was found."""
    runs = {}
    for name in ("alone", "mirrored", "told"):
        root = tmp_path_factory.mktemp(name)
        tee = None if name == "alone" else rlwatch.tee_wandb(store=str(root / "runs"), send_back=name == "told")
        with wandb.init(mode="offline", dir=str(root), project="p") as theirs:
            collapse(theirs, tee)
        if tee is not None:
            tee.untee()
        (runs[name],) = offline_runs(root)
        runs[name].tee, runs[name].store = tee, str(root / "runs")
    return runs


def test_without_being_asked_nothing_is_sent_back(collapses):
    """Mirroring alone leaves wandb's run as it would have been."""
    assert collapses["mirrored"].plain == collapses["alone"].plain
    assert collapses["mirrored"].alerts == []


def test_what_is_sent_back_adds_no_row_and_moves_no_step(collapses):
    """The rows are the same but for our metrics, read back from what wandb wrote."""
    ours = ("rlwatch/", "forecast/")
    told = [{k: v for k, v in row.items() if not k.startswith(ours)} for row in collapses["told"].plain]

    assert told == collapses["alone"].plain
    assert [row["_step"] for row in told] == list(range(STEPS))


def test_the_metric_and_the_alert_follow_the_finding_by_one_row(collapses):
    """The row after the one that closed the step where it was found."""
    run = collapses["told"]
    first = next(row["_step"] for row in run.rows if "rlwatch/entropy_collapse" in row)
    stored = rlwatch.open_store(run.store)
    findings = stored.findings(run.tee.run.info.run_id)
    finding = next(each for each in findings if each.kind == "entropy_collapse")

    assert first == finding.step + 2  # closed by the next row, told with the one after it
    assert {row["rlwatch/entropy_collapse"] for row in run.rows[first:]} <= {1, 2, 3}
    collapse = {1: f"rlwatch: entropy_collapse since step {finding.onset_step}", 2: finding.message, 3: "ERROR"}
    assert [alert for alert in run.alerts if "crash_forecast" not in alert[1]] == [collapse]


def test_what_was_sent_back_is_not_mirrored(collapses):
    """No echo."""
    run = collapses["told"]

    assert not [
        n for n in rlwatch.open_store(run.store).metric_names(run.tee.run.info.run_id) if n.startswith("rlwatch/")
    ]


def test_an_alert_of_the_last_step_is_said_before_the_run_ends(tmp_path):
    """It is judged when the run finishes, and wandb's run ends after."""
    rules = [Rule("patient", for_steps=1)]
    with rlwatch.tee_wandb(store=str(tmp_path / "runs"), send_back=True, rules=rules):
        theirs = wandb.init(mode="offline", dir=str(tmp_path), project="p")
        for value in (1.0, float("nan"), float("nan")):
            theirs.log({"policy/entropy": value})
        theirs.finish()
    (run,) = offline_runs(tmp_path)

    assert [alert[1] for alert in run.alerts] == ["rlwatch: nonfinite since step 1"]
    assert len(run.rows) == 3


def test_the_forecast_goes_into_the_row_that_follows_once(back):
    """As metrics of wandb beside what holds; of a step without one, nothing."""
    run, theirs, send = back
    for forecast in (
        None,
        Forecast(3, absent="needs 40 steps"),
        Forecast(40, p50=0.7, risk=1.4),
        Forecast(41, p50=0.2),
    ):
        run.forecast = forecast
        send.row(None)
        send.row(None)

    assert [row for row, _, _ in theirs.rows] == [{"forecast/p50": 0.7, "forecast/risk": 1.4}, {"forecast/p50": 0.2}]
    assert {commit for _, _, commit in theirs.rows} == {False}
