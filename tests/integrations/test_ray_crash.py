"""How a driver's run ends when something raises, in the driver or in a worker."""

import pytest

import rlwatch
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.crash import record_crash
from rlwatch.records import RunState


class RayTaskError(Exception):
    """As Ray wraps what a worker raised."""

    def __init__(self, cause):
        super().__init__("ray::Actor.step() (pid=7)")
        self.cause = cause


@pytest.mark.parametrize(
    "error", [ValueError("no logits"), RayTaskError(ValueError("no logits"))], ids=["driver", "worker"]
)
def test_the_error_itself_is_the_end_wherever_it_was_raised(error, request):
    """Not the wrapper Ray puts around it."""
    url = f"memory://{request.node.callspec.id}"
    run = rlwatch.init(store=url, run_id="a", detectors=list)
    record_crash(run, ErrorBoundary(run), error, 12)
    store = rlwatch.open_store(url)

    assert store.run("a").state is RunState.CRASHED
    (event,) = [event for event in store.events("a") if event.kind == "exception"]
    assert (event.step, event.body["type"], event.body["error"]) == (12, "ValueError", "ValueError: no logits")
