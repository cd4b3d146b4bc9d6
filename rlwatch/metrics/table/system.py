# ruff: noqa: E501  (one row of the table is one line or two)
"""Time, rlwatch's own counters, and its forecast."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, same

# fmt: off

ROWS: tuple[Metric, ...] = (
    Metric("time/step", Family.SYSTEM, "s", "duration of a step", 0.0, aliases=(
        same("step_time"), same("timing_s/step", "verl"), same("perf/time_per_step", "verl"),
        same("timing/step_total", "openrlhf"), same("time/step"), same("perf/step_time", "slime"))),
    Metric("time/throughput", Family.SYSTEM, "tokens/s", "tokens of prompts and responses processed per second (and GPU, where the trainer says so)", 0.0,
           aggregator="sum", aliases=(same("perf/throughput", "verl"),)),
    fraction("time/rollout_idle", Family.SYSTEM, "share of the time in which the rollout engines waited", aggregator="time fraction", aliases=(
        same("fully_async/rollouter/idle_ratio", "verl"),)),
    Metric("rlwatch/dropped", Family.SYSTEM, "records", "records rlwatch dropped so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/bad_values", Family.SYSTEM, "values", "values that were no numbers and were left out so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/bad_records", Family.SYSTEM, "records", "records that could not be taken so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/bad_calls", Family.SYSTEM, "calls", "calls that could not be understood so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/skipped", Family.SYSTEM, "calls", "work left out so far because its tap was switched off", 0.0, aggregator="cumulative"),
    Metric("rlwatch/unkept", Family.SYSTEM, "records", "records that were not in the journal before they were stored so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/late", Family.SYSTEM, "records", "records that came after their step closed", 0.0, aggregator="cumulative"),
    Metric("rlwatch/records", Family.SYSTEM, "records", "records since the last new step", 0.0, aggregator="sum"),
    Metric("rlwatch/records_usual", Family.SYSTEM, "records", "most records an earlier step had", 0.0, aggregator="maximum"),
    Metric("rlwatch/ranks", Family.SYSTEM, "ranks", "ranks whose share of the batch is in the step's statistics", 1.0),
    Metric("rlwatch/refused", Family.SYSTEM, "inputs", "inputs that did not fit and were left out so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/errors", Family.SYSTEM, "errors", "errors rlwatch swallowed so far", 0.0, aggregator="cumulative"),
    fraction("forecast/p20", Family.SYSTEM, "chance that a failure begins within 20 steps", aggregator="forecast"),
    fraction("forecast/p50", Family.SYSTEM, "chance that a failure begins within 50 steps", aggregator="forecast"),
    fraction("forecast/p100", Family.SYSTEM, "chance that a failure begins within 100 steps", aggregator="forecast"),
    Metric("forecast/risk", Family.SYSTEM, "", "how far the forecast is beyond its threshold: an alarm from 1", 0.0, aggregator="forecast"),
    Metric("forecast/steps_to", Family.SYSTEM, "steps", "expected steps until a limit is reached", 0.0, aggregator="forecast"),
)
# fmt: on
