"""Exploration: entropy, its budget and its sides, diversity, and the likelihood of correct answers."""
