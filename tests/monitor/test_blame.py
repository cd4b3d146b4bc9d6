"""What localisation said of a step stands beside what detectors find in it."""

from rlwatch.monitor import Monitor
from rlwatch.records import LOCALISED, Event, StepRecord

BODY = {
    "message": "one token contributes 51% of the gradient norm",
    "cause": "token ratio",
    "culprits": [{"share": 0.51}],
}


def observed(norms, events=()):
    """Findings of a run with these gradient norms; ``events`` arrive before the record of their step."""
    monitor, found = Monitor(), []
    for step, norm in enumerate(norms, 1):
        for event in events:
            if event.step == step:
                monitor.observe(event)
        found += monitor.observe(StepRecord(step, {"optim/grad_norm": norm, "reward/mean": 0.5}, seq=step)).findings
    return [*found, *monitor.close().findings]


def localised(step, **body):
    return Event(LOCALISED, step, {**BODY, **body})


SPIKED = [1.0 + 0.01 * (i % 5) for i in range(60)] + [40.0] + [1.0] * 5


def test_a_spike_is_told_with_its_culprits():
    """In words and in evidence."""
    (finding,) = [f for f in observed(SPIKED, [localised(61)]) if f.kind == "grad_spike"]

    assert finding.message.endswith("; one token contributes 51% of the gradient norm")
    assert finding.evidence["localised"]["culprits"] == [{"share": 0.51}]


def test_a_spike_that_was_not_localised_is_told_as_before():
    """And so is one at another step than the localised one."""
    plain = [f for f in observed(SPIKED) if f.kind == "grad_spike"]
    elsewhere = [f for f in observed(SPIKED, [localised(60)]) if f.kind == "grad_spike"]

    assert plain == elsewhere
    assert "localised" not in plain[0].evidence


def test_a_gradient_that_is_not_finite_is_told_with_where_it_began():
    """On arrival too."""
    found = observed([*SPIKED[:60], float("nan")], [localised(61, message="the advantage of token 7 is NaN")])

    assert any(f.kind == "nonfinite" and "the advantage of token 7" in f.message for f in found)


def test_findings_on_other_matters_are_left_alone():
    """A reward is not explained by a gradient."""
    norms = [1.0] * 80
    monitor, found = Monitor(), []
    for step, norm in enumerate(norms, 1):
        monitor.observe(localised(step))
        reward = 0.8 if step < 50 else 0.1
        found += monitor.observe(StepRecord(step, {"optim/grad_norm": norm, "reward/mean": reward}, seq=step)).findings

    assert "reward_drop" in {f.kind for f in found}
    assert all("localised" not in f.evidence for f in found)


def test_a_summary_that_is_not_there_adds_nothing():
    """Not localised, and no sentence: the reason is evidence."""
    (finding,) = [
        f
        for f in observed(SPIKED, [localised(61, message="", why_not="the gradient is zero")])
        if f.kind == "grad_spike"
    ]

    assert "; " not in finding.message[-20:]
    assert finding.evidence["localised"]["why_not"] == "the gradient is zero"
