"""How many modules of rlwatch one must open to follow one thing.

    python benchmarks/paths.py              # the five paths, a number each; --list names the modules
    python benchmarks/paths.py --page       # the same, written into the table of docs/architecture.md

Five things are followed through a live run, in every thread, by a profiler: a value into the store and out again, a
finding, a command, a NaN to its webhook, a gradient spike to its culprits. A module counts if one of its functions is
called between the moment the thing enters and the moment it can be read and the run has come to rest: what else runs
meanwhile would count or not by the load of the machine. All detectors together count as one. What is set up before
(imports, `init`) does not count, nor does the look at the machine, which goes by the clock and not by rows.
"""

import argparse
import copy
import http.server
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
DEADLINE_S = 120.0
REST_S = 3.0
"""Without a module that is new to the path, after which the run has come to rest: threads look every second."""
WARM_UP = 60
"""Rows before a path is followed: detectors know their baseline, the forecaster is loaded."""


class Followed:
    """Modules whose functions are called while `on`, in every thread started after it was installed."""

    def __init__(self) -> None:
        self.on = False
        self.modules: set[str] = set()
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame, event, _arg):
        if self.on and event == "call":
            name = frame.f_globals.get("__name__", "")
            # `<module>` is an import, not a step of the path
            if name.startswith("rlwatch") and frame.f_code.co_name != "<module>":
                self.modules.add(name)

    @contextmanager
    def path(self) -> Iterator[set[str]]:
        self.modules = set()
        self.on = True
        try:
            yield self.modules
            self._rest()
        finally:
            self.on = False
            self.modules.difference_update(detectors := {name for name in self.modules if is_detector(name)})
            if detectors:
                self.modules.add("rlwatch.detectors: a detector")

    def _rest(self) -> None:
        known, since = len(self.modules), time.monotonic()
        while time.monotonic() - since < REST_S:
            time.sleep(0.2)
            if len(self.modules) != known:
                known, since = len(self.modules), time.monotonic()


def is_detector(module: str) -> bool:
    """Every row passes every detector; to follow one thing, one opens one of them."""
    classes = [value for value in vars(sys.modules[module]).values() if isinstance(value, type)]
    return module.startswith("rlwatch.detectors.") and any(
        one.__module__ == module and getattr(one, "kinds", ()) for one in classes
    )


def until(true: Callable[[], object]) -> None:
    """Wait for a condition without calling into rlwatch more often than needed."""
    end = time.monotonic() + DEADLINE_S
    while not true():
        if time.monotonic() > end:
            raise SystemExit("nothing came: the path could not be followed")
        time.sleep(0.2)


def healthy(step: int) -> dict[str, float]:
    wobble = 0.01 * ((step * 7) % 5)
    return {
        "entropy": 1.0 + wobble,
        "reward": min(0.2 + 0.005 * step, 0.6) + wobble,
        "grad_norm": 0.4 + wobble,
        "kl": 0.01 + 0.0001 * step,
    }


def warmed(url: str, name: str):
    import rlwatch

    run = rlwatch.init(store=url, project="paths", name=name)
    for step in range(WARM_UP):
        run.log(healthy(step), step=step)
        time.sleep(0.01)
    store = rlwatch.open_store(url)
    run_id = run.info.run_id
    until(lambda: store.judged(run_id)[0] >= WARM_UP - 1)  # a step is judged when the next one comes
    time.sleep(1.0)  # the forecaster loads behind
    return run, store, run_id


def a_value(followed: Followed, url: str) -> set[str]:
    """One logged row, read back as a series."""
    run, store, run_id = warmed(url, "a-value")
    with followed.path() as modules:
        run.log(healthy(WARM_UP), step=WARM_UP)
        until(lambda: len(store.series(run_id, ["entropy"])["entropy"].steps) > WARM_UP)
    run.finish()
    return modules


def a_finding(followed: Followed, url: str) -> set[str]:
    """A fall of entropy to nothing, until its finding can be read."""
    run, store, run_id = warmed(url, "a-finding")
    with followed.path() as modules:
        for step in range(WARM_UP, WARM_UP + 40):
            run.log({**healthy(step), "entropy": 0.01}, step=step)
        until(lambda: any(finding.kind == "entropy_collapse" for finding in store.findings(run_id)))
    run.finish()
    return modules


def a_nan(followed: Followed, url: str) -> set[str]:
    """A NaN, until a receiver of webhooks has the alert."""
    received = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["RLWATCH_WEBHOOK_URL"] = f"http://127.0.0.1:{server.server_port}/"
        try:
            run, _store, _run_id = warmed(url, "a-nan")
            with followed.path() as modules:
                for step in range(WARM_UP, WARM_UP + 6):
                    run.log({**healthy(step), "grad_norm": float("nan")}, step=step)
                until(lambda: any(b"nonfinite" in body for body in received))
            run.finish()
        finally:
            del os.environ["RLWATCH_WEBHOOK_URL"]
            server.shutdown()
    return modules


def loop(url: str, name: str):
    """A tiny loop of one's own, warmed up; returns its watcher and a function that trains one step."""
    import torch

    import rlwatch

    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import own_loop

    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = own_loop.Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    watcher = rlwatch.Watcher(
        policy, optimizer, ref_model=reference, clip=own_loop.CLIP, eos=0, project="paths", name=name, store=url
    )

    def train(step: int, spike: float = 1.0) -> None:
        watcher.obey()
        ids, mask, rewards = own_loop.generate(policy)
        advantages = own_loop.group_advantages(rewards)
        with torch.no_grad():
            old_logp, ref_logp = own_loop.logp_of(policy, ids)[0], own_loop.logp_of(reference, ids)[0]
        watcher.rollouts(rewards=rewards, groups=own_loop.GROUP, lengths=mask.sum(1))
        advantages = torch.where(torch.arange(len(advantages)) == 3, advantages * spike, advantages)
        optimizer.zero_grad()
        logp, logits = watcher.forward(own_loop.logp_of, policy, ids)
        loss = own_loop.loss_of(logp, old_logp, ref_logp, advantages, mask)
        watcher.observe(
            logp=logp,
            logits=logits,
            ids=ids[:, 1:],
            mask=mask,
            advantages=advantages,
            old_logp=old_logp,
            ref_logp=ref_logp,
        )
        loss.backward()
        watcher.gradients()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        watcher.step(step, loss=loss.detach())

    for step in range(1, WARM_UP):
        train(step)
    return watcher, train


def a_command(followed: Followed, url: str) -> set[str]:
    """A reset of the reference, from the request until the trainer's answer can be read."""
    import rlwatch
    from rlwatch.control.commands import request

    watcher, train = loop(url, "a-command")
    store = rlwatch.open_store(url)
    run_id = watcher.run.info.run_id
    with followed.path() as modules:
        request(store, run_id, "reset-reference", why="to follow it")

        def answered() -> bool:
            watcher.obey()
            return any(
                command.status.value not in ("queued", "claimed", "running") for command in store.commands(run_id)
            )

        until(answered)
    answers = [command.status.value for command in store.commands(run_id)]
    if answers != ["done"]:
        raise SystemExit(f"the command was answered {answers}, not done")
    train(WARM_UP)
    watcher.finish()
    return modules


def a_spike(followed: Followed, url: str) -> set[str]:
    """A gradient that one response multiplies, until its culprits can be read from the store."""
    import rlwatch

    watcher, train = loop(url, "a-spike")
    store = rlwatch.open_store(url)
    run_id = watcher.run.info.run_id
    with followed.path() as modules:
        train(WARM_UP, spike=3000.0)
        until(lambda: store.top_spikes(run_id))
    watcher.finish()
    return modules


PATHS = {
    "a value": a_value,
    "a finding": a_finding,
    "a command": a_command,
    "a NaN to its webhook": a_nan,
    "a spike to its culprits": a_spike,
}


def written(text: str, counts: dict[str, int]) -> str:
    """The page with these numbers in the last column of its table."""
    for name, count in counts.items():
        text, rows = re.subn(rf"^(\| {re.escape(name)} \|.*\|) \d+ \|$", rf"\1 {count} |", text, flags=re.MULTILINE)
        if rows != 1:
            raise SystemExit(f"{PAGE.name} has {rows} rows of {name!r}, not one")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the modules of each path")
    parser.add_argument("--only", choices=sorted(PATHS), help="follow one thing alone")
    parser.add_argument("--page", action="store_true", help=f"write the numbers into docs/{PAGE.name}")
    args = parser.parse_args()
    os.environ["RLWATCH_SYSTEM"] = "0"
    followed, counts = Followed(), dict[str, int]()
    with tempfile.TemporaryDirectory() as directory:
        for name, follow in PATHS.items():
            if args.only in (None, name):
                modules = follow(followed, str(Path(directory) / "runs"))
                counts[name] = len(modules)
                print(f"{name:26} {len(modules):3} modules", flush=True)
                if args.list:
                    print("".join(f"    {module}\n" for module in sorted(modules)), end="")
    if args.page:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), counts), encoding="utf-8")


if __name__ == "__main__":
    main()
