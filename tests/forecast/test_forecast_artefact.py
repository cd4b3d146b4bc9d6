"""A model's file: read as written; refused, with the reason, when anything in it is wrong."""

import hashlib
import json
from pathlib import Path

import pytest
from forecast_models import small_model

from rlwatch.errors import ConfigError
from rlwatch.forecast import Forecaster
from rlwatch.forecast import model as artefact
from rlwatch.forecast.gate import Evidence
from rlwatch.records import ClosedStep
from rlwatch.testing.small_batches import small_run


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.json"
    artefact.write_model(small_model(), path)
    return path


def test_a_model_is_read_as_it_was_written(saved):
    """Everything, with its hash beside it, and no half file is left."""
    assert artefact.load(saved) == small_model()
    assert saved.with_suffix(".sha256").read_text().split() == [hashlib.sha256(saved.read_bytes()).hexdigest()]
    assert sorted(path.name for path in saved.parent.iterdir()) == ["model.json", "model.sha256"]


def test_a_model_of_sparse_logs_lies_in_the_same_file(tmp_path):
    """And an old file, or one without enough such runs, has none."""
    whole = small_model(sparse=small_model(gains={"entropy": 1.0}))
    artefact.write_model(whole, tmp_path / "both.json")

    assert artefact.load(tmp_path / "both.json") == whole
    assert small_model().sparse is None


def wrong_hazard(raw):
    raw["sparse"]["hazards"].pop()


def wrong_budget(raw):
    for profile in raw["sparse"]["profiles"]:
        for kind in ("thresholds", "static"):
            profile[kind].pop("1")


def one_within_another(raw):
    raw["sparse"]["sparse"] = dict(raw["sparse"])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (wrong_hazard, "of its model of sparse logs: it has 2 hazards instead of 3"),
        (wrong_budget, "profiles have thresholds for different budgets"),
        (one_within_another, "its model of sparse logs has one of its own"),
    ],
)
def test_a_wrong_model_of_sparse_logs_is_refused_with_the_reason(tmp_path, spoil, why):
    """As anything else in the file is."""
    path = tmp_path / "both.json"
    artefact.write_model(small_model(sparse=small_model()), path)
    raw = json.loads(path.read_text())
    spoil(raw)

    with pytest.raises(ConfigError, match=why):
        artefact.parse_model(json.dumps(raw).encode())


def test_the_shipped_model_is_the_one_whose_hash_is_pinned():
    """It reads, has all horizons, and thresholds for every budget."""
    model = artefact.shipped_model()
    assert len(model.hazards) == 3
    assert all(set(p.thresholds) >= {"0.5", "1", "2"} for p in model.profiles)
    assert {"version", "runs", "labels"} <= set(model.meta)


def test_the_shipped_outline_is_that_of_the_shipped_model():
    """Of both its models. A new model needs a new file: ``outline.json`` holds what ``outline_file`` returns."""
    model, outline = artefact.shipped_model(), artefact.shipped_outline()
    folder = Path(artefact.__file__).parent / "shipped"
    digest = (folder / "hazard.sha256").read_text().strip()

    assert (folder / "outline.json").read_text() == artefact.outline_file(model, digest)
    for whole, part in ((model, outline), (model.sparse, outline.sparse)):
        assert (part.features, part.gains, part.profiles) == (whole.features, whole.gains, whole.profiles)


@pytest.mark.parametrize("gate", [None, Evidence.OTHERS])
def test_the_outline_forecasts_as_the_whole_model_does(gate):
    """Its heads are read where a probability is given; a log that gets none needs only the outline."""
    rows = [ClosedStep(row.step, row.metrics) for row in small_run(1003, failure="cut").rows][:80]
    whole = Forecaster(artefact.shipped_model(), gate=gate).extend(rows)

    assert Forecaster(gate=gate).extend(rows) == whole
    assert any(each.shown for each in whole) == (gate is None)


def test_a_changed_file_is_refused_by_its_hash(saved):
    """One digit is enough; an explicit hash counts instead of the file beside it."""
    good = hashlib.sha256(saved.read_bytes()).hexdigest()
    saved.write_bytes(saved.read_bytes().replace(b"0.9", b"0.8", 1))
    with pytest.raises(ConfigError, match="was changed; restore it or train it anew"):
        artefact.load(saved)
    saved.with_suffix(".sha256").unlink()
    assert artefact.load(saved) != small_model()
    with pytest.raises(ConfigError, match=good):
        artefact.load(saved, sha256=good)


def test_a_file_that_is_not_there_is_named(tmp_path):
    """No traceback of the file system."""
    with pytest.raises(ConfigError, match=r"nothing\.json cannot be read"):
        artefact.load(tmp_path / "nothing.json")


def cycle(raw):
    raw["hazards"][0]["trees"][1]["left"][1] = 0


def itself(raw):
    raw["hazards"][0]["trees"][0]["right"][0] = 0


def shared_child(raw):
    raw["hazards"][0]["trees"][1]["right"][1] = 4


def beyond(raw):
    raw["hazards"][0]["trees"][0]["right"][0] = 9


def no_such_feature(raw):
    raw["hazards"][2]["trees"][0]["feature"][0] = 2


def negative_feature(raw):
    raw["limits"]["ent_low"]["trees"][0]["feature"][0] = -2


def half_a_node(raw):
    raw["hazards"][0]["trees"][0]["left"][0] = 1.5


def short_column(raw):
    raw["hazards"][1]["trees"][0]["value"].pop()


def no_nodes(raw):
    raw["hazards"][1]["trees"][0] = {name: [] for name in raw["hazards"][1]["trees"][0]}


def text_for_a_number(raw):
    raw["hazards"][1]["base"] = "0.5"


def truth_for_a_number(raw):
    raw["hazards"][1]["base"] = True


def nan_value(raw):
    raw["hazards"][1]["trees"][0]["value"][1] = float("nan")


def infinite_value(raw):
    raw["hazards"][1]["slope"] = float("inf")


def no_threshold(raw):
    raw["profiles"][0]["thresholds"] = {}


def a_threshold_of_nothing(raw):
    raw["profiles"][0]["thresholds"]["1"] = 0.0


def other_budgets(raw):
    raw["profiles"][0]["static"].pop("1")


def a_profile_of_other_budgets(raw):
    for kind in ("thresholds", "static"):
        raw["profiles"][1][kind].pop("1")


def no_profiles(raw):
    raw["profiles"] = []


def two_hazards(raw):
    raw["hazards"].pop()


def a_feature_of_the_future(raw):
    raw["features"][0] = "entropy:tomorrow"


def a_feature_twice(raw):
    raw["features"] = ["entropy:fallen", "entropy:fallen"]


def another_format(raw):
    raw["format"] = "rlwatch-hazard/9"


def an_unknown_limit(raw):
    raw["limits"]["doom"] = raw["limits"]["ent_low"]


def an_unknown_signal(raw):
    raw["profiles"][0]["signals"] = ["vibes"]


def odd_direction(raw):
    raw["hazards"][0]["trees"][0]["missing_left"][0] = 2


def lists_for_objects(raw):
    raw["hazards"][0]["trees"] = {"0": {}}


def no_line(raw):
    del raw["hazards"][0]["line"]


def a_line_over_no_spread(raw):
    raw["hazards"][0]["line"]["spread"][0] = 0.0


def a_line_of_no_such_feature(raw):
    raw["hazards"][0]["line"]["feature"][1] = 2


def a_line_from_the_end(raw):
    raw["hazards"][0]["line"]["feature"][1] = -1


def a_short_line(raw):
    raw["hazards"][0]["line"]["weight"].pop()


def an_infinite_weight(raw):
    raw["hazards"][0]["line"]["weight"][0] = float("inf")


WRONGS = [
    no_line,
    a_line_over_no_spread,
    a_line_of_no_such_feature,
    a_line_from_the_end,
    a_short_line,
    an_infinite_weight,
    cycle,
    itself,
    shared_child,
    beyond,
    no_such_feature,
    negative_feature,
    half_a_node,
    short_column,
    no_nodes,
    text_for_a_number,
    truth_for_a_number,
    nan_value,
    infinite_value,
    no_threshold,
    a_threshold_of_nothing,
    other_budgets,
    a_profile_of_other_budgets,
    no_profiles,
    two_hazards,
    a_feature_of_the_future,
    a_feature_twice,
    another_format,
    an_unknown_limit,
    an_unknown_signal,
    odd_direction,
    lists_for_objects,
]


@pytest.mark.parametrize("wrong", WRONGS, ids=lambda one: one.__name__)
def test_contents_that_could_make_a_wrong_number_or_a_loop_are_refused(saved, wrong):
    """One clear error, whoever made the file and whatever its hash."""
    raw = json.loads(saved.read_bytes())
    wrong(raw)
    saved.write_text(json.dumps(raw))
    saved.with_suffix(".sha256").unlink()
    with pytest.raises(ConfigError, match=r"is not a valid rlwatch-hazard/2 file: .*; restore it or train it anew"):
        artefact.load(saved)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": "rlwatch-hazard/2"}', b"[" * 100_000]
)
def test_what_is_no_model_at_all_is_refused(data):
    """Empty, cut off, of another shape, not text, too deep."""
    with pytest.raises(ConfigError, match="is not a valid rlwatch-hazard/2 file"):
        artefact.parse_model(data)


def test_a_model_that_cannot_be_read_back_is_not_written(tmp_path):
    """The old file stays."""
    path = tmp_path / "model.json"
    artefact.write_model(small_model(), path)
    with pytest.raises(ConfigError, match="no profiles"):
        artefact.write_model(small_model(profiles=()), path)
    assert artefact.load(path) == small_model()
