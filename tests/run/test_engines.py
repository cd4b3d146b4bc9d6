"""Rollout engines, asked over HTTP as Prometheus asks them."""

import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

import rlwatch
from rlwatch.cli.import_log import NamedLog
from rlwatch.errors import ConfigError
from rlwatch.metrics import BY_NAME, Family
from rlwatch.run.alerting import Alerting
from rlwatch.run.engines import MEANS, RATES, SHARES, SUMS, Engines, addresses
from rlwatch.run.machine import machine_thread
from rlwatch.store.url import open_store

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="Qwen/Qwen3-8B"}} {running}
vllm:num_requests_running{{engine="1",model_name="Qwen/Qwen3-8B"}} 2.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="Qwen/Qwen3-8B"}} 3.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{{engine="0",model_name="Qwen/Qwen3-8B",reason="capacity"}} 3.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="Qwen/Qwen3-8B"}} 0.25
vllm:kv_cache_usage_perc{{engine="1",model_name="Qwen/Qwen3-8B"}} 0.75
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {preempted}
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{{engine="0",model_name="Qwen/Qwen3-8B"}} 1.7475e+09
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {prompt}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {generated}
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {prompt}
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {hits}
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {accepted}
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="Qwen/Qwen3-8B"}} {stopped}
vllm:request_success_total{{engine="0",finished_reason="abort",model_name="Qwen/Qwen3-8B"}} {aborted}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.001",model_name="Qwen/Qwen3-8B"}} 0.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="Qwen/Qwen3-8B"}} 17.0
vllm:time_to_first_token_seconds_count{{engine="0",model_name="Qwen/Qwen3-8B"}} 17.0
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="Qwen/Qwen3-8B"}} 3.5
"""
SGLANG = """\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="meta-llama/Llama-3.1-8B-Instruct"}} 8.128902e+06
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{model_name="meta-llama/Llama-3.1-8B-Instruct"}} {generated}
# HELP sglang:token_usage The token usage
# TYPE sglang:token_usage gauge
sglang:token_usage{{model_name="meta-llama/Llama-3.1-8B-Instruct"}} 0.28
# HELP sglang:cache_hit_rate The cache hit rate
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{{model_name="meta-llama/Llama-3.1-8B-Instruct"}} 0.0075
# HELP sglang:num_running_reqs The number of running requests
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{model_name="meta-llama/Llama-3.1-8B-Instruct"}} 162.0
# HELP sglang:num_queue_reqs The number of requests in the waiting queue
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{model_name="meta-llama/Llama-3.1-8B-Instruct"}} 2826.0
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{{model_name="meta-llama/Llama-3.1-8B-Instruct"}} 0.6
"""
BEGUN = {
    "running": 5,
    "preempted": 4,
    "prompt": 1000,
    "generated": 5000,
    "hits": 100,
    "drafted": 2000,
    "accepted": 1500,
}
BEGUN |= {"stopped": 90, "aborted": 1}
LATER = {
    "running": 7,
    "preempted": 14,
    "prompt": 3000,
    "generated": 45000,
    "hits": 600,
    "drafted": 6000,
    "accepted": 2500,
}
LATER |= {"stopped": 190, "aborted": 5}


class Pages:
    """A server of one page, which may change, break or be long in coming."""

    def __init__(self, text):
        self.text, self.status, self.asked = text, 200, []


@contextmanager
def serving(text):
    page = Pages(text)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            page.asked.append(self.path)
            body = page.text.encode() if isinstance(page.text, str) else page.text
            self.send_response(page.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    page.url = f"http://127.0.0.1:{server.server_port}"
    page.stop = server.server_close
    try:
        yield page
    finally:
        server.shutdown()
        server.server_close()


def test_a_vllm_server_is_read_by_its_own_names():
    """Levels at once, rates from the second look on; a breakdown of a gauge is not counted twice."""
    with serving(VLLM.format(**BEGUN)) as page:
        engines = Engines(addresses(page.url))
        began = time.monotonic()
        first = engines.read()
        mid = time.monotonic()
        page.text = VLLM.format(**LATER)
        time.sleep(0.05)
        asked = time.monotonic()
        found = engines.read()
        least, most = asked - mid, time.monotonic() - began

    assert first == {"engine/running": 7.0, "engine/waiting": 3.0, "engine/kv_cache": 0.5, "engine/down": 0.0}
    assert page.asked == ["/metrics", "/metrics"]
    assert (found["engine/running"], found["engine/spec_accepted"], found["engine/prefix_hits"]) == (9.0, 0.25, 0.25)
    for name, grown in {"throughput": 40000, "prompt_throughput": 2000, "preemptions": 10, "failed": 4}.items():
        assert grown / most <= found[f"engine/{name}"] <= grown / least, name


def test_an_sglang_server_is_read_by_its_own_names():
    """The example of its documentation."""
    with serving(SGLANG.format(generated="7.557572e+06")) as page:
        engines = Engines([f"{page.url}/metrics"])
        first = engines.read()
        page.text = SGLANG.format(generated="7.657572e+06")
        found = engines.read()

    assert first == {
        "engine/running": 162.0,
        "engine/waiting": 2826.0,
        "engine/kv_cache": 0.28,
        "engine/prefix_hits": 0.0075,
        "engine/spec_accepted": 0.6,
        "engine/down": 0.0,
    }
    assert found["engine/throughput"] > 0.0
    assert found["engine/prompt_throughput"] == 0.0


def test_engines_are_added_up_and_one_that_is_down_is_said_once():
    """And once more when it was back meanwhile; the others count on."""
    told = []
    with serving(VLLM.format(**BEGUN)) as one, serving(SGLANG.format(generated=1)) as other:
        engines = Engines([f"{one.url}/metrics", f"{other.url}/metrics"], told.append)
        assert engines.read()["engine/running"] == 169.0
        other.status = 503
        found = [engines.read() for _ in range(3)][-1]
        assert (found["engine/running"], found["engine/down"], len(told), engines.failures) == (7.0, 1.0, 1, 3)
        other.status = 200
        assert engines.read()["engine/down"] == 0.0
        other.text = "<html>a proxy</html>"
        assert engines.read()["engine/down"] == 1.0
    assert len(told) == 2
    assert engines.read() == {"engine/down": 2.0}


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running{", "\x00\xff", "up 1\n", b"\xff\xfe" * 100])
def test_what_is_no_such_page_is_an_engine_that_is_down(text):
    """Whatever a port answers."""
    with serving(text) as page:
        assert Engines([page.url], lambda _: None).read() == {"engine/down": 1.0}


def test_an_engine_that_was_restarted_has_no_rates_at_that_look():
    """Its counters begin at nothing; a negative rate would be nonsense."""
    with serving(VLLM.format(**LATER)) as page:
        engines = Engines(addresses(page.url))
        engines.read()
        page.text = VLLM.format(**BEGUN)
        assert not engines.read().keys() & {"engine/throughput", "engine/preemptions", "engine/spec_accepted"}
        page.text = VLLM.format(**LATER)
        assert engines.read()["engine/throughput"] > 0.0


def test_every_metric_is_in_the_table():
    """Under Engine."""
    names = {*SUMS, *MEANS, *RATES, *SHARES, "engine/down", "engine/failed"}

    assert {BY_NAME[name].family for name in names} == {Family.ENGINE}


@pytest.mark.parametrize(
    "given", ["ftp://h/metrics", "gpu-2:8000", "http://", "http://h:99999/metrics", "file:///etc/passwd"]
)
def test_what_is_no_address_is_said_at_once(tmp_path, given):
    """Before anything is recorded; with what to give instead."""
    with pytest.raises(ConfigError, match="an engine is http://HOST:PORT/metrics"):
        rlwatch.init(store=tmp_path, engines=[given])
    assert list(tmp_path.iterdir()) == []


def test_a_live_run_records_its_engine(tmp_path):
    """With the next row, beside what the trainer logs."""
    with serving(VLLM.format(**BEGUN)) as page, rlwatch.init(store=tmp_path, system=False) as run:
        run.measure(machine_thread(0, {}, engines=Engines([page.url]).read, system=False, every_s=0.01))
        end = time.monotonic() + 20
        while len(page.asked) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        run.log({"entropy": 0.5}, step=1)
    (record,) = open_store(str(tmp_path)).records(run.info.run_id)

    assert record.metrics["entropy"] == 0.5
    assert record.metrics["engine/running"] == 7.0
    assert not any(name.startswith("system/") for name in record.metrics)


def test_a_log_that_is_watched_gets_it_with_the_rows_that_come(tmp_path):
    """Rows that were there before are what they were."""
    from rlwatch.cli.watch_log import watch_of

    log = tmp_path / "train.jsonl"
    row = '{{"step": {0}, "entropy": 0.5, "reward": 0.1}}\n'
    log.write_text("".join(row.format(step) for step in range(5)))
    store = open_store(str(tmp_path / "runs"))
    watch = watch_of(NamedLog(log), store, Alerting(), beside=lambda: {"engine/running": 7.0, "entropy": 9.0})
    while watch.look():
        pass
    with log.open("a") as more:
        more.write(row.format(5) + row.format(6))
    while watch.look():
        pass
    watch.end("over")

    rows = [dict(record.metrics) for record in store.records(watch.run_id)]
    assert [row.get("engine/running") for row in rows] == [None] * 6 + [7.0]
    assert {row["entropy"] for row in rows} == {0.5}


def test_the_command_refuses_engines_where_there_is_no_row_to_go_with(tmp_path):
    """A store's rows are its trainers'."""
    from typer.testing import CliRunner

    from rlwatch.cli.app import app

    result = CliRunner().invoke(app, ["watch", str(tmp_path), "--engine", "http://h:8000"])

    assert result.exit_code == 2
    assert "rlwatch.init(engines=...)" in result.stderr
