"""The reward: falling, constant, gamed, or the same for all of a group."""
