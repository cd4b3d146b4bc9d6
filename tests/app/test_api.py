"""The data endpoint: what it promises to scripts and pages, behind the gate and whatever is asked of it."""

import asyncio
import gzip
import json
import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from app_world import danger_run, runs_page, tables, write_run
from rlwatch_app import api, endpoint, gate
from starlette.applications import Starlette
from starlette.testclient import TestClient

from rlwatch.records import RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store
from rlwatch.view import view_of_run

OURS = "http://localhost:8501"
TOKENS = {"operator": "the operator's token", "viewer": "a viewer's own token"}
DOCUMENT = json.loads(api.OPENAPI.read_text())
HOSTILE = ["..", "...", "%2e%2e", "..%2f..%2fetc%2fpasswd", "a%00b", "%3Cscript%3E", "x" * 5000, "%F0%9F%92%A9", "-1", " ", "CON", "run-1%0d%0aSet-Cookie:x"]  # fmt: skip


def client(role="operator", base=""):
    """A client of the endpoint behind the gate, logged in; without a role not."""
    settings = gate.GateSettings(origins=[OURS], port=8501, tokens=TOKENS, secret="s" * 32, base_path=base)
    behind = gate.Gate(Starlette(routes=endpoint.routes(base)), settings)
    made = TestClient(behind, base_url=OURS, client=("10.0.0.9", 5000), follow_redirects=False)
    if role:
        assert made.post(f"{base}/login", data={"token": TOKENS[role], "name": "ann"}).status_code == 303
    return made


def fits(answer, path, status=200):
    """The body, which is strict JSON and as the document describes it."""
    assert answer.status_code == status, answer.text[:300]
    body = json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"no JSON: {word}"))
    schema = DOCUMENT["paths"][path]["get"]["responses"][str(status)]["content"]["application/json"]["schema"]
    jsonschema.validate(body, {**schema, "components": DOCUMENT["components"]}, jsonschema.Draft202012Validator)
    return body


SERIES, STATE = "/api/runs/{run_id}/series", "/api/runs/{run_id}/state"


def test_state_and_headline_are_those_of_the_engine(store_dir):
    """Word by word, in the list and of the run, as every other interface has them."""
    danger_run(store_dir)
    write_run(store_dir, "calm", state=RunState.FINISHED)
    store = open_store(str(store_dir))

    runs = {run["run_id"]: run for run in fits(client().get("/api/runs"), "/api/runs")["runs"]}

    assert list(runs) == ["run-1", "calm"]
    for run_id, listed in runs.items():
        view = view_of_run(store, store.run(run_id))
        said = fits(client().get(f"/api/runs/{run_id}/state"), STATE)
        assert said["headline"] == view.headline
        assert said["verdict"] == view.verdict.to_dict()
        assert (listed["state"], listed["brief"]) == (view.verdict.name, view.verdict.brief)
    assert runs["run-1"]["needs_attention"]
    assert runs["calm"]["ended"]


def test_nan_infinities_and_missing_values_are_told_apart(store_dir):
    """Two words, and no row at all."""
    odd = {3: math.nan, 4: math.inf, 5: -math.inf}
    write_run(store_dir, steps=6, metrics=lambda s: {"reward": 1.0} | ({} if s == 2 else {"kl": odd.get(s, 0.5)}))

    said = fits(client().get("/api/runs/run-1/series?metrics=kl&metrics=reward&metrics=nothing"), SERIES)

    kl = said["series"]["kl"]
    assert said["rows"][kl["rows"]]["steps"] == [1, 3, 4, 5, 6]
    assert kl["values"] == [0.5, "NaN", "Infinity", "-Infinity", 0.5]
    assert said["series"]["nothing"]["values"] == []
    last = fits(client().get("/api/runs"), "/api/runs")["runs"][0]["last"]
    assert (last["kl"], last["entropy"]) == (0.5, None)


def test_only_what_is_new_comes_after_a_place(store_dir):
    """One row of a long run is a small answer, with its time; nothing new is none."""
    many = {f"metric_{i}": float(i) for i in range(20)}
    write_run(store_dir, steps=3000, metrics=lambda s: many)
    asked = "&".join(f"metrics={name}" for name in many)
    web = client()
    first = fits(web.get(f"/api/runs/run-1/series?{asked}&points=240&times=true"), SERIES)
    place = first["next"]
    assert len(first["rows"][0]["steps"]) < 500
    writer = open_store(str(store_dir)).open_run(RunInfo("run-1"))
    writer.write([StepRecord(3001, {"metric_3": 7.5}, 123.25, attempt=writer.run.attempt)])
    writer.close()

    answer = web.get(f"/api/runs/run-1/series?{asked}&times=true&after={place}")

    said = fits(answer, SERIES)
    assert said["series"]["metric_3"]["values"] == [7.5]
    assert said["rows"][said["series"]["metric_3"]["rows"]]["times"] == [123.25]
    assert sum(len(one["values"]) for one in said["series"].values()) == 1
    assert len(answer.content) < 3000
    after = fits(web.get(f"/api/runs/run-1/series?{asked}&after={said['next']}"), SERIES)
    assert (sum(len(one["values"]) for one in after["series"].values()), after["next"]) == (0, said["next"])


def test_a_range_is_thinned_to_its_extremes(store_dir):
    """The one high row is among few points; names may be canonical."""
    write_run(store_dir, steps=5000, metrics=lambda s: {"reward": 99.0 if s == 2345 else 0.5})

    said = fits(client().get("/api/runs/run-1/series?metrics=reward/mean&from=2000&to=3000&points=20"), SERIES)

    one = said["series"]["reward/mean"]
    steps = said["rows"][one["rows"]]["steps"]
    assert one["recorded"] == "reward"
    assert min(steps) >= 2000 <= max(steps) <= 3000
    assert (len(steps) < 200, max(one["values"])) == (True, 99.0)


def test_steps_beyond_what_a_browser_counts_are_text(store_dir):
    """Neighbours stay apart, to the last step that a store holds."""
    far = 2**63 - 1
    writer = open_store(str(store_dir)).open_run(RunInfo("far"))
    writer.write([StepRecord(step, {"reward": 1.0}, 1.0) for step in (2**53 - 1, 2**53, 2**53 + 1, far)])
    writer.close()

    said = fits(client().get(f"/api/runs/far/series?metrics=reward&from={2**53}&to={far}"), SERIES)

    assert said["rows"][0]["steps"] == [str(2**53), str(2**53 + 1), str(far)]
    assert said["last_step"] == str(far)
    assert fits(client().get("/api/runs/far/state"), STATE)["last_step"] == str(far)
    assert fits(client().get("/api/runs"), "/api/runs")["runs"][0]["last_step"] == str(far)


def test_ten_thousand_metrics_are_named_and_read_in_parts(store_dir):
    """Names come without asking for one; too many at once are refused in words."""
    write_run(store_dir, steps=2, metrics=lambda s: {f"m/{i}": float(i) for i in range(10_000)})
    web = client()

    named = fits(web.get("/api/runs/run-1/series"), SERIES)["metrics"]
    part = "&".join(f"metrics=m/{i}" for i in range(400))
    too_many = "&".join(f"metrics=m/{i}" for i in range(501))

    assert len(named) == 10_000
    said = fits(web.get(f"/api/runs/run-1/series?{part}"), SERIES)
    assert len(said["series"]) == 400
    assert len(said["rows"]) == 1
    assert "501 metrics" in fits(web.get(f"/api/runs/run-1/series?{too_many}"), SERIES, 400)["error"]


def test_a_smoothed_curve_is_that_of_the_page(store_dir):
    """Over every row, whatever is thinned; an outlier has no part in it where it is cut."""
    write_run(store_dir, steps=2000, metrics=lambda s: {"reward": 1e6 if s == 1000 else 0.5})
    asked = "/api/runs/run-1/series?metrics=reward&smooth=mean+of+50"

    cut, whole = (
        fits(client().get(f"{asked}&clip={clip}"), SERIES)["series"]["reward"]["values"] for clip in ("true", "false")
    )

    assert (max(cut), max(whole)) == (0.5, pytest.approx(20000.49))
    assert "EMA 7" in fits(client().get("/api/runs/run-1/series?metrics=reward&smooth=EMA+7"), SERIES, 400)["error"]


def test_a_mean_is_of_every_row_and_knows_its_range(store_dir):
    """A thinned series keeps extremes only, so its mean would be another one; NaN is in the count of no range."""
    odd = {700: math.nan, 701: math.inf, **dict.fromkeys(range(801, 901), math.nan)}
    write_run(store_dir, steps=2000, metrics=lambda s: {"reward": odd.get(s, float(s % 10)), "other": 2.0})

    said = fits(client().get("/api/runs/run-1/series?metrics=reward&metrics=other&mean=true&points=20"), SERIES)

    rows, reward = said["rows"][0], said["series"]["reward"]
    assert (rows["width"], rows["through"], rows["steps"][:3]) == (100, 2000, [0, 100, 200])
    assert reward["values"][:2] == [sum(s % 10 for s in range(1, 100)) / 99, 4.5]
    assert reward["values"][7] == (450 - 0 - 1) / 98
    assert (reward["values"][8], reward["counts"][8], reward["counts"][7]) == (0.0, 1, 98)
    assert set(said["series"]["other"]["values"]) == {2.0}
    part = fits(client().get("/api/runs/run-1/series?metrics=reward&mean=true&from=801&to=900&points=1"), SERIES)
    assert part["series"]["reward"] == {"recorded": "reward", "rows": 0, "values": [None, None], "counts": [0, 0]}


def test_the_other_axes_are_told_by_their_knots(store_dir):
    """A pause has both of its ends; what was not logged is no axis."""
    writer = open_store(str(store_dir)).open_run(RunInfo("paused"))
    times = [1000.0 + 2 * s + (7200 if s > 500 else 0) for s in range(1, 1001)]
    writer.write([StepRecord(s, {"reward": 1.0}, ts) for s, ts in enumerate(times, 1)])
    writer.close()

    said = fits(client().get("/api/runs/paused/axes"), "/api/runs/{run_id}/axes")

    assert said["tokens"] is None
    assert len(said["time"]["steps"]) < 20
    hours = dict(zip(said["time"]["steps"], said["time"]["places"], strict=True))
    assert hours[501] - hours[500] == pytest.approx(7202 / 3600, rel=1e-3)


def test_scripts_are_kept_by_their_content_and_nothing_else_is_served(store_dir):
    """Behind the gate, too."""
    address = endpoint.module_address("board.js")
    answer = client().get(address)
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    assert client().get("/web/old/board.js").headers["cache-control"] == "no-store"
    assert client(role="").get(address).status_code == 401
    for name in ("gate.py", "..%2fgate.py", "openapi.json", "vendor%2fuPlot.iife.min.js"):
        assert client().get(f"/web/x/{name}").status_code == 404


@pytest.mark.parametrize("run_id", HOSTILE)
def test_a_hostile_id_is_no_run(store_dir, run_id):
    """Nothing outside the store is read, and no traceback is shown."""
    write_run(store_dir, steps=3)
    for what in ("series?metrics=kl", "state"):
        answer = client().get(f"/api/runs/{run_id}/{what}")
        assert answer.status_code in {404, 400}, answer.text
        assert "Traceback" not in answer.text
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "query",
    ["from=x", "to=1.5", "from=9&to=3", "points=0", "points=1e9", "points=100001", "after=-1", "after=" + "9" * 40,
     "from=" + "9" * 19 + "9", "times=yes", "points=%D9%A3", "metrics=kl&" * 3 + "points=-3"],
)  # fmt: skip
def test_a_parameter_that_cannot_be_read_is_refused_in_words(store_dir, query):
    """With its name."""
    write_run(store_dir, steps=3)
    said = fits(client().get(f"/api/runs/run-1/series?{query}&metrics=reward"), SERIES, 400)
    assert query.split("=", 1)[0] in said["error"] or "points" in said["error"]


def test_nobody_without_a_session_is_told_anything_and_nothing_is_written(store_dir):
    """No session, a foreign page, a forged role, a foreign host; and no method but GET."""
    danger_run(store_dir)
    paths = [
        "/api/runs",
        "/api/list",
        "/api/runs/run-1/state",
        "/api/runs/run-1/series",
        "/api/events",
        "/api/openapi.json",
    ]
    for path in paths:
        assert client(role="").get(path).status_code == 401
        assert "seed3" not in client(role="").get(path, headers={"x-rlwatch-role": "operator"}).text
        assert client().get(path, headers={"Origin": "http://evil.example"}).status_code == 403
        assert client().get(path, headers={"Host": "evil.example"}).status_code == 421
        assert client().get(path, headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}).status_code == 403
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert client().request(method, path).status_code == 405


def test_rows_of_the_list_that_come_in_sight_are_those_that_the_page_would_draw(store_dir):
    """In its order, with its filters, columns and boxes; far beyond the end there are none."""
    for i in range(7):
        write_run(store_dir, f"run-{i}", name=f"seed{i}", steps=3)
    page = runs_page(sort="run, lowest", columns=["step"], picked=["run-5"])
    drawn = tables(page)["runs"]
    web = client()

    rest = fits(web.get(f"{drawn['more']}&first=4&count=2"), "/api/list")
    beyond = fits(web.get(f"{drawn['more']}&first=400"), "/api/list")

    assert rest == {"total": 7, "rows": drawn["rows"][4:6]}
    assert [row["picked"] for row in rest["rows"]] == [False, True]
    assert beyond == {"total": 7, "rows": []}
    assert fits(web.get("/api/list?text=seed3"), "/api/list")["total"] == 1
    assert "first" in fits(web.get("/api/list?first=-1"), "/api/list", 400)["error"]


def test_a_viewer_is_told_that_nothing_can_be_commanded_whatever_the_request_says(store_dir):
    """The role is the gate's."""
    write_run(store_dir)
    forged = [("x-rlwatch-role", "operator"), ("X-RLWATCH-NAME", "root")]

    viewer = fits(client("viewer").get("/api/runs/run-1/state", headers=forged), STATE)
    operator = fits(client().get("/api/runs/run-1/state"), STATE)

    assert {one["possible"] for one in viewer["commands"]} == {False}
    assert all("Read-only" in one["why_not"] for one in viewer["commands"])
    assert {one["kind"]: one["possible"] for one in operator["commands"]} == {"reset-reference": True, "rollback": True}


def test_a_run_that_ended_says_why_no_command_reaches_it(store_dir):
    """The reason stands beside the button."""
    write_run(store_dir, state=RunState.FINISHED)
    said = fits(client().get("/api/runs/run-1/state"), STATE)["commands"]
    assert {one["why_not"] for one in said} == {"The run has finished: no trainer will run the command"}


def test_a_store_that_vanishes_is_an_error_in_words_and_comes_back(store_dir):
    """503 or no run, never a traceback; the same client reads it again later."""
    write_run(store_dir, steps=5)
    web, away = client(), store_dir.with_name("away")
    assert web.get("/api/runs/run-1/series?metrics=kl").status_code == 200
    shutil.move(store_dir, away)

    for path in ("/api/runs/run-1/series?metrics=kl", "/api/runs/run-1/state"):
        answer = web.get(path)
        assert answer.status_code in {404, 503}
        assert "Traceback" not in answer.text
    assert web.get("/api/runs").status_code in {200, 503}

    shutil.move(away, store_dir)
    assert web.get("/api/runs/run-1/series?metrics=kl").status_code == 200


def test_a_damaged_run_is_named_and_the_others_are_listed(store_dir):
    """Why, by its id."""
    write_run(store_dir, "good", steps=5)
    write_run(store_dir, "broken", steps=5, state=RunState.FINISHED)
    (store_dir / "broken" / "run.db").write_bytes(b"not a database" * 1000)

    said = fits(client().get("/api/runs"), "/api/runs")

    assert [run["run_id"] for run in said["runs"]] == ["good"]
    assert list(said["unreadable"]) == ["broken"]
    fits(client().get("/api/runs/broken/state"), STATE, 503)


def test_runs_are_searched_as_in_the_list(store_dir):
    """Words and settings; archived ones only where they are asked for."""
    write_run(store_dir, "one", config={"lr": 3e-5})
    write_run(store_dir, "two", config={"lr": 1e-6}, name='<img src=x onerror="x">')

    assert [run["run_id"] for run in client().get("/api/runs?search=lr=3e-5").json()["runs"]] == ["one"]
    assert client().get("/api/runs?limit=1").json()["matching"] == 2
    assert {run["name"] for run in client().get("/api/runs").json()["runs"]} == {"seed3", '<img src=x onerror="x">'}
    assert client().get("/api/runs?archived=maybe").status_code == 400


def test_the_document_describes_every_route_and_where_it_is(store_dir):
    """Below the base path, if there is one."""
    assert {route.path for route in endpoint.routes() if route.path.startswith("/api/")} == set(DOCUMENT["paths"])
    said = client(base="/rlwatch").get("/rlwatch/api/openapi.json").json()
    assert said["servers"] == [{"url": "/rlwatch"}]
    assert {**said, "servers": None} == {**DOCUMENT, "servers": None}
    fits(client(base="/rlwatch").get("/rlwatch/api/runs"), "/api/runs")


async def read(stream, count):
    """The first ``count`` events of a stream."""
    found = []
    async for text in stream:
        found += [line for line in text.splitlines() if line.startswith(("event:", "data:"))]
        if len(found) >= 2 * count:
            return found
    return found


def awaited(coroutine):
    """Its result; in a thread of its own, since a browser's tests leave a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result(60)


def test_a_stream_tells_of_the_run_it_is_asked_of(store_dir):
    """At once, so that whoever was cut off looks anew."""
    write_run(store_dir, steps=5)

    async def scene():
        return await read(api.event_stream(frozenset({"run-1"}), math.inf), 1)

    said = awaited(scene())
    assert said[0] == "event: changed"
    assert json.loads(said[1].removeprefix("data: "))["runs"] == ["run-1"]


def test_a_stream_ends_with_its_session(store_dir):
    """And says that it is over."""
    write_run(store_dir, steps=5)

    assert awaited(read(api.event_stream(frozenset(), time.time() - 1), 5))[-2:] == ["event: over", "data: {}"]


def test_the_scripts_of_all_pages_are_small():
    """Compressed, with the drawing library: 300 kB at most, of which a browser keeps each file for a year."""
    texts = [
        *endpoint.modules().values(),
        *((endpoint.HERE / name).read_text() for name in ("table.js", "response.js")),
    ]
    assert sum(len(gzip.compress(text.encode())) for text in texts) <= 300_000
    assert sum(map(len, texts)) <= 1_000_000
