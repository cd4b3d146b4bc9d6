"""Chart libraries beside each other in Streamlit components of the second version, in headless Chromium.

``npm pack uplot echarts vega``, unpack each into ``DIR/NAME``, then ``python benchmarks/chart_libraries.py DIR``. One
row a library and case: seconds from the address to the first chart, kilobytes over the websocket until then and a
refresh, milliseconds of the browser's main thread a refresh, and its JavaScript heap. Every refresh brings other
numbers.
``st.echarts_chart`` is Streamlit's own ECharts (JSON alone; its script comes over HTTP and is not counted).
"""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser, sync_playwright

CASES = ((27, 480), (6, 100_000))
"""Panels and points: those of a run's page, thinned as it does; and whole series."""
VARIANTS = ("uplot", "echarts", "vega", "st.echarts_chart")
ROUNDS, TICKS, EVERY_S = 2, 2, 5.0
SCRIPTS = {
    "uplot": "uplot/package/dist/uPlot.iife.min.js",
    "echarts": "echarts/package/dist/echarts.min.js",
    "vega": "vega/package/build/vega.min.js",
}
LOADED = {"uplot": "globalThis.uPlot = uPlot", "echarts": "", "vega": ""}

DRAW = {
    "uplot": """
  for (const [i, ys] of data.panels.entries()) {
    if (held[i]) { held[i].setData([data.x, ys]); continue; }
    held[i] = new uPlot({ width: 380, height: 170, scales: { x: { time: false } }, legend: { show: false },
      series: [{}, { stroke: "#0072B2" }] }, [data.x, ys], place(i));
  }""",
    "echarts": """
  for (const [i, ys] of data.panels.entries()) {
    held[i] ??= echarts.init(place(i), null, { width: 380, height: 170 });
    held[i].setOption({ animation: false, xAxis: { type: "value" }, yAxis: { scale: true },
      tooltip: { trigger: "axis" },
      series: [{ type: "line", showSymbol: false, data: ys.map((y, j) => [data.x[j], y]) }] });
  }""",
    "vega": """
  for (const [i, ys] of data.panels.entries()) {
    const rows = ys.map((y, j) => ({ x: data.x[j], y }));
    if (held[i]) { held[i].data("t", rows).run(); continue; }
    held[i] = new vega.View(vega.parse({ width: 330, height: 130, padding: 5, data: [{ name: "t", values: rows }],
      scales: [{ name: "x", domain: { data: "t", field: "x" }, range: "width" },
               { name: "y", domain: { data: "t", field: "y" }, range: "height" }],
      axes: [{ orient: "bottom", scale: "x" }, { orient: "left", scale: "y" }],
      marks: [{ type: "line", from: { data: "t" }, encode: { update: { x: { scale: "x", field: "x" },
        y: { scale: "y", field: "y" }, stroke: { value: "#0072B2" } } } }] }),
      { renderer: "canvas", container: place(i) });
    held[i].run();
  }""",
}

APP = '''
import os
from pathlib import Path
import numpy as np
import streamlit as st

variant, panels, points, every, scripts = {variant!r}, {panels}, {points}, {every}, Path({scripts!r})
st.set_page_config(layout="wide")
if variant != "st.echarts_chart":
    code = (scripts / {path!r}).read_text(encoding="utf-8")
    tail = "; {loaded}; globalThis.ready = true; export default function () {{}}"
    st.components.v2.component("library", js="var module, exports, define;" + code + "\\n" + tail)(key="library")
STUB = """
export default async function (component) {{
  while (!globalThis.ready) await new Promise((done) => setTimeout(done, 10));
  const {{ data, parentElement }} = component, held = (parentElement.held ??= []);
  const place = (i) => parentElement.appendChild(document.createElement("div"));
  {draw}
  document.body.dataset.drawn = Number(document.body.dataset.drawn ?? 0) + 1;
}}"""

def numbers():
    walks = np.random.default_rng().normal(size=(panels, points)).cumsum(1)
    return [[round(float(y), 6) for y in row] for row in walks]

@st.fragment(run_every=every)
def show():
    x = list(range(points))
    if variant != "st.echarts_chart":
        st.components.v2.component("board", js=STUB)(key="board", data={{"x": x, "panels": numbers()}})
        return
    for i, ys in enumerate(numbers()):
        st.echarts_chart(
            {{"animation": False, "xAxis": {{"type": "value"}}, "yAxis": {{"scale": True}},
              "tooltip": {{"trigger": "axis"}},
              "series": [{{"type": "line", "showSymbol": False, "data": [list(p) for p in zip(x, ys)]}}]}},
            height=170, key=f"c{{i}}")

show()
'''


def measured(browser: Browser, address: str, variant: str) -> tuple[float, float, float, float, float]:
    """First chart (s), bytes until then and a tick (kB), main thread a tick (ms), heap (MB)."""
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    sizes: list[int] = []
    page.on("websocket", lambda opened: opened.on("framereceived", lambda sent: sizes.append(len(sent))))
    began = time.perf_counter()
    page.goto(address)
    first = "canvas" if variant == "st.echarts_chart" else "body[data-drawn]"
    page.wait_for_selector(first, state="attached", timeout=180_000)
    seconds, loaded = time.perf_counter() - began, sum(sizes)
    page.wait_for_timeout(1000 * EVERY_S / 2)
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable")

    def spent() -> dict[str, float]:
        return {one["name"]: one["value"] for one in client.send("Performance.getMetrics")["metrics"]}

    before, sent = spent(), sum(sizes)
    page.wait_for_timeout(1000 * EVERY_S * TICKS)
    after = spent()
    page.close()
    busy = 1000 * (after["TaskDuration"] - before["TaskDuration"]) / TICKS
    return seconds, loaded / 1e3, (sum(sizes) - sent) / TICKS / 1e3, busy, after["JSHeapUsedSize"] / 1e6


def rounds(browser: Browser, scripts: Path, variant: str, panels: int, points: int) -> list[float]:
    """Medians over pages of one server, the first of which warms it up."""
    text = APP.format(
        variant=variant, panels=panels, points=points, every=EVERY_S, scripts=str(scripts), path=SCRIPTS.get(variant),
        loaded=LOADED.get(variant, ""), draw=DRAW.get(variant, ""),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        script = Path(directory, "app.py")
        script.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "streamlit", "run", str(script), "--server.headless", "true"]
        command += ["--server.port", str(port), "--server.address", "127.0.0.1", "--browser.gatherUsageStats", "false"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                address = f"http://127.0.0.1:{port}"
                _await(port)
                measured(browser, address, variant)
                found = [measured(browser, address, variant) for _ in range(ROUNDS)]
            finally:
                server.terminate()
    return [median(column) for column in zip(*found, strict=True)]


def _await(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"streamlit did not open port {port} within 60 s")


def main(scripts: Path) -> None:
    """Print the table."""
    for name, path in SCRIPTS.items():
        code = (scripts / path).read_bytes()
        print(f"{name}: {len(code) / 1e3:.0f} kB, {len(gzip.compress(code, 9)) / 1e3:.0f} kB gzipped")
    print("| case | drawn by | first chart, s | kB at first | kB a refresh | main thread a refresh, ms | heap, MB |")
    print("|---|---|---|---|---|---|---|")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("RLWATCH_CHROMIUM", "/usr/bin/chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        for panels, points in CASES:
            for variant in VARIANTS:
                row = rounds(browser, scripts, variant, panels, points)
                cells = " | ".join(f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in row)
                print(f"| {panels} x {points} | {variant} | {cells} |", flush=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
