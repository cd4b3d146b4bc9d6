"""What is recorded of OmegaConf's containers, which are none of Python's."""

from omegaconf import OmegaConf

from rlwatch.redaction import recordable


def test_omegaconf_is_recorded_with_what_is_missing_named():
    """Its lists and dictionaries are none of Python's; ``???`` raises when it is read."""
    config = OmegaConf.create(
        {"lr": 1e-6, "layers": [1, {"x": 2}], "data": "???", "twice": "${lr}", "wrong": "${nowhere}", "hub_token": "x9"}
    )
    kept = recordable(config)

    assert (kept["lr"], kept["layers"], kept["twice"], kept["hub_token"]) == (1e-6, [1, {"x": 2}], 1e-6, "[redacted]")
    assert kept["data"].startswith("<cannot be read: MissingMandatoryValue")
    assert kept["wrong"].startswith("<cannot be read: Interpolation")
