"""The small parts importers are made of: bytes to lines, text to numbers, bars, printed dicts, trainers' names."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_logs import bar

from rlwatch.importers.assemble import source_of
from rlwatch.importers.base import Skips, metrics_of, number, step_of, value_of
from rlwatch.importers.console import bars, dict_rows
from rlwatch.importers.lines import Segments, plain, without_prefix


def segments(*chunks: bytes) -> list[tuple[int, str]]:
    reader = Segments()
    found = [segment for chunk in chunks for segment in reader.feed(chunk)]
    return [(segment.line, segment.text) for segment in found + reader.finish()]


def test_both_line_ends_cut_but_only_line_feeds_count():
    """A bar redraws itself within one physical line."""
    assert segments(b"a\rb\r\nc\n\n\r \r\nd") == [(1, "a"), (1, "b"), (2, "c"), (5, "d")]


def test_other_separators_of_unicode_do_not_cut():
    """``str.splitlines`` would cut at them and count other lines than an editor does."""
    assert segments("a\x0bb\u2028c\x85d\n".encode()) == [(1, "a\x0bb\u2028c\x85d")]


def test_bytes_that_are_no_text_are_replaced():
    """They must not stop the reading."""
    assert segments(b"a\xffb\nc") == [(1, "a\ufffdb"), (2, "c")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks_are_seen_through(encoding):
    """Those of Windows' editors and shells."""
    assert segments("step:1 é\n".encode(encoding)) == [(1, "step:1 é")]


@given(st.data(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
def test_segments_do_not_depend_on_the_chunks(data, encoding):
    """Cut in characters, escapes and line ends."""
    text = data.draw(st.text(st.sampled_from("ab é\r\n\x1b[0m{\"▎'"), max_size=60))
    whole = text.encode(encoding)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    assert segments(*chunks) == segments(whole)


@pytest.mark.parametrize(
    ("coloured", "text"),
    [
        ("\x1b[36m(main pid=1)\x1b[0m x", "(main pid=1) x"),
        ("\x1b[1;31;40mred\x1b[m", "red"),
        ("\x1b[?25lhidden\x1b[2K\x1b[A", "hidden"),
        ("\x1b]0;title\x07text", "text"),
        ("a\x00b", "ab"),
        ("[36m is text", "[36m is text"),
    ],
)
def test_terminal_control_sequences_are_removed(coloured, text):
    """Colours, cursor movements, titles."""
    assert plain(coloured) == text


@pytest.mark.parametrize(
    "prefix", ["(TaskRunner pid=1) ", "(pid=1) ", "(A.b pid=1, ip=10.0.0.1) ", "  (main_task pid=1) "]
)
def test_rays_prefix_is_removed(prefix):
    """Of every shape it has had."""
    assert without_prefix(prefix + "step:1") == "step:1"
    assert without_prefix("see (pid of it)") == "see (pid of it)"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0),
        ("-.5", -0.5),
        ("1e-06", 1e-6),
        ("1.E+3", 1000.0),
        (" 2 ", 2.0),
        ("-inf", -math.inf),
        ("Infinity", math.inf),
    ],
)
def test_text_that_is_a_number(text, value):
    """In any notation that trainers print."""
    assert number(text) == value


@pytest.mark.parametrize(
    "text", ["", "1_000", "0x10", "True", "1,5", "12%", "4m 52s", "infinite", "nano", "f(x)", "1 2"]
)
def test_text_that_is_no_number(text):
    """Nothing is guessed."""
    assert number(text) is None


@given(st.floats())
def test_every_float_survives_being_printed(value):
    """Bare, by numpy, by torch, and as JSON's string."""
    for text in (repr(value), f"np.float64({value!r})", f"tensor({value!r}, device='cuda:0')"):
        assert repr(number(text)) == repr(value)
    assert repr(value_of(repr(value))) == repr(value)


def test_metrics_of_counts_what_it_leaves_out():
    """And keeps the first few lines; beyond forty reasons they are counted together."""
    skips = Skips()
    for line in range(1, 60):
        metrics_of({f"name{line}": "x", "same": [1], "loss": 1}, skips, line)
    listed = {skipped.reason: skipped for skipped in skips.listed()}

    assert (listed["'same' is not a number"].count, listed["'same' is not a number"].lines) == (59, (1, 2, 3))
    assert len(listed) == Skips.KINDS + 1
    assert sum(skipped.count for skipped in listed.values()) == 2 * 59


@pytest.mark.parametrize(("said", "step"), [(0, 0), (12, 12), (12.0, 12), ("12", 12), ("5/3766", 5), ("1e3", 1000)])
def test_a_step_may_be_said_in_several_ways(said, step):
    """As long as it is an integer."""
    assert step_of(said) == step


@pytest.mark.parametrize("said", [-1, 1.5, math.nan, math.inf, True, None, "", "x", "-3/10", [1], {}])
def test_what_is_no_step(said):
    """The message holds what was said."""
    with pytest.raises(ValueError, match="the step must be") as caught:
        step_of(said)

    assert repr(said) in str(caught.value)


def test_bars_are_found_with_their_titles():
    """Only one without a title, or that names training, may count steps."""
    text = (
        f"{bar(5, 10)}{bar(3, 9, 'Map: ')} {bar(1, 2, 'Training Progress: ')}{{'a': 1}}{bar(7, 8)} 50% | of 1/2 [done]"
    )
    found = [(b.n, b.total, b.title, b.may_count_steps) for b in bars(text)]

    assert found == [(5, 10, "", True), (3, 9, "Map", False), (1, 2, "Training Progress", True), (7, 8, "", True)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{'a': 1, 'b': '2'}", [({"a": "1", "b": "2"}, False)]),
        ("x {'a': nan} y {'b': None}", [({"a": "nan"}, False), ({"b": "None"}, False)]),
        ("'a': 1, 'b': 2}", [({"a": "1", "b": "2"}, False)]),
        ("{'a': 1, 'b': 0.00", [({"a": "1"}, True)]),
        ("{'a': 1, 'b", [({"a": "1"}, True)]),
        (
            "{'a': [1, 2], 'b': (3, 4), 'c': {'d': 5}, 'e': 6}",
            [({"a": "[1, 2]", "b": "(3, 4)", "c": "{'d': 5}", "e": "6"}, False)],
        ),
        ('{"a": "x, y}", "b": 1}', [({"a": "x, y}", "b": "1"}, False)]),
        ("{'a/b (GiB)': np.float32(1.5)}", [({"a/b (GiB)": "np.float32(1.5)"}, False)]),
        ("{} {a: 1} {'a'} set()", []),
    ],
)
def test_printed_dicts_are_found(text, found):
    """Whole, cut off, beheaded, nested."""
    assert [(row.items, row.cut) for row in dict_rows(text)] == found


@pytest.mark.parametrize(
    ("names", "told", "source"),
    [
        (["actor/ppo_kl", "critic/score/mean"], "", "verl"),
        (["loss", "completions/mean_length"], "trl", "trl/grpo"),
        (["objective/rlhf_reward", "loss/policy_avg"], "trl", "trl/ppo"),
        (["loss", "completions/mean_length", "memory(GiB)"], "trl", "ms-swift"),
        (["actor_grad_norm", "kl"], "", "openrlhf"),
        (["rewards/chosen", "rewards/rejected", "rewards/accuracies", "loss"], "trl", "trl/dpo"),
        (["rewards/accuracies", "mean_reward", "avg_kl"], "", ""),
        (["train/pg_loss"], "", "slime"),
        (["loss", "frac_reward_zero_std"], "verl", "verl"),
        (["loss", "kl"], "", ""),
    ],
)
def test_names_of_metrics_tell_the_trainer(names, told, source):
    """What the format told is only ever made finer."""
    assert source_of(names, told) == source
