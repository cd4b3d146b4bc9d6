"""Tools of an agent, measured while they run."""

import pytest

import rlwatch
from rlwatch.errors import ConfigError
from rlwatch.store.url import open_store

pytestmark = pytest.mark.torch


def run_alone(coroutine):
    """The result of a coroutine that waits for nothing; a browser's test may have left a running loop in this thread."""
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


def test_calls_errors_and_their_kinds_are_counted_and_pass_unchanged(tmp_path):
    """Of a tool that raises, one that returns its errors, and a coroutine; of each step by itself."""

    def divide(a, b):
        if b == 3:
            raise TimeoutError("slow")
        return a / b

    async def fetch(url):
        return url[::-1]

    with rlwatch.Watcher(store=str(tmp_path), name="tools") as watcher:
        divided = watcher.tool("divide", divide)
        shell = watcher.tool("shell", lambda code: code, failed=lambda code: code != 0)
        fetched = watcher.tool("fetch", fetch)
        assert divided(6, 2) == 3
        for wrong, error in ((0, ZeroDivisionError), (3, TimeoutError)):
            with pytest.raises(error):
                divided(1, wrong)
        assert [shell(0), shell(1)] == [0, 1]
        assert run_alone(fetched("ab")) == "ba"
        measured = {name: stat.value().item() for name, stat in watcher.collector.tools.take().items()}
        again = watcher.collector.tools.take()

    assert again == {}
    assert measured["tool/calls/divide"] == 3
    assert measured["tool/errors/divide"] == pytest.approx(2 / 3)
    assert measured["tool/timeouts/divide"] == pytest.approx(1 / 3)
    assert measured["tool/error_kinds/divide.ZeroDivisionError"] == pytest.approx(1 / 3)
    assert measured["tool/errors/shell"] == measured["tool/error_kinds/shell.reported"] == 0.5
    assert measured["tool/errors/fetch"] == 0.0
    assert measured["tool/seconds_max/fetch"] >= measured["tool/seconds/fetch"] > 0.0


def test_a_step_records_the_tools_that_were_called_in_it(tmp_path):
    """And none in the next."""
    with rlwatch.Watcher(store=str(tmp_path), name="tools") as watcher:
        add = watcher.tool("add", lambda a, b: a + b)
        add(1, 2)
        watcher.step(1, loss=0.1)
        watcher.step(2, loss=0.1)
    store = open_store(str(tmp_path))
    (run,) = store.runs()
    calls = store.series(run.run_id, ["tool/calls/add"])

    assert [list(each) for each in (calls["tool/calls/add"].steps, calls["tool/calls/add"].values)] == [[1], [1.0]]


def test_a_tool_that_cannot_be_called_or_has_the_name_of_another_is_refused():
    """At set-up."""
    with rlwatch.Watcher(store="memory://tools-refused") as watcher:
        watcher.tool("one", print)
        for name, function in (("one", print), ("", print), ("two", 3)):
            with pytest.raises(ConfigError):
                watcher.tool(name, function)
        with pytest.raises(ConfigError):
            watcher.tool("three", print, failed=3)
