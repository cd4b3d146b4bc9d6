"""Take a picture of every state of the dashboard, light and dark, on a phone, a small and a wide screen, on one sheet.

    python benchmarks/contact_sheet.py [--out DIR] [--only list,run-odd] [--themes light,dark] [--widths 390,1440]

The runs are those of the tests (``tests/app``); the browser is headless Chromium (``RLWATCH_CHROMIUM``, or
/usr/bin/chromium). ``sheet.html`` in the folder shows all pictures; look at them before a release.
"""

from __future__ import annotations

import argparse
import html
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAIT_MS = 120_000
WHOLE = "Math.min(4000, Math.max(innerHeight, document.querySelector('[data-testid=stMain]')?.scrollHeight ?? 0))"
"""Script that returns the height of a whole page in pixels, so that a picture shows what one would scroll to."""
HOSTILE = '<script>alert("name")</script> **bold** ' + "a very long name " * 9

Act = Callable[[Any], None]


def alive(where: Path) -> None:
    """Let the trainer of each live run give a sign of life, and take back what another picture archived."""
    from rlwatch.curation import edit_run
    from rlwatch.records import RunState
    from rlwatch.store.url import open_store

    store = open_store(str(where))
    for run in store.runs():
        if run.state is RunState.RUNNING:
            writer = store.amend_run(run.run_id)
            writer.heartbeat(time.time())
            writer.close()
        if run.curation.archived:
            edit_run(store, run.run_id, by="ann", archived=False)
    store.close()


def curve(place: int, *, lost: int = 10**9) -> Callable[[int], dict[str, float]]:
    """Return the metrics of a run by step; its entropy collapses at ``lost``."""
    draws = random.Random(place)

    def at(step: int) -> dict[str, float]:
        gone = step >= lost
        return {
            "reward": 0.2
            + 0.5 * (1 - math.exp(-step / 100))
            + 0.02 * draws.gauss(0, 1)
            - (0.3 if step > lost + 60 else 0),
            "entropy": 0.05 if gone else 1.0 - step / 1000 + 0.02 * draws.gauss(0, 1),
            "kl": 0.01 * step / 100 + 0.002 * draws.random() + (0.2 if gone else 0),
            "grad_norm": (9.0 if gone else 1.0) * math.exp(0.2 * draws.gauss(0, 1)),
            "completions/mean_length": 220 + 20 * draws.gauss(0, 1),
            "learning_rate": 1e-6,
        }

    return at


def make(where: Path) -> None:
    """Write the runs."""
    from app_world import alert, finding, put_alerts, write_run  # type: ignore[import-not-found]
    from rollout_world import write_rollouts  # type: ignore[import-not-found]
    from test_app_stages import spans  # type: ignore[import-not-found]
    from token_world import Spiked, write_spikes  # type: ignore[import-not-found]

    from rlwatch.records import Event, RunState
    from rlwatch.step_notes import add_step_note
    from rlwatch.store.url import open_store

    lost = finding(step=240, onset_step=220, message="entropy fell from 0.8 to 0.05 nats/token")
    config = {"optim": {"lr": 3e-6}, "seed": 1, "max_steps": 1000, "model": "qwen3-4b", "beta": 0.04}
    calm = curve(9)
    reset = Event("reference_reset", step=120)
    write_run(
        where, "danger", steps=300, name="math-7b-s3", metrics=curve(1, lost=220), findings=[lost], config=config,
        step_s=38, events=[reset],
    )  # fmt: skip
    put_alerts(where, [alert("danger", onset_step=220, step=240)])
    for place in range(4):
        lr, seed = (1e-6, 3e-6)[place % 2], place // 2
        own = {**config, "optim": {"lr": lr}, "seed": seed}
        write_run(
            where, f"seed-{place}", steps=300, name=f"sweep-lr{lr:g}-s{seed}", project="sweep", metrics=curve(place),
            config=own, state=RunState.FINISHED, age_s=3600 * (place + 2),
        )  # fmt: skip
    write_run(where, "calm", steps=400, name="code-32b", project="code", metrics=calm, config=config, step_s=12)

    def odd(step: int) -> dict[str, float]:
        bad = {"reward": math.nan if step > 40 else 0.1 * step, "kl": math.inf if step == 30 else 0.1}
        return {**calm(step), **bad}

    write_run(where, "odd", steps=60, name=HOSTILE, metrics=odd)
    crashed = {"state": RunState.CRASHED, "reason": "out of memory", "age_s": 9000}
    write_run(where, "dead", steps=100, name="moe-30b-r2", project="moe", metrics=curve(3), **crashed)
    write_spikes(where, [Spiked(40), Spiked(80, cause="")], (20, 60), run_id="spiked", steps=100, name="spiked")
    write_rollouts(where, run_id="texts")
    store = open_store(str(where))
    took = (("sampling", 21.0), ("reward", 4.0), ("logprobs", 3.0), ("update", 9.0), ("weight_sync", 1.0))
    writer = store.amend_run("danger")
    writer.write([spans(step, *took) for step in range(290, 301)])
    writer.close()
    alive(where)
    add_step_note(store, "danger", 150, "swapped the judge for the 14B one", by="ann")
    store.close()


def ready(page: Any) -> None:
    """Wait until the page is drawn."""
    page.wait_for_function(
        "() => document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'", timeout=WAIT_MS
    )
    page.wait_for_timeout(900)


def button(name: str, *more: str) -> Act:
    """Press buttons one after the other."""

    def act(page: Any) -> None:
        for label in (name, *more):
            page.get_by_role("button", name=label).first.click()
            page.wait_for_timeout(900)
            ready(page)

    return act


def nothing(page: Any) -> None:
    """Leave the page as it is."""


def ticked(page: Any) -> None:
    """Archive a run, so that the way back is offered."""
    page.get_by_role("checkbox", name="Select code-32b").check()
    ready(page)
    button("Archive")(page)


def chosen(page: Any) -> None:
    """Open the menu of commands."""
    page.get_by_role("button", name="Commands").click()
    page.wait_for_timeout(700)


def unfolded(page: Any) -> None:
    """Open the stages of the newest steps."""
    page.get_by_text("Stages of the newest steps").click()
    page.get_by_text("Stages of the newest steps").scroll_into_view_if_needed()


COMPARED = "compare?" + "&".join(f"runs=seed-{place}" for place in range(4))
ARRANGED = "pin=reward+%2B+grad_norm+%402&pin=entropy&pin=kl+%C3%B7+reward"
STATES: dict[str, tuple[str, Act]] = {
    "list": ("", nothing),
    "list-grouped": ("?group=optim.lr", nothing),
    "list-undo": ("", ticked),
    "run-danger": ("run?run=danger&live=false", nothing),
    "run-reset": ("run?run=danger&live=false", button("Reset reference…")),
    "run-rollback": ("run?run=danger&live=false", button("Roll back…")),
    "run-commands": ("run?run=danger&live=false", chosen),
    "run-notes": ("run?run=danger&live=false&at=150", button("Notes")),
    "run-stages": ("run?run=danger&live=false", unfolded),
    "run-dead": ("run?run=dead", nothing),
    "run-odd": ("run?run=odd&live=false", nothing),
    "run-arranged": (f"run?run=danger&live=false&{ARRANGED}", nothing),
    "compare": (COMPARED, nothing),
    "compare-groups": (f"{COMPARED}&group=optim.lr", nothing),
    "tokens": ("tokens?run=spiked&step=40", nothing),
    "rollouts": ("rollouts?run=texts", nothing),
    "incidents": ("alerts", nothing),
    "incident": ("alerts?incident=danger-entropy_collapse", nothing),
    "rules": ("rules", nothing),
    "forecasts": ("forecasts", nothing),
    "keys": ("", lambda page: page.keyboard.press("?")),
    "empty": ("", nothing),
}  # fmt: skip


def pictures(address: str, store: Path, names: list[str], themes: list[str], widths: list[int], out: Path) -> list[str]:
    """Take the pictures; returns what went wrong."""
    from playwright.sync_api import Error, sync_playwright

    import conftest  # type: ignore[import-not-found]

    wrong = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=conftest.chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        for theme in themes:
            for name in names:
                where, act = STATES[name]
                alive(store)
                context = browser.new_context(viewport={"width": max(widths), "height": 900}, color_scheme=theme)
                context.set_default_timeout(WAIT_MS)
                conftest.log_in(context, address)
                page = context.new_page()
                page.on("pageerror", lambda error, name=name: wrong.append(f"{name}: {error}"))
                try:
                    page.goto(f"{address}/{where}")
                    page.locator(".rl-who").wait_for()
                    page.locator("#rl-first").wait_for(
                        state="detached"
                    )  # what was drawn before the session is taken over
                    ready(page)
                    act(page)
                    for width in sorted(widths, reverse=True):
                        page.set_viewport_size({"width": width, "height": 844 if width < 600 else 900})
                        page.wait_for_timeout(700)
                        page.set_viewport_size({"width": width, "height": page.evaluate(WHOLE)})
                        page.wait_for_timeout(700)
                        page.screenshot(path=out / f"{name}-{theme}-{width}.png")
                        room = page.evaluate("document.documentElement.scrollWidth")
                        if room > width:
                            wrong.append(f"{name} {theme} {width}: {room - width} px to the side")
                except Error as error:
                    wrong.append(f"{name} {theme}: {str(error).splitlines()[0]}")
                context.close()
                print(name, theme, flush=True)
        browser.close()
    return wrong


def sheet(out: Path) -> None:
    """Write the page that shows all pictures."""
    shown = [path for path in sorted(out.glob("*.png")) if path.name != "sheet.png"]
    figures = "".join(
        f'<figure><a href="{html.escape(path.name)}"><img src="{html.escape(path.name)}"></a>'
        f"<figcaption>{html.escape(path.stem)}</figcaption></figure>"
        for path in shown
    )
    style = (
        "body{font:12px sans-serif;display:flex;flex-wrap:wrap;gap:12px}"
        "figure{margin:0} img{width:260px;border:1px solid #999}"
    )
    (out / "sheet.html").write_text(
        f"<!doctype html><meta charset=utf-8><title>rlwatch</title><style>{style}</style>{figures}"
    )


def main() -> None:
    """Make the store, serve it, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sheet")
    parser.add_argument("--only", default=",".join(STATES))
    parser.add_argument("--themes", default="light,dark")
    parser.add_argument("--widths", default="390,1024,1440")
    options = parser.parse_args()
    folders = ("tests/browser", "tests/app", "tests/processes", "tests/store", "tests")
    sys.path[:0] = [*(str(ROOT / folder) for folder in folders), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    import conftest

    options.out.mkdir(parents=True, exist_ok=True)
    widths, themes = [int(width) for width in options.widths.split(",")], options.themes.split(",")
    names, began, wrong = options.only.split(","), time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        full, bare = Path(scratch) / "runs", Path(scratch) / "none"
        make(full)
        bare.mkdir()
        for store, some in (
            (full, [name for name in names if name != "empty"]),
            (bare, [n for n in names if n == "empty"]),
        ):
            if some:
                with conftest.serving(str(store)) as address:
                    wrong += pictures(address, store, some, themes, widths, options.out)
    sheet(options.out)
    count, took = len(names) * len(themes) * len(widths), time.monotonic() - began
    print(f"{count} pictures in {took:.0f} s: {options.out}/sheet.html")
    print("\n".join(wrong) or "nothing is wider than its screen, no script failed")


if __name__ == "__main__":
    main()
