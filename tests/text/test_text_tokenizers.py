"""Ids that drift in a tokenizer of Hugging Face, which is what most trainers have."""

import copy

import pytest

from rlwatch.text import RetokenizationDrift, Sample, TextProbe, retokenized

VOCABULARY = {
    token: i
    for i, token in enumerate(["<s>", "</s>", "<", "t", "h", "i", "n", "k", ">", "th", "in", "<th", "ink", "!"])
}
MERGES = [("t", "h"), ("i", "n"), ("<", "th"), ("in", "k")]


@pytest.fixture(scope="module")
def tokenizer():
    """Byte pairs that merge ``<think>`` into ``<th``, ``ink``, ``>``."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    bare = tokenizers.Tokenizer(tokenizers.models.BPE(VOCABULARY, MERGES))
    bare.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>")


def ids_of(*tokens):
    return [VOCABULARY[token] for token in tokens]


def test_a_tag_sampled_letter_by_letter_is_encoded_in_other_pieces(tokenizer):
    """The text is the same, the ids are not."""
    sampled = ids_of("<", "th", "in", "k", ">", "!", "</s>")

    again = retokenized(tokenizer, sampled)

    assert again == ids_of("<th", "ink", ">", "!", "</s>")
    assert RetokenizationDrift.of(sampled, again) == RetokenizationDrift(
        exact=False, naive=1.0, edits=4 / 7, first=0, growth=-2
    )


def test_what_was_sampled_as_it_is_encoded_stays_and_so_do_special_tokens(tokenizer):
    """No beginning is added, no end is dropped, no space tidied up."""
    sampled = ids_of("<th", "ink", ">", "!", "</s>")

    assert retokenized(tokenizer, sampled) == sampled


def test_a_probe_reads_ids_with_a_copy_of_the_trainers_tokenizer(tokenizer):
    """Two of three survive."""
    samples = [Sample(ids=ids_of("<th", "ink")), Sample(ids=ids_of("<", "t")), Sample(ids=ids_of("i", "n"))]
    probe = TextProbe(copy.deepcopy(tokenizer), seconds=0)

    probe.offer(samples)

    assert probe.take(wait=True)["text/retok_exact"] == pytest.approx(2 / 3)
    probe.close()
