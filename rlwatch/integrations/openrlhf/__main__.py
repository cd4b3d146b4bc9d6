"""``python -m rlwatch.integrations.openrlhf -m openrlhf.cli.train_ppo_ray ...``"""

from __future__ import annotations

import sys

from rlwatch.errors import RLWatchError
from rlwatch.integrations.openrlhf.launch import main

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RLWatchError as error:
        sys.exit(f"rlwatch: {error}")
