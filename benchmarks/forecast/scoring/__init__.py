"""Judging forecasts of failures: simple tools to beat, the scorer that compares tools, and the pages it makes."""
