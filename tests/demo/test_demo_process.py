"""The trainer's process: what it is given, what it is not given, and that it does not outlive the demo."""

import sys

from rlwatch.demo import Recipe
from rlwatch.demo.run import LAST_WORDS, TrainerProcess, command_line

SECRET, URL = "s3cret-of-the-demo", "http://127.0.0.1:9/hook/abc"


def trainer(tmp_path, program, **settings):
    """A process that runs ``program`` in place of the training."""
    command = [sys.executable, "-c", program]
    given = {"webhook_url": URL, "webhook_secret": SECRET, "command": command, **settings}
    return TrainerProcess("sqlite:///x", "demo-1", tmp_path, Recipe(), **given)


def test_the_command_line_starts_this_python_and_holds_no_secret(tmp_path):
    """``ps`` shows command lines to everybody."""
    line = command_line("sqlite:///x", tmp_path / "rlwatch.toml", tmp_path, Recipe(seed=5))

    assert line[:4] == [sys.executable, "-P", "-m", "rlwatch.demo.training"]
    assert '"seed": 5' in line[-1]
    assert not any(word in part for part in line for word in (SECRET, URL))


def test_the_environment_names_run_webhook_and_secret(tmp_path):
    """The usual variables, so that the training script needs no code for them."""
    program = (
        "import os; print(*(os.environ[n] for n in ('RLWATCH_RUN_ID','RLWATCH_WEBHOOK_URL','RLWATCH_WEBHOOK_SECRET')))"
    )
    with trainer(tmp_path, program) as child:
        assert child.wait(600) == 0

    assert child.last_words().split() == ["demo-1", URL, SECRET]


def test_ranks_of_a_surrounding_job_do_not_reach_it(tmp_path, monkeypatch):
    """Inside a distributed job's shell the demo is still one process."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    program = "import os; print(sorted(n for n in ('RANK','WORLD_SIZE','MASTER_ADDR') if n in os.environ))"
    with trainer(tmp_path, program) as child:
        assert child.wait(600) == 0

    assert child.last_words().strip() == "[]"


def test_its_own_configuration_file_is_empty(tmp_path):
    """Found first, so that nobody's own channels hear of a demo."""
    trainer(tmp_path, "")

    assert (tmp_path / "rlwatch.toml").read_text() == ""


def test_what_it_said_before_it_died_is_kept(tmp_path):
    """Both streams; the exit code tells of the death."""
    with trainer(tmp_path, "import sys; print('hello'); sys.exit('cannot go on')") as child:
        assert child.wait(600) == 1

    assert "hello" in child.last_words()
    assert "cannot go on" in child.last_words()


def test_only_the_end_of_a_long_log_is_shown(tmp_path):
    """A screenful."""
    with trainer(tmp_path, "print('x' * 100_000 + 'end')") as child:
        child.wait(600)

    assert len(child.last_words()) == LAST_WORDS
    assert child.last_words().endswith("end\n")


def test_leaving_ends_a_process_that_still_runs(tmp_path):
    """Whatever made us leave."""
    with trainer(tmp_path, "import threading; threading.Event().wait()") as child:
        assert child.wait(0.05) is None

    assert child.code not in (None, 0)


def test_one_that_will_not_end_is_made_to(tmp_path):
    """SIGTERM may be ignored; the next signal may not."""
    deaf = "import signal,threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); threading.Event().wait()"
    with trainer(tmp_path, deaf, stop_s=0.2) as child:
        while "deaf" not in child.last_words():
            child.wait(0.05)

    assert child.code == -9
