"""Programs begun by the server of the tests begin and end as ``python`` would have them begin and end."""

import os
import signal
import subprocess
import sys

import pytest
from preloaded import Program, run_program

SEEN = "import os, sys; print(sys.argv, __name__, sys.path[0], os.environ['SAID'], os.getcwd()); print('x', file=sys.stderr)"


def test_arguments_environment_and_streams_are_its_own(tmp_path):
    """As those of ``python -c``."""
    options = {"env": {**os.environ, "SAID": "a b"}, "cwd": tmp_path}
    plain = subprocess.run(
        [sys.executable, "-c", SEEN, "1", "ü"], capture_output=True, text=True, check=True, **options
    )
    done = run_program(SEEN, 1, "ü", **options)

    assert (done.stdout, done.stderr, done.returncode) == (plain.stdout, plain.stderr, 0)


def test_a_script_finds_what_lies_beside_it_and_reads_its_input(tmp_path):
    """As ``python SCRIPT`` does."""
    (tmp_path / "beside.py").write_text("word = 'found'")
    script = tmp_path / "script.py"
    script.write_text("import beside, sys; print(beside.word, sys.stdin.read(), __file__)")

    with Program(script=script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        program.stdin.write("input")
        out, _ = program.communicate()

    assert out == f"found input {script}\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise ValueError('boom')", 1),
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import atexit; atexit.register(lambda: print('at exit'))", 0),
    ],
)
def test_it_ends_as_it_ends(code, status):
    """Exceptions are printed, and what is to be done at exit is done."""
    done = run_program(code)

    assert done.returncode == status
    assert ("ValueError: boom" in done.stderr) == (status == 1)
    assert done.stdout == ("at exit\n" if "atexit" in code else "")


def test_a_signal_reaches_it_and_its_end_is_waited_for():
    """With a limit, or without."""
    with Program("import time; print('up', flush=True); time.sleep(3600)", stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == "up\n"
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.05)
        program.terminate()

        assert program.wait() == program.poll() == -signal.SIGTERM


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_it_says_is_buffered_unless_it_is_not_to_be(tmp_path, unbuffered):
    """In a file, what the program says of its standard error comes first, or in turn."""
    code = "import sys; print('one'); print('two', file=sys.stderr); print('three')"
    with (tmp_path / "log").open("wb") as log:
        options = {"stdout": log, "stderr": subprocess.STDOUT, "env": {**os.environ, "PYTHONUNBUFFERED": unbuffered}}
        Program(code, **options).wait()
        subprocess.run([sys.executable, "-c", code], check=True, **options)
    said = (tmp_path / "log").read_text().split()

    assert said == 2 * (["one", "two", "three"] if unbuffered else ["two", "one", "three"])


def test_what_is_heavy_is_there_and_what_is_ours_is_not():
    """Each program imports what is tested anew, in one thread, from its own path."""
    code = """if True:
        import os, sys
        print([name in sys.modules for name in ("torch", "trl", "rlwatch")], len(os.listdir("/proc/self/task")))
        import rlwatch
        print(rlwatch.__file__)
    """
    place = os.pathsep.join(filter(None, sys.path))

    said = run_program(code, env={**os.environ, "PYTHONPATH": place}).stdout.splitlines()

    import rlwatch

    assert said == ["[True, True, False] 1", rlwatch.__file__]


def test_programs_that_only_have_a_run_find_it_imported_and_not_begun(tmp_path):
    """A run of the server's would be inert in them."""
    code = """if True:
        import sys
        print("torch" in sys.modules, "numpy" in sys.modules)
        import rlwatch
        with rlwatch.init(store=sys.argv[1], run_id="r") as run:
            run.log({"entropy": 0.5}, step=1)
        print([record.step for record in rlwatch.open_store(sys.argv[1]).records("r")])
    """

    assert run_program(code, tmp_path, having="rlwatch").stdout.split("\n") == ["False True", "[1]", ""]
