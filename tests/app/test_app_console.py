"""The console of a live run: what its own process wrote to a file of this machine, and nobody else's."""

import subprocess
from dataclasses import replace

import pytest
from app_world import run_page
from preloaded import Program
from rlwatch_app import queries
from rlwatch_app.run_about import output_tail
from waiting import until

RUN = """
import sys, rlwatch
with rlwatch.init(project="math", name="loud", store=sys.argv[1]) as run:
    run.log({"reward": 0.5}, step=1)
    print("loading\\rstep 1\\rstep 2 of 9")
    print("\\x1b[31mwarning\\x1b[0m: HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz <b>odd</b>")
    print("from stderr", file=sys.stderr, flush=True)
    sys.stdout.flush()
    open(sys.argv[2], "w").close()
    sys.stdin.read()
"""


@pytest.fixture
def loud(store_dir, tmp_path):
    """A live run whose output goes to one file."""
    ready = tmp_path.parent / f"{tmp_path.name}-ready"
    log = tmp_path.parent / f"{tmp_path.name}-log"
    with log.open("wb") as out:
        program = Program(
            RUN, store_dir, ready, having="rlwatch", stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT
        )
    with program:
        until(ready.exists, f"the run is up: {log.read_text()}")
        yield next(iter(queries.runs_by_id().values()))
        program.stdin.close()
        program.wait()


def test_the_last_lines_are_shown_as_text_without_colours_bars_and_secrets(loud):
    """In the drawer; a bar by its last state."""
    page = run_page(loud.run_id)
    (block,) = [code.value for code in page.code if "step 2 of 9" in code.value]
    assert block.splitlines()[:2] == ["step 2 of 9", "warning: HF_TOKEN=[redacted] <b>odd</b>"]
    assert "from stderr" in block
    assert "loading" not in block


def test_a_store_that_names_another_process_shows_nothing_of_it(loud, tmp_path):
    """One of ours that has its output in a file, too, but does not write this run."""
    root = queries.store().root
    assert output_tail(loud, root)
    with (tmp_path / "private").open("wb") as out:
        other = Program("import sys; print('private', flush=True); sys.stdin.read()", having="rlwatch", stdin=subprocess.PIPE, stdout=out)  # fmt: skip
    with other:
        until((tmp_path / "private").read_text, "it has written")
        assert output_tail(replace(loud, pid=other.pid), root) == []
    assert output_tail(replace(loud, host="elsewhere"), root) == []
    assert output_tail(loud, None) == []
