"""The whole demo around a stand-in for the training: person, webhook, checks and exit code, through two processes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlwatch.demo.run
from rlwatch.demo import Recipe
from rlwatch.demo.run import main
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.records import CommandStatus, Severity
from rlwatch.store.url import open_store

FAKE = Path(__file__).parent / "fake_training.py"


@pytest.fixture
def training(monkeypatch):
    """Replaces the training by a script or by code."""

    def replaced(*program):
        line = rlwatch.demo.run.command_line

        def command(*arguments):
            return [sys.executable, *program, *line(*arguments)[4:]]  # what follows "python -P -m module"

        monkeypatch.setattr(rlwatch.demo.run, "command_line", command)

    monkeypatch.setattr(rlwatch.demo.run, "LOOK_S", 0.05)
    return replaced


@pytest.fixture
def said(capsys):
    """What stands on the screen so far."""
    screen = []

    def text():
        screen.append(capsys.readouterr().out)
        return "".join(screen)

    return text


def test_a_run_that_goes_as_promised_ends_with_zero(training, said, tmp_path):
    """Reset done, collapse alarmed, webhook signed, second reset refused: all read from the store."""
    training(str(FAKE))

    code = main(str(tmp_path), ui=False, exit=True)
    store = open_store(tmp_path)
    (run,) = store.runs()
    first, second = store.commands(run.run_id)

    assert code == 0, said()
    assert "NO" not in said().split()
    assert (first.status, second.status) == (CommandStatus.DONE, CommandStatus.REJECTED)
    assert "anchor" in second.result
    assert any(f.severity is Severity.CRITICAL for f in store.findings(run.run_id))
    assert "signature right" in said()


def test_no_address_and_no_secret_ends_up_in_the_store_or_on_the_screen(training, said, tmp_path, monkeypatch):
    """The receiver's path is unguessable, and stays so."""
    monkeypatch.setattr(rlwatch.demo.run, "secrets", SimpleNamespace(token_hex=lambda _: "c0ffee-c0ffee-c0ffee"))
    training(str(FAKE))

    main(str(tmp_path), ui=False, exit=True)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    assert b"c0ffee-c0ffee" not in stored
    assert b"/hook/" not in stored
    assert "c0ffee-c0ffee" not in said()
    assert "/hook/" not in said()


def test_a_trainer_that_dies_at_once_is_reported_with_its_last_words(training, said, tmp_path):
    """Nothing was recorded, so nothing is checked."""
    training("-c", "import sys; sys.exit('no such optimizer')")

    assert main(str(tmp_path), ui=False, exit=True) == 1
    assert "no such optimizer" in said()
    assert "what was promised" not in said()


def test_a_trainer_that_dies_half_way_breaks_promises(training, said, tmp_path):
    """The checklist is shown, with what was missing, and the exit code says so."""
    dies = (
        "import sys, rlwatch\n"
        "run = rlwatch.init(project='demo', store=sys.argv[1], config_file=sys.argv[2])\n"
        "run.log({'reward': 0.1, 'entropy': 1.0, 'kl': 0.0, 'frac_reward_zero_std': 0.0}, step=1)\n"
        "raise RuntimeError('out of memory')\n"
    )
    training("-c", dies)

    assert main(str(tmp_path), ui=False, exit=True) == 1
    assert "out of memory" in said()
    assert "NO" in said().split()


def test_a_store_in_memory_is_refused_before_anything_starts(training):
    """Two processes cannot share it."""
    training("-c", "raise AssertionError")

    with pytest.raises(ConfigError, match="a process of its own"):
        main("memory://demo", ui=False, exit=True)


@pytest.mark.parametrize("missing", ["trl", "httpx"])
def test_what_is_not_installed_is_named_with_its_extra(monkeypatch, tmp_path, missing):
    """Before a process is started."""
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(MissingExtraError, match=missing):
        main(str(tmp_path), ui=False, exit=True)


def test_the_dashboard_opens_beside_the_run_and_is_left_open_only_if_wanted(training, said, tmp_path, monkeypatch):
    """It is started before the training; ``exit`` does not wait for Ctrl-C."""
    training("-c", "pass")
    seen = []
    monkeypatch.setattr(rlwatch.demo.run, "DemoDashboard", dashboard_into(seen))

    main(str(tmp_path), ui=True, exit=True)
    main(str(tmp_path), ui=True, exit=False)
    main(str(tmp_path), ui=False, exit=False)

    assert seen == ["open", "close", "open", "wait", "close"]
    assert "http://here" in said()


def dashboard_into(seen):
    class Recorded:
        url = "http://here"

        def __init__(self, store, directory):
            assert directory.is_dir()

        possible = staticmethod(lambda: True)

        def __enter__(self):
            seen.append("open")
            return self

        def __exit__(self, *_):
            seen.append("close")

        def wait(self):
            seen.append("wait")
            raise KeyboardInterrupt

    return Recorded


def test_other_numbers_reach_the_training(training, said, tmp_path):
    """A recipe of one's own, as JSON on the command line."""
    training("-c", "import sys; sys.exit(sys.argv[-1])")

    main(str(tmp_path), ui=False, exit=True, recipe=Recipe(seed=42))

    assert '"seed": 42' in said()
