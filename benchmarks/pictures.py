"""Make the pictures of the first hour: ``make pictures``, from the sample logs and the real dashboard.

    python benchmarks/pictures.py [--out docs/pictures] [--only terminal|dashboard]

The terminal is the real command's output, coloured as on a terminal; the dashboard is ``rlwatch ui`` over a store into
which the sample logs were imported, seen by headless Chromium (``RLWATCH_CHROMIUM``, or /usr/bin/chromium).
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "sample_logs"
COLLAPSE = "entropy-collapse-trl-console.log"
WIDTH, LINES = 118, 16
TERMINALS = {
    "scan": ["scan", COLLAPSE],
}
RUN = "entropy-collapse-trl-console"


def rlwatch(*arguments: str, store: Path, **more: str) -> str:
    """What a command prints, in a directory of sample logs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "RLWATCH_STORE": str(store), "COLUMNS": str(WIDTH), **more}
    command = [sys.executable, "-m", "rlwatch.cli", *arguments]
    return subprocess.run(command, cwd=LOGS, env=env, capture_output=True, text=True, check=False).stdout


def terminal(command: list[str], store: Path) -> str:
    """The first lines of a command's output as SVG; it names no font of the network."""
    from rich.console import Console
    from rich.text import Text

    lines = rlwatch(*command, store=store, FORCE_COLOR="1").splitlines()
    left = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join([f"$ rlwatch {' '.join(command)}", *lines[:LINES], *left])), soft_wrap=False)
    svg = console.export_svg(title="rlwatch", unique_id=f"rlwatch-{command[0]}")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, ", "")


def screenshots(store: Path, out: Path) -> None:
    """The list of runs and the page of one that collapsed."""
    from playwright.sync_api import sync_playwright

    from rlwatch.cli import ui
    from rlwatch.cli.app_login import Login, LoginToken, place

    where = place("127.0.0.1", ui.free_port("127.0.0.1"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    server = ui.start_server(
        ui.app_script(), where, Login({"viewer": LoginToken("look")}, "key"), str(store), quiet=True
    )
    try:
        problem = ui.wait_healthy(server, where.local)
        if problem is not None:
            raise SystemExit(problem)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=os.environ.get("RLWATCH_CHROMIUM", "/usr/bin/chromium"),
                args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            )
            context = browser.new_context(viewport={"width": 1280, "height": 800})
            context.request.post(f"{where.local}/login", form={"token": "look", "name": "ann"}, max_redirects=0)
            page = context.new_page()
            page.goto(where.local)
            page.locator(".rl-who").wait_for(timeout=120_000)  # Streamlit's page, not the first picture of it
            page.get_by_role("link", name=RUN).wait_for(timeout=120_000)
            page.wait_for_timeout(3000)
            page.screenshot(path=out / "runs.png")
            page.get_by_role("link", name=RUN).click()
            page.locator(".u-over").first.wait_for(timeout=120_000)
            page.wait_for_timeout(3000)
            page.screenshot(path=out / "run.png")
            browser.close()
    finally:
        ui.stop_server(server)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", choices=("terminal", "dashboard"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "runs"
        if options.only != "dashboard":
            for name, command in TERMINALS.items():
                (options.out / f"{name}.svg").write_text(terminal(command, store))
        if options.only != "terminal":
            for log in sorted(path for path in LOGS.iterdir() if path.suffix in (".log", ".jsonl", ".json", ".csv")):
                rlwatch("import", log.name, store=store)
            screenshots(store, options.out)


if __name__ == "__main__":
    main()
