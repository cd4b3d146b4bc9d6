"""Runs saved by ``[[rescue]]``, in pairs: the same run with the same seed unguarded, and with the policy.

    python benchmarks/rescue.py run --seeds 100-101 --jobs 2 --out build/rescue.jsonl
    python benchmarks/rescue.py report build/rescue.jsonl

Runs are tiny GRPO policies trained by TRL (the trainer of ``benchmarks/forecast``); a run of 200 steps takes half a
minute. Both arms are watched with snapshots, so that they are the same to the bit until the policy acts. What counts is
the accuracy on 256 held-out problems, sampled from the policy's own weights at temperature 1: the mean of the last two
of the evaluations that are made every ten steps. An interrupted benchmark goes on where it was.

*saved*: the policy keeps at least .7 of what the healthy run of the same setting has over the unguarded one. *halt*:
the accuracy of the last good snapshot at the first alarm, which is what stopping there would have kept. *resumed*: the
policy ends above halt by two standard errors. A reward whose sign flips cannot be learnt from, so it is *preserved* or
not, apart. *harm*: accuracy lost in runs without a fault, and with harmless ones.

The kinds of faults in ``HELD_OUT`` were chosen before the policy had been run on any of these, and it was not changed
for them. Those in ``SEEN`` were held out once; the policy was changed after what came of them was published.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import joblib
from detection.score import wilson
from forecast.trl_setting import Fault, Setting

BASE = Setting(steps=200, lr=3e-4, batch=128, generations=8, beta=0.01)
ENGINE = replace(BASE, engine="bfloat16")
SLOW_JUDGE_S = 20.0
"""Seconds after which a row that is not judged is no longer waited for."""
KNOWN = {
    "lr ramp": replace(BASE, faults=(Fault("learning rate", 60, 40.0, ramp=60),)),
    "lr constant": replace(BASE, lr=3e-3),
    "lr spike": replace(BASE, faults=(Fault("learning rate", 100, 200.0, end=102),)),
    "off-policy": replace(BASE, num_iterations=8, lr=5e-4, epsilon=1000.0),
    "engine noise": replace(ENGINE, faults=(Fault("engine noise", 60, 1.0, ramp=100),)),
    "stale engine": replace(ENGINE, lr=1e-3, faults=(Fault("engine staleness", 50, 16.0),)),
    "entropy bonus": replace(BASE, lr=5e-4, entropy_coef=0.25),
}
"""Faults of which it was known, from measurements by others, what saves a run (see docs/diagnosis.md)."""
SEEN = {
    "positive advantages": replace(BASE, lr=1e-3, faults=(Fault("positive advantages", 70, 0.8, ramp=40),)),
    "engine temperature": replace(ENGINE, lr=1e-3, faults=(Fault("engine temperature", 60, 1.0, ramp=60),)),
    "kl weight": replace(
        BASE, beta=0.02, faults=(Fault("kl weight", 70, 4.0, ramp=40), Fault("learning rate", 70, 10.0, 40))
    ),
    "half gradients": replace(BASE, faults=(Fault("half gradients", 80, 40.0, end=84),)),
    "random reward": replace(BASE, lr=1e-3, faults=(Fault("random reward", 70, 0.9, ramp=30),)),
}
"""Kinds of faults that were held out of the first tables (seeds 102 to 109), and are known since."""
HELD_OUT = {
    "entropy weight": replace(BASE, lr=5e-4, entropy_coef=1e-3, faults=(Fault("entropy weight", 70, 0.5, ramp=40),)),
    "clip range": replace(BASE, num_iterations=4, lr=1e-3, faults=(Fault("clip range", 70, 1000.0),)),
    "kl sign": replace(BASE, beta=0.02, lr=5e-4, faults=(Fault("kl weight", 70, -1.0, ramp=40),)),
    "length reward": replace(BASE, lr=1e-3, longest=14, faults=(Fault("length reward", 70, 20.0, ramp=40),)),
    "lost weight": replace(ENGINE, faults=(Fault("lost weight", 90, end=91),)),
}
"""Kinds of faults that are listed before the policy is run on them, to be judged on the seeds 110 to 113, once."""
OUTSIDE = {"reward sign": replace(BASE, faults=(Fault("reward sign", 100),))}
"""A fault outside the policy, for good: it can be preserved, not saved."""
HARMLESS = {
    "no fault": BASE,
    "no fault, engine": ENGINE,
    "verifier outage": replace(BASE, faults=(Fault("constant reward", 100, end=108),)),
    "lr blip": replace(BASE, faults=(Fault("learning rate", 150, 5.0, end=151),)),
}
"""Runs that end well by themselves."""
GROUPS = {"known": KNOWN, "seen": SEEN, "held out": HELD_OUT, "outside": OUTSIDE, "harmless": HARMLESS}
ARMS = ("unguarded", "policy", "healthy")


@dataclass(frozen=True)
class Task:
    """One run: a recipe, a seed, an arm."""

    group: str
    recipe: str
    seed: int
    arm: str

    @property
    def key(self) -> str:
        """Name in the file of results."""
        return f"{self.recipe}/{self.seed}/{self.arm}"


def setting_of(task: Task) -> Setting:
    """Return the setting of the run; a healthy one has no fault, and the base's learning rate, clip and bonus."""
    setting = replace(GROUPS[task.group][task.recipe], start=task.seed % 3)
    if task.arm != "healthy":
        return setting
    return replace(
        setting, faults=(), lr=BASE.lr, epsilon=BASE.epsilon, entropy_coef=BASE.entropy_coef, num_iterations=1
    )


# One run.


def made(task: Task, starts: Path) -> dict[str, Any]:
    """Train it and return what came of it."""
    from forecast.trl_trainer import make_trainer, quiet

    from rlwatch.integrations.snapshots import Snapshots
    from rlwatch.integrations.trl import watch
    from rlwatch.store.memory import forget

    quiet()
    starts.mkdir(parents=True, exist_ok=True)
    setting, begun, end = setting_of(task), time.perf_counter(), "finished"
    name = f"rescue-{os.getpid()}"
    with tempfile.TemporaryDirectory() as directory:
        permission = Path(directory) / "rlwatch.toml"
        dry = str(task.arm != "policy").lower()
        permission.write_text(f"[[rescue]]\nskip_nonfinite = true\ndry_run = {dry}\n")
        trainer, truth = make_trainer(setting, task.seed, starts, Path(directory))
        truth.dead_steps = setting.steps  # a policy may yet restore the weights
        run = watch(
            trainer,
            store=f"memory://{name}",
            run_id=name,
            localise=False,
            forecast=False,
            sigterm=False,
            snapshots=Snapshots(every=10, share=1.0),
            config_file=permission,
        )
        pace = paced(run, setting.num_iterations)
        trainer.callback_handler.callbacks.insert(0, pace)
        try:
            trainer.train()
        except (RuntimeError, ValueError) as error:  # TRL cannot sample from weights that are not finite
            end = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        run.finish()
        heldout = dict(truth.heldout)
        acts = list(acts_of(f"memory://{name}", name))
        forget(name)
    alive = end == "finished" and not truth.nan.get(int(trainer.state.global_step))
    last = [heldout[step] for step in sorted(heldout)[-2:]] if alive else [0.0]
    return {
        "key": task.key,
        "group": task.group,
        "recipe": task.recipe,
        "seed": task.seed,
        "arm": task.arm,
        "final": fmean(last) if last else 0.0,
        "end": end,
        "steps": int(trainer.state.global_step),
        "alarm": pace.alarm,
        "halt": halted(heldout, pace.alarm, acts),
        "heldout": {str(step): value for step, value in heldout.items()},
        "acts": acts,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def paced(run: Any, batch: int = 1) -> Any:
    """Return a callback that waits, at each step's end, until the rows before it are judged, as a slow run would.

    ``batch``: updates from one batch; only the row of the first has a reward, and is judged for certain.
    """
    from transformers import TrainerCallback

    class PacedCallback(TrainerCallback):
        def __init__(self, run: Any) -> None:
            self.run, self.alarm = run, None

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.run.flush()
            until = time.monotonic() + SLOW_JUDGE_S
            while time.monotonic() < until:
                rows, due = self.run.health().rows, state.global_step - 2
                if due < 1 or (rows and rows[-1].step >= due - (due - 1) % batch):
                    break
                time.sleep(0.002)
            health = self.run.health()
            if self.alarm is None and self.run.rescue.alarm(health) is not None:
                self.alarm = int(state.global_step)

    return PacedCallback(run)


def acts_of(store: str, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the ledger of the run."""
    import rlwatch

    for event in rlwatch.open_store(store).events(run_id):
        if event.kind in ("rescue", "command"):
            body = dict(event.body)
            yield {"step": event.step, "kind": event.kind} | {
                name: body[name] for name in ("stage", "command", "args", "why", "evidence") if name in body
            }


def halted(heldout: dict[int, float], alarm: int | None, acts: Sequence[dict[str, Any]]) -> float | None:
    """Return the held-out accuracy at the last good snapshot at the first alarm; None where none was known.

    Of the evaluation at its step: snapshots and evaluations are both made every ten steps, but none before the first.
    """
    first = next((act for act in acts if act["kind"] == "rescue" and "last_good" in act.get("evidence", {})), None)
    good = None if first is None or alarm is None else first["evidence"]["last_good"]
    return None if good is None else heldout.get(int(good))


# All of them.


def tasks(seeds: Sequence[int], groups: Iterable[str], recipes: Collection[str] = ()) -> list[Task]:
    """Return the runs, the pairs of a seed beside each other; of these recipes, all of them if none is named."""
    return [
        Task(group, recipe, seed, arm)
        for seed in seeds
        for group in groups
        for recipe in GROUPS[group]
        for arm in ARMS
        if not (group == "harmless" and arm == "healthy") and (not recipes or recipe in recipes)
    ]


def run(arguments: argparse.Namespace) -> None:
    """Make the runs that are missing, and append each to the file when it is done."""
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["key"] for line in out.read_text().splitlines()} if out.exists() else set()
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    alike: dict[tuple[Setting, int, bool], list[Task]] = defaultdict(list)
    for task in tasks(seeds, arguments.groups, arguments.recipes):
        if task.key not in done:
            alike[setting_of(task), task.seed, task.arm == "policy"].append(task)
    missing = [same[0] for same in alike.values()][: arguments.most]
    sys.stderr.write(f"{len(missing)} runs to be made\n")
    work = joblib.Parallel(n_jobs=arguments.jobs, return_as="generator_unordered")
    for found in work(joblib.delayed(made)(task, out.parent / "starts") for task in missing):
        of = next(same for same in alike.values() if same[0].key == found["key"])
        with out.open("a") as file:
            for task in of:  # the healthy run of a seed is that of many recipes
                mine = {"key": task.key, "group": task.group, "recipe": task.recipe, "arm": task.arm}
                file.write(json.dumps(found | mine) + "\n")
        acts = [act["command"] for act in found["acts"] if act["kind"] == "command"]
        sys.stderr.write(f"{found['key']}: {found['final']:.3f}, alarm {found['alarm']}, {' '.join(acts)}\n")


def report(arguments: argparse.Namespace) -> None:
    """Print the tables, or write them to a page."""
    text = page(arguments.file, arguments.at)
    if arguments.page is None:
        print(text)
    else:
        arguments.page.write_text(text)


WORDS = """# Runs saved by a policy

`[[rescue]]` ([control](control.md#saving-a-run-without-a-person)) in pairs of runs with the same seed: unguarded, and
with the policy. Written by `python benchmarks/rescue.py report {file} --page docs/rescue.md` from runs of
`python benchmarks/rescue.py run --seeds {seeds}`{at}.

* **Pairs**: {pairs}.
* **Runs**: GRPO by TRL on tiny policies (75,000 parameters, 200 steps), watched with snapshots every ten steps. The two
  of a pair are the same to the bit until the policy acts. Accuracy is that of 256 held-out problems, the mean of the
  last two evaluations. A run that ends in an error, or with weights that are not finite, has accuracy 0.
* **Halt**: the accuracy of the last good snapshot at the first alarm, which is what stopping there would have kept.
* **Saved**: the policy keeps at least .7 of what the healthy run of the same seed has over the unguarded one. A pair in
  which the fault cost less than .05 counts as neither.
* **Resumed**: the policy ends above halt by two standard errors.
* **Seen**: these kinds were held out of the first tables, which the policy of that day saved 3 of 19 of. It was changed
  since, with runs of the seeds 100 and 101 in view.
* **Held out**: these kinds of faults were listed and committed (`84f848ee`) before the policy was changed, and it was
  not run on any of them before the runs of this table.

"""


def page(file: Path, at: str = "") -> str:
    """Return the page of the results in ``file``, of runs made with the code of the commit ``at``."""
    runs: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in file.read_text().splitlines():
        found = json.loads(line)
        runs[found["group"], found["recipe"], found["seed"]][found["arm"]] = found
    seeds = sorted({seed for _, _, seed in runs})
    pairs = Counter(seed for (_, _, seed), arms in runs.items() if {"unguarded", "policy"} <= set(arms))
    counts = ", ".join(f"{pairs[seed]} of seed {seed}" for seed in seeds)
    text = [WORDS.format(file=file.as_posix(), seeds=f"{seeds[0]}-{seeds[-1]}", at=at and f" at `{at}`", pairs=counts)]
    for group, recipes in GROUPS.items():
        lines = [row for recipe in recipes if (row := _row(runs, group, recipe))]
        if lines:
            text += [f"## {group.capitalize()}\n", _sum(runs, group), ""]
            text += ["| recipe | runs | healthy | unguarded | halt | policy | saved | resumed | first alarm at |"]
            text += ["|---|---|---|---|---|---|---|---|---|", *lines, ""]
    return "\n".join(text)


def _sum(runs: dict[tuple[str, str, int], dict[str, dict[str, Any]]], group: str) -> str:
    """Return what became of all pairs of a group, in one sentence."""
    pairs = [arms for (of, _, _), arms in runs.items() if of == group and {"unguarded", "policy"} <= set(arms)]
    if group in ("harmless", "outside"):
        lost = [arms["unguarded"]["final"] - arms["policy"]["final"] for arms in pairs]
        acted = sum(any(act.get("command") == "hold" for act in arms["policy"]["acts"]) for arms in pairs)
        if group == "outside":
            kept = f"it kept {-fmean(lost):.3f} more than the unguarded runs on average, {-max(lost):.3f} at least"
            return f"The policy acted in {acted} of {len(pairs)}; {kept}."
        cost = f"it cost {fmean(lost):.3f} on average, {max(lost):.3f} at most"
        return f"The policy acted in {acted} of {len(pairs)}; {cost}."
    saved, resumed = ([one for arms in pairs if (one := is_so(arms)) is not None] for is_so in (is_saved, is_resumed))
    low, high = wilson(sum(saved), len(saved))
    return (
        f"Saved {sum(saved)} of {len(saved)} [{low:.2f}-{high:.2f}], resumed {sum(resumed)} of {len(resumed)}; "
        f"{sum(arms['unguarded']['alarm'] is None for arms in pairs)} of {len(pairs)} had no alarm."
    )


def _row(runs: dict[tuple[str, str, int], dict[str, dict[str, Any]]], group: str, recipe: str) -> str:
    pairs = [
        arms for (g, r, _), arms in runs.items() if (g, r) == (group, recipe) and {"unguarded", "policy"} <= set(arms)
    ]
    if not pairs:
        return ""
    saved = [one for one in (is_saved(arms) for arms in pairs) if one is not None]
    resumed = [one for one in (is_resumed(arms) for arms in pairs) if one is not None]
    alarms = ", ".join(str(arms["unguarded"]["alarm"]) for arms in pairs)
    halts = [arms["unguarded"]["halt"] for arms in pairs if arms["unguarded"]["halt"] is not None]
    healthy = [arms["healthy"]["final"] for arms in pairs if "healthy" in arms]
    cells = [
        recipe,
        str(len(pairs)),
        _mean(healthy),
        _mean([arms["unguarded"]["final"] for arms in pairs]),
        _mean(halts),
        _mean([arms["policy"]["final"] for arms in pairs]),
        f"{sum(saved)}/{len(saved)}" if saved else "-",
        f"{sum(resumed)}/{len(resumed)}" if resumed else "-",
        alarms,
    ]
    return f"| {' | '.join(cells)} |"


def is_saved(arms: dict[str, dict[str, Any]]) -> bool | None:
    """Return whether the policy kept .7 of the gain; None without a healthy run, or where nothing was lost."""
    if "healthy" not in arms:
        return None
    healthy, lost, kept = (arms[arm]["final"] for arm in ("healthy", "unguarded", "policy"))
    return None if healthy - lost < 0.05 else (kept - lost) / (healthy - lost) >= 0.7


def is_resumed(arms: dict[str, dict[str, Any]]) -> bool | None:
    """Return whether the policy ended above the last good snapshot by two standard errors of both."""
    halt, kept = arms["unguarded"]["halt"], arms["policy"]["final"]
    if halt is None:
        return None
    error = math.sqrt(halt * (1 - halt) / 256 + kept * (1 - kept) / 512)
    return bool(kept > halt + 2 * error)


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" if values else "-"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Runs saved by [[rescue]], in pairs.")
    ways = parser.add_subparsers(required=True)
    runs = ways.add_parser("run")
    runs.add_argument("--seeds", default="100", help="a seed, or a range as 100-103")
    runs.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    runs.add_argument("--recipes", nargs="+", default=[], help="recipes of these groups; all by default")
    runs.add_argument("--jobs", type=int, default=2)
    runs.add_argument("--most", type=int, default=None, help="runs that are made now")
    runs.add_argument("--out", type=Path, default=Path("build/rescue.jsonl"))
    runs.set_defaults(do=run)
    table = ways.add_parser("report")
    table.add_argument("file", type=Path)
    table.add_argument("--at", default="", help="commit at which the runs were made")
    table.add_argument("--page", type=Path, default=None, help="write the tables here")
    table.set_defaults(do=report)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
