"""Detectors of the critic: the value function on which PPO's advantages are based."""
