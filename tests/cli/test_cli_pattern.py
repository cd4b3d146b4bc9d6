"""``--pattern`` of scan, import and watch."""

ODD = "".join(f"it<{step}> R={'nan' if step > 3 else step * 0.5}\n" for step in range(1, 9))
PATTERN = r"it<(?P<step>\d+)> R=(?P<policy_entropy>\S+)"


def test_a_log_nobody_knows_is_judged_and_recorded_by_a_pattern(invoke, tmp_path):
    """And with ``--as`` the pattern is refused."""
    log, store = tmp_path / "odd.log", tmp_path / "store"
    log.write_text(ODD)
    scanned = invoke("scan", log, "--pattern", PATTERN)

    assert "pattern, 8 steps" in scanned.stdout
    assert scanned.exit_code == 1
    assert invoke("import", log, "--pattern", PATTERN, "--store", store).stdout.strip() == "odd"
    assert invoke("watch", log, "--once", "--pattern", PATTERN, "--store", store).exit_code == 1
    refused = invoke("scan", log, "--pattern", PATTERN, "--as", "verl-console")
    assert refused.exit_code == 2
    assert "give one of them" in refused.stderr
