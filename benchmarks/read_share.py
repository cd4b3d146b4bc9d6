"""Of the logs of a folder: how many are read, and in how many the reward is there and not read.

    python benchmarks/read_share.py FOLDER...

Prints for each folder the files read and refused, those in which a name may be the reward and none is read as it, and
those of which a scan says "healthy" without a reward; and the names that were read as the reward, for a look at roles.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from rlwatch.errors import ImportFormatError
from rlwatch.importers import read_log
from rlwatch.importers.base import ImportedRun
from rlwatch.metrics import known, like_rewards, taken
from rlwatch.scanner import replay

REWARD = "reward/mean"


def looked_at(log: Path, runs: list[ImportedRun], counts: Counter[str], rewards: Counter[str]) -> None:
    """Count what became of the reward in a file that was read."""
    unread: list[str] = []
    healthy = False
    for run in runs:
        names = {name for record in run.records for name in record.metrics}
        rewards.update(each.name for each in taken(names, run.source) if each.metric == REWARD)
        if REWARD not in known(names, run.source):
            unread += like_rewards(names)
            healthy = healthy or "healthy" in replay(run).view.headline.lower()
    counts.update({"reward not read": bool(unread), "healthy without a reward": healthy})
    if unread or healthy:
        print(f"  {log}: {', '.join(unread[:5])}{' healthy' if healthy else ''}")


def main(folders: list[str]) -> None:
    """Print the figures of each folder, and of all."""
    total: Counter[str] = Counter()
    rewards: Counter[str] = Counter()
    for folder in folders:
        counts: Counter[str] = Counter()
        for log in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            try:
                runs = read_log(log)
            except ImportFormatError:
                counts["refused"] += 1
                continue
            counts["read"] += 1
            looked_at(log, runs, counts, rewards)
        print(folder, dict(counts))
        total += counts
    share = total["reward not read"] / max(1, total["read"])
    print(f"all {dict(total)}; reward in the file and not read: {share:.1%}")
    print("read as the reward:", ", ".join(f"{name} {count}" for name, count in rewards.most_common(60)))


if __name__ == "__main__":
    main(sys.argv[1:])
