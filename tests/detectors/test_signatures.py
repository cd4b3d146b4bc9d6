"""Each published failure signature is found for what it is, at the severity it deserves; healthy runs are left alone."""

import pytest
from signature_runs import BLOCK, PAGE, SIGNATURES, Signature, alarms, judged, page, records, table_row

FOUND = [signature for signature in SIGNATURES if signature.kind]
ONE_OF_A_KIND = {(signature.kind, signature.worst): signature for signature in FOUND}.values()
"""One of each kind of finding and severity; other sources' runs of the same are for ``make thorough``."""
each = pytest.mark.parametrize(
    "signature",
    [
        pytest.param(
            one, id=f"{one.source.split()[0]} {one.name}", marks=[] if one in ONE_OF_A_KIND else pytest.mark.thorough
        )
        for one in FOUND
    ],
)


@each
def test_a_signature_is_found_for_what_it_is(signature):
    """By an alert of its own kind, or a remark, at that severity and no worse."""
    said = judged(signature)

    assert next((severity for severity in ("critical", "warning", "info") if severity in said), None) == signature.worst


@each
def test_the_page_says_what_is_found_of_a_signature(signature):
    """Its row of the table; that there are no others is said below."""
    assert table_row(signature) in PAGE.read_text(encoding="utf-8")


def test_the_page_says_what_is_not_found():
    """A row each, which says so."""
    rows = [table_row(signature) for signature in SIGNATURES if not signature.kind]

    assert rows
    assert [row for row in rows if row not in PAGE.read_text(encoding="utf-8")] == []


def test_the_page_names_every_signature_and_no_other():
    """In their order."""
    rows = [
        line.split(" | ") for line in BLOCK.search(PAGE.read_text(encoding="utf-8"))[0].splitlines() if " | " in line
    ]

    assert [tuple(row[:2]) for row in rows[1:]] == [(f"| {one.source}", one.name) for one in SIGNATURES]


@pytest.mark.parametrize("seed", range(2))
def test_the_healthy_run_that_signatures_are_made_of_is_left_alone(seed):
    """Nothing above a remark."""
    assert [said for said in alarms(records(Signature("", "healthy", "", "", ""), seed)) if said[2] != "info"] == []


@pytest.mark.thorough
def test_the_page_says_what_is_found():
    """``python tests/detectors/signature_runs.py`` writes it anew."""
    text = PAGE.read_text(encoding="utf-8")

    assert page(text) == text
