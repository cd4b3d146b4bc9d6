"""Critic: the value function that PPO's advantages rest on."""
