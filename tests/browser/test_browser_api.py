"""The data endpoint of a real ``rlwatch ui``: events over a real connection, and what one new row costs."""

import time

import httpx
import pytest
from real_dashboard import Dashboard

from rlwatch.records import RunInfo, StepRecord
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser
MANY = {f"metric_{i}": 0.123456789 * i for i in range(60)}


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory):
    """A dashboard."""
    dashboard = Dashboard(tmp_path_factory.mktemp("dashboard"))
    yield dashboard.start()
    dashboard.stop()


def test_a_script_is_told_of_a_new_row_and_reads_it_alone(dashboard):
    """A login, a stream, and one small answer, as a script would ask; the stream is not held back on its way."""
    writer = open_store(dashboard.store).open_run(RunInfo("live", project="p"))
    writer.write([StepRecord(s, MANY, ts=time.time()) for s in range(1, 31)])
    headers = {"cookie": dashboard.cookie("viewer")}
    api = f"{dashboard.url}/api"
    wanted = [("metrics", name) for name in MANY]
    with httpx.Client(headers=headers, trust_env=False, timeout=120) as web:
        assert web.get(f"{api}/openapi.json").json()["servers"] == [{"url": "/"}]
        assert web.get(f"{api}/runs").json()["runs"][0]["run_id"] == "live"
        place = web.get(f"{api}/runs/live/series", params=wanted).json()["next"]
        with web.stream("GET", f"{api}/events?run=live") as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("event:"))
            assert next(lines) == "event: changed"
            writer.write([StepRecord(31, MANY, ts=time.time())])
            seen: dict[str, list[float]] = {}
            while not seen:  # the first event may tell of what was there before
                assert next(lines) == "event: changed"
                answer = web.get(f"{api}/runs/live/series", params=[*wanted, ("after", place)])
                seen = {name: one["values"] for name, one in answer.json()["series"].items() if one["values"]}
    writer.close()
    assert seen == {name: [value] for name, value in MANY.items()}
    assert answer.num_bytes_downloaded < 5000
    assert httpx.get(f"{api}/runs", trust_env=False).status_code == 401
