"""Detectors of exploration: entropy (level, budget, by sign of the advantage), diversity, likelihood of right
answers.
"""
