"""A plugin of pytest where nothing of a trainer is installed: a test that needs one is skipped, and counted as such."""

import re

import pytest

TRAINERS = ("torch", "transformers", "trl", "tokenizers", "accelerate", "peft", "datasets", "safetensors")
ABSENT = re.compile(rf"ModuleNotFoundError: No module named '({'|'.join(TRAINERS)})['.]")


def _skip(report):
    absent = ABSENT.search(str(report.longrepr)) if report.failed else None
    if absent:
        report.outcome = "skipped"
        report.longrepr = (str(report.fspath), 0, f"Skipped: needs {absent[1]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _skip((yield))
