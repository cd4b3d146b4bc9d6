"""How many of a sample of small changes to the code the tests of its room notice: ``make mutants``.

Every place that could be changed (a comparison, a sign, a number, a condition, a statement left out) is listed, a
sample is drawn with a fixed seed, and each change is made in a copy of the repository and tested with those tests of
its room that execute the line, the quickest files first. A change that no test notices has survived: it is a gap, or
the change makes no difference. Results are lines of JSON in ``--out``; what is there already is not tried again.
The sample is of all rooms together, ``--rooms`` says which of it to try; a larger one contains a smaller one, and one
drawn after the code has changed elsewhere has the same places in what has not changed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "detectors": ("tests/detectors",),
    "store": ("tests/store",),
    "control": ("tests/control", "tests/run"),
    "gradloc": ("tests/gradloc",),
}
"""Rooms of ``rlwatch`` and where their tests are."""
PATIENCE_S = 120.0
"""Beside ten times what the chosen tests take: a change may make a loop endless."""
SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
OTHERWISE = {"min": "max", "max": "min", "any": "all", "all": "any", "abs": "float"}
QUIET = re.compile(r"\b(log|logger|logging|warnings)\b")
"""Calls that only speak to people are left as they are."""


@dataclass(frozen=True)
class Mutant:
    """One change: characters ``start`` to ``end`` of a file become ``new``."""

    room: str
    path: str
    line: int
    last: int
    start: int
    end: int
    old: str
    new: str
    kind: str

    def key(self, text: str) -> str:
        return hashlib.sha256(f"{self.path}\0{self.applied(text)}".encode()).hexdigest()[:16]

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


class Places(ast.NodeVisitor):
    """Every change that can be made to one file."""

    def __init__(self, room: str, path: str, text: str):
        self._room, self._path, self._text = room, path, text
        lengths = [len(line) for line in text.splitlines(keepends=True)]
        self._begin = [sum(lengths[:n]) for n in range(len(lengths))]
        self._lines = text.splitlines(keepends=True)
        self.found: list[Mutant] = []
        self.visit(ast.parse(text))

    def _at(self, line: int, column: int) -> int:
        """Columns of the syntax tree count bytes."""
        return self._begin[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _change(self, node: ast.expr | ast.stmt, kind: str, new: str, span: tuple[int, int] | None = None) -> None:
        start, end = span or self._span(node)
        old, last = self._text[start:end], node.end_lineno or node.lineno
        self.found.append(Mutant(self._room, self._path, node.lineno, last, start, end, old, new, kind))

    def _operator(self, whole: ast.expr, left: ast.expr, right: ast.expr, kind: str, new: str) -> None:
        """Between two operands, where brackets and comments may stand as well."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._text[start:end]
        sign = re.search(r"not\s+in|is\s+not|\b(?:in|is|and|or)\b|[-+*/%<>=!]+", re.sub(r"#.*", "", between))
        if sign:
            self._change(whole, kind, new, (start + sign.start(), start + sign.end()))

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
            self._operator(node, node.left, node.comparators[0], "comparison", SWAPPED[type(node.ops[0])])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(
            isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        if type(node.op) in SWAPPED and not texts:
            self._operator(node, node.left, node.right, "arithmetic", SWAPPED[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._operator(node, node.values[0], node.values[1], "logic", SWAPPED[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._change(node, "sign", f"({ast.get_source_segment(self._text, node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._change(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self._change(node, "constant", str(node.value * 2 if abs(node.value) > 3 else node.value + 1))
        elif isinstance(node.value, float):
            self._change(node, "constant", repr(node.value * 2 or 1.0))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """What is said to people is not changed."""

    def _condition(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):
            self._change(node.test, "condition", f"(not {ast.get_source_segment(self._text, node.test)})")

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self._condition(node)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._change(node.value, "return", "None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in OTHERWISE:
            self._change(node.func, "call", OTHERWISE[node.func.id])
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        """That ``zip`` is given as much of each makes no difference where it is."""
        if node.arg != "strict":
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not QUIET.search(ast.unparse(node.value.func)):
            self._change(node, "left out", "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._change(node, "left out", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id.startswith("__"):
            return
        if isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            self._change(node, "left out", "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._change(node, "left out", "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._change(node, "jump", "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._change(node, "jump", "continue")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Annotations and decorators are left as they are."""
        for value in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)


def files_of(room: str, root: Path = ROOT) -> list[Path]:
    """A room is a package, or one module."""
    folder = root / "rlwatch" / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def places(rooms: list[str], root: Path = ROOT) -> list[Mutant]:
    return [
        mutant
        for room in rooms
        for path in files_of(room, root)
        for mutant in Places(room, str(path.relative_to(root)), path.read_text()).found
    ]


# ---- one copy of the repository, in which changes are made one after the other


class Chosen:
    """A plugin of pytest: these tests only, the quickest files first; files keep their own order."""

    def __init__(self, ids: set[str], seconds: dict[str, float]):
        self._ids, self._seconds = ids, seconds

    def pytest_collection_modifyitems(self, items: list) -> None:  # type: ignore[type-arg]
        kept = [item for item in items if item.nodeid in self._ids] or items
        cost: Counter[str] = Counter()
        for item in kept:
            cost[item.nodeid.partition("::")[0]] += self._seconds.get(item.nodeid, 1.0)
        items[:] = sorted(kept, key=lambda item: cost[item.nodeid.partition("::")[0]])


class Traced:
    """A plugin of pytest: which tests execute which lines, and how long each takes."""

    def __init__(self, source: str):
        import coverage

        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._coverage = coverage.Coverage(data_file=None, source=[source], config_file=False)
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def lines(self) -> dict[str, dict[int, list[str]]]:
        self._coverage.stop()
        data = self._coverage.get_data()
        return {
            str(Path(name).relative_to(Path.cwd())): data.contexts_by_lineno(name) for name in data.measured_files()
        }


def in_a_child(work, limit_s: float, said: Path) -> int | None:  # type: ignore[no-untyped-def]
    """Its exit status, or None if it took too long; torch and pytest are imported once, before."""
    pid = os.fork()
    if not pid:
        status = 70
        try:
            os.setsid()
            with said.open("wb") as out, Path(os.devnull).open() as nothing:
                for descriptor, stream in ((0, nothing), (1, out), (2, out)):
                    os.dup2(stream.fileno(), descriptor)
            status = work()
        finally:
            os._exit(status)
    end = threading.Timer(limit_s, lambda: os.killpg(pid, signal.SIGKILL))
    end.start()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    end.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return None if status < 0 else status


def tested(targets: list[str], *plugins: object) -> int:
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=line"]
    return int(pytest.main([*options, *targets], plugins=list(plugins)))


def trace(room: str, out: Path) -> int:
    """Run all tests of a room on the unchanged code; leaves who executes what in ``out``."""
    traced = Traced(str(Path.cwd() / "rlwatch" / room))
    status = tested(list(ROOMS[room]), traced)
    found = {"status": status, "failed": traced.failed, "seconds": traced.seconds, "lines": traced.lines()}
    out.write_text(json.dumps(found))
    return status


def tests_of(mutant: Mutant, known: dict) -> set[str]:  # type: ignore[type-arg]
    """All of the room where a line is executed by its import, or by processes that tests start."""
    lines = known["lines"].get(mutant.path, {})
    who = {test for n in range(mutant.line, mutant.last + 1) for test in lines.get(str(n), ())}
    return set(known["seconds"]) if "" in who or not who else who


def worker(copy: Path) -> None:
    """Takes lines of JSON from standard input, and answers each: {"trace": ROOM, "out": FILE} or a mutant."""
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    import pytest  # noqa: F401
    import torch
    from hypothesis.internal.charmap import charmap

    charmap()  # takes long, traced even minutes

    torch.set_num_threads(1)
    changed_at = 1_600_000_000
    known: dict[str, dict] = {}  # type: ignore[type-arg]
    for line in sys.stdin:
        wanted = json.loads(line)
        if "trace" in wanted:
            in_a_child(partial(trace, wanted["trace"], Path(wanted["out"])), 3600, copy / "said.txt")
            print("{}", flush=True)
            continue
        traced = wanted.pop("traced")
        mutant = Mutant(**wanted)
        if mutant.room not in known:
            known[mutant.room] = json.loads(Path(traced).read_text())
        tests, seconds = tests_of(mutant, known[mutant.room]), known[mutant.room]["seconds"]
        path, begun = copy / mutant.path, time.monotonic()
        text = path.read_text()
        targets = sorted({test.partition("::")[0] for test in tests})
        limit = PATIENCE_S + 10 * sum(seconds[test] for test in tests)
        try:
            for content in (mutant.applied(text), None):
                path.write_text(text if content is None else content)
                changed_at += 2  # compiled files are told apart by time and size
                os.utime(path, (changed_at, changed_at))
                if content is not None:
                    chosen = Chosen(tests, seconds)
                    status = in_a_child(partial(tested, targets, chosen), limit, copy / "said.txt")
        finally:
            path.write_text(text)
            os.utime(path, (changed_at, changed_at))
        names = {None: "timeout", 0: "survived", 1: "killed", 2: "killed", 3: "killed", 4: "killed", 70: "killed"}
        last = (copy / "said.txt").read_text(errors="replace")
        by = re.search(r"^(?:FAILED|ERROR) (\S+)", last, re.MULTILINE)
        print(
            json.dumps(
                {
                    "result": names.get(status, f"status {status}"),
                    "by": by[1] if by else "",
                    "tests": len(tests),
                    "seconds": round(time.monotonic() - begun, 1),
                }
            ),
            flush=True,
        )


# ---- the sample, and what came of it


def drawn(every: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """The first of all places in the order of a hash of what their line says: edits elsewhere move none of them."""
    seen: Counter[str] = Counter()
    order: dict[Mutant, str] = {}
    lines = {path: (ROOT / path).read_text().splitlines() for path in {mutant.path for mutant in every}}
    for mutant in every:
        says = f"{mutant.path}\0{lines[mutant.path][mutant.line - 1].strip()}\0{mutant.old}\0{mutant.new}"
        order[mutant] = hashlib.sha256(f"{seed}\0{says}\0{seen[says]}".encode()).hexdigest()
        seen[says] += 1
    return sorted(every, key=order.__getitem__)[:number]


class Copy:
    """A copy of the repository and a process that tests in it."""

    def __init__(self, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in tracked.stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=folder,
        )  # fmt: skip

    def ask(self, wanted: dict) -> dict:  # type: ignore[type-arg]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(wanted), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process that tests has ended with {self._process.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def side_by_side(copies: list[Copy], tasks: Iterator, perform) -> None:  # type: ignore[no-untyped-def,type-arg]
    lock = threading.Lock()

    def go(copy: Copy) -> None:
        while True:
            with lock:
                task = next(tasks, None)
            if task is None:
                return
            perform(copy, task, lock)

    threads = [threading.Thread(target=go, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read(results: Path) -> dict[str, dict]:  # type: ignore[type-arg]
    lines = results.read_text().splitlines() if results.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def summary(found: list[dict]) -> str:  # type: ignore[type-arg]
    rows = ["| room | mutants | noticed | of these endless | survived | noticed % |", "|---|--:|--:|--:|--:|--:|"]
    for room in [*dict.fromkeys(one["room"] for one in found), ""]:
        results = Counter(one["result"] for one in found if one["room"] == room or not room)
        total, survived = sum(results.values()), results["survived"]
        share = f"{100 * (total - survived) / total:.0f}" if total else "-"
        rows.append(f"| {room or 'all'} | {total} | {total - survived} | {results['timeout']} | {survived} | {share} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no more changes after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--again", action="store_true", help="try those again that survived before")
    parser.add_argument("--survivors", action="store_true", help="only say which have survived")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.jsonl"
    every = places(list(ROOMS))
    sample = [mutant for mutant in drawn(every, args.number, args.seed) if mutant.room in args.rooms]
    keys = {mutant: mutant.key((ROOT / mutant.path).read_text()) for mutant in sample}
    known = read(results)
    todo = [m for m in sample if keys[m] not in known or (args.again and known[keys[m]]["result"] == "survived")]
    if not args.survivors and todo:
        try_all(todo, keys, args, results)
    known = read(results)
    found = [known[keys[mutant]] for mutant in sample if keys[mutant] in known]
    for one in found:
        if one["result"] == "survived":
            change = f"{one['old']!r} -> {one['new']!r} ({one['kind']}, {one['tests']} tests)"
            print(f"{one['path']}:{one['line']}: {change}")
    print(f"\n{len(every)} places, {len(sample)} drawn, {len(found)} tried\n\n{summary(found)}")


def try_all(todo: list[Mutant], keys: dict[Mutant, str], args: argparse.Namespace, results: Path) -> None:
    end = time.monotonic() + 60 * args.minutes
    copies = [Copy(args.out / f"copy{n}") for n in range(min(args.jobs, len(todo)))]

    def look(copy: Copy, room: str, _lock: threading.Lock) -> None:
        out = args.out / f"traced-{room}.json"
        copy.ask({"trace": room, "out": str(out)})

    def attempt(copy: Copy, mutant: Mutant, lock: threading.Lock) -> None:
        answer = copy.ask({**asdict(mutant), "traced": str(args.out / f"traced-{mutant.room}.json")})
        with lock, results.open("a") as out:
            out.write(json.dumps({"key": keys[mutant], **asdict(mutant), **answer}) + "\n")

    rooms = list(dict.fromkeys(mutant.room for mutant in todo))
    for room in rooms:
        (args.out / f"traced-{room}.json").unlink(missing_ok=True)
    side_by_side(copies, iter(rooms), look)
    for room in rooms:
        traced = json.loads((args.out / f"traced-{room}.json").read_text())
        if traced["status"]:
            raise SystemExit(f"the tests of {room} fail without any change: {traced['failed']}")
    side_by_side(copies, (mutant for mutant in todo if time.monotonic() < end), attempt)
    for copy in copies:
        copy.end()


if __name__ == "__main__":
    main()
