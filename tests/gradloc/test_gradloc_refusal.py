"""What a model refuses to do is said in one line, and raises into nothing."""

import pytest
import torch

from rlwatch.gradloc.rerun import SHOWN, tried


def raising(error):
    raise error


def test_what_the_work_gives_is_passed_on():
    """Also where that is nothing: then the empty reason tells it from a refusal."""
    tensor = torch.ones(2)

    assert tried(lambda: tensor) == (tensor, "")
    assert tried(lambda: None) == (None, "")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (NotImplementedError("no forward AD for aten::foo"), "NotImplementedError: no forward AD for aten::foo"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), "OutOfMemoryError: CUDA out of memory."),
        (RuntimeError("x" * 1000), "RuntimeError: " + "x" * SHOWN),
        (ValueError(), "ValueError: "),
        (KeyError("weight"), "KeyError: 'weight'"),
    ],
)
def test_a_refusal_is_its_type_and_first_line(error, why):
    """Never more than one short line, never nothing: the other ranks go by it."""
    assert tried(lambda: raising(error)) == (None, why)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_no_refusal(error):
    """Ctrl-C during a probe ends training as it would have."""
    with pytest.raises(error):
        tried(lambda: raising(error()))
