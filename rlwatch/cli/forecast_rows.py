"""What was forecast of a run, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlwatch.cli.console import say
from rlwatch.cli.wording import step
from rlwatch.records import JSON, ForecastRecord

if TYPE_CHECKING:
    from rlwatch.forecast import Forecast


def newest_row(records: Sequence[ForecastRecord]) -> dict[str, JSON] | None:
    """The newest forecast as a script reads it, why included; None where there is none."""
    from dataclasses import asdict

    from rlwatch.forecast.record import forecast_of

    return asdict(forecast_of(records[-1])) if records else None


def forecast_line(said: Sequence[Forecast], *, now: bool = False) -> str:
    """The highest chance and the first alarm; ``now``: the newest chance, too. Empty where nothing was forecast.

    >>> from rlwatch.forecast import Forecast
    >>> forecast_line([Forecast(40, p50=0.02), Forecast(41, p50=0.83, alarm=True), Forecast(42, p50=0.5)], now=True)
    'forecast: now 50 % within 50 steps; highest 83 % at step 41; alarm from step 41'
    """
    alarms = [forecast.step for forecast in said if forecast.alarm]
    known = [forecast for forecast in said if forecast.p50 is not None]
    if not known:
        return _by_limits(said, alarms)
    highest = max(known, key=lambda forecast: forecast.p50 or 0.0)
    parts = [f"now {percent(known[-1].p50)} within 50 steps"] if now else []
    parts.append(f"highest {percent(highest.p50)}{'' if now else ' within 50 steps'} at step {step(highest.step)}")
    parts.append(f"alarm from step {step(alarms[0])}" if alarms else "no alarm")
    return f"forecast: {'; '.join(parts)}"


def _by_limits(said: Sequence[Forecast], alarms: Sequence[int]) -> str:
    """Of a run that logs too little for a chance: whether a limit came near, and why no more is said."""
    reasons = [forecast.limits_only for forecast in said if forecast.limits_only]
    if not reasons:
        return ""
    near = f"a limit is near from step {step(alarms[0])}" if alarms else "no limit came near"
    return f"forecast: {near}; {reasons[-1]}"


def percent(chance: float | None) -> str:
    """Whole per cents, and what is hardly anything as such.

    >>> percent(0.734), percent(0.002), percent(0.999)
    ('73 %', 'under 1 %', 'over 99 %')
    """
    chance = chance or 0.0
    if chance < 0.01:
        return "under 1 %"
    return "over 99 %" if chance > 0.99 else f"{chance:.0%}".replace("%", " %")


def print_forecast(records: Sequence[ForecastRecord], *, now: bool = False) -> None:
    """The line, or why there is none; nothing of a run nobody forecast."""
    from rlwatch.forecast.record import forecast_of

    said = [forecast_of(record) for record in records]
    line = forecast_line(said, now=now)
    if line:
        say(line, style="yellow" if said[-1].alarm or "alarm from" in line else "")
    elif said and now:
        say(said[-1].absent, style="dim")
