"""From the configuration to the command line: no part of an address comes out, however a service fails."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import pytest
from service_examples import EXAMPLES, TOKEN, Rerouted
from typer.testing import CliRunner

from rlwatch.alerts.config import build_notifiers, load_config
from rlwatch.alerts.outbox import Deliverer
from rlwatch.clock import ManualClock
from rlwatch.notify import services
from rlwatch.records import OutboxMessage, RunInfo
from rlwatch.store.url import open_store
from rlwatch.testing.notifier_contract import assert_no_secret, closed_port, speaking
from rlwatch.testing.webhook_receiver import WebhookReceiver, WebhookReply

FAILURES = ("refused", "no such host", "TLS", "malformed", "hangs", "401", "403", "404", "429", "500", "echo")


def _base(failure: str, stack: ExitStack) -> str:
    """A server that fails that way; the last one repeats the secret in its answer."""
    if failure == "refused":
        return f"http://127.0.0.1:{closed_port()}"
    if failure == "no such host":
        return "http://rlwatch.invalid"
    if failure in ("TLS", "malformed"):
        garbage = stack.enter_context(speaking(b"NOT HTTP AT ALL\r\n\r\n"))
        return garbage.replace("http:", "https:") if failure == "TLS" else garbage
    answer = {"hangs": WebhookReply(hang=True), "echo": WebhookReply(400, {"X-You": TOKEN}, TOKEN.encode())}.get(
        failure
    )
    status = int(failure) if failure.isdigit() else 0
    answer = answer or WebhookReply(status, {"Retry-After": "30"} if status == 429 else {})
    return stack.enter_context(WebhookReceiver(answer, any_path=True)).url


def _configured(kind: str, monkeypatch: pytest.MonkeyPatch, patience: float = 0.2) -> str:
    """Writes the file, sets the address; returns the secret as it is in there. ``patience``: seconds for an answer."""
    example = EXAMPLES[kind]
    monkeypatch.setenv("CHANNEL_URL", example.address.format(t=example.fits(TOKEN)))
    Path("rlwatch.toml").write_text(f'[notify.mine]\nkind = "{kind}"\nurl = "env:CHANNEL_URL"\ntotal_s = {patience}\n')
    return example.fits(TOKEN)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_no_log_row_output_or_error_shows_any_of_it(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
):
    """The outbox, the logs of all libraries, standard output and error."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    secret, clock = _configured(kind, monkeypatch), ManualClock()
    store = open_store(tmp_path / "runs")
    store.open_run(RunInfo("r")).close()
    for failure in FAILURES:
        with ExitStack() as stack:
            base = _base(failure, stack)
            monkeypatch.setattr(services, "Courier", lambda name, base=base, **limits: Rerouted(base, name, **limits))
            message = OutboxMessage(failure, "r", failure, "mine", {"event": "firing"}, created_at=clock.now())
            store.put_alerts([], [message])
            report = Deliverer(store, build_notifiers(load_config()), clock).run_once()
        assert (report.sent, report.retried + report.dead) == (0, 1), failure
    rows = store.outbox()
    store.close()

    assert all(row.last_error for row in rows)
    assert_no_secret((secret, TOKEN), repr(rows), caplog.text, *capfd.readouterr())


@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("failure", ["refused", "echo"])
def test_the_command_line_says_what_failed_and_not_where(
    kind: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """rlwatch alerts test, on the same channel."""
    from rlwatch.cli.app import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLWATCH_STORE", raising=False)
    secret = _configured(kind, monkeypatch, patience=20.0)  # there is always an answer, on a busy machine a late one
    with ExitStack() as stack:
        base = _base(failure, stack)
        monkeypatch.setattr(services, "Courier", lambda name, **limits: Rerouted(base, name, **limits))
        result = CliRunner().invoke(app, ["alerts", "test"])

    assert result.exit_code == 1
    assert ("HTTP 400" if failure == "echo" else "ConnectError") in result.output
    assert_no_secret((secret, TOKEN), result.output, repr(result.exception))
