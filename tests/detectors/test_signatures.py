"""Each published failure signature is found for what it is, at the severity it deserves; healthy runs are left alone."""

import pytest
from signature_runs import PAGE, SIGNATURES, Signature, alarms, judged, page, records

FOUND = [signature for signature in SIGNATURES if signature.kind]
each = pytest.mark.parametrize("signature", FOUND, ids=lambda s: f"{s.source.split()[0]} {s.name}")


@each
def test_a_signature_is_found_for_what_it_is(signature):
    """By an alert of its own kind, or a remark, at that severity and no worse."""
    said = judged(signature)

    assert next((severity for severity in ("critical", "warning", "info") if severity in said), None) == signature.worst


@pytest.mark.parametrize("seed", range(2))
def test_the_healthy_run_that_signatures_are_made_of_is_left_alone(seed):
    """Nothing above a remark."""
    assert [said for said in alarms(records(Signature("", "healthy", "", "", ""), seed)) if said[2] != "info"] == []


def test_the_page_says_what_is_found():
    """``python tests/detectors/signature_runs.py`` writes it anew."""
    text = PAGE.read_text(encoding="utf-8")

    assert page(text) == text
