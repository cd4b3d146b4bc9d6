"""``rlwatch demo``: one real TRL GRPO run, watched live, steered once, and lost to its own learning rate."""
