"""Encoders and tokenizers that cannot be used together are refused, whoever made them."""

import pytest
from transformers import CLIPTokenizer, T5Tokenizer

from tests.tiny_models import CLIP_TOKENS, FAMILIES, POLICIES, WORDS, clip_tokenizer, pipeline, t5_tokenizer


def text_of(family, **parts):
    return POLICIES[family].text_class(pipeline(family, **parts))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tokenizer_belongs_to_an_encoder(family):
    text = text_of(family)
    assert text.pairs().keys() | set(text.pairs().values()) == text.components.keys()
    assert text.modules.keys() == set(text.pairs().values())


def test_a_pipeline_without_an_encoder_is_refused():
    with pytest.raises(ValueError, match="StableDiffusion3Pipeline has no text_encoder_3: load the pipeline with them"):
        text_of("sd3", text_encoder_3=None)


@pytest.mark.parametrize(
    ("family", "name", "tokenizer", "tokens", "rows"),
    [
        ("sd3", "tokenizer_2", CLIPTokenizer(), 2, 54),
        ("sd3", "tokenizer_3", T5Tokenizer(), 104, 16),
        ("flux", "tokenizer", CLIPTokenizer(), 2, 54),
        ("flux", "tokenizer_2", T5Tokenizer(extra_ids=0), 4, 16),
        ("flux", "tokenizer_2", clip_tokenizer(), 54, 16),
        ("wan21", "tokenizer", T5Tokenizer(extra_ids=0), 4, 16),
        (
            "sd3",
            "tokenizer",
            CLIPTokenizer({f"w{n}</w>": n for n in range(38)}, []),
            40,
            54,
        ),  # T5's share of CLIP's table
    ],
)
def test_a_vocabulary_that_is_not_the_encoders_is_refused(family, name, tokenizer, tokens, rows):
    """A tokenizer without files knows special tokens alone, and would make every prompt the same."""
    with pytest.raises(
        ValueError, match=f"{name} knows {tokens} tokens and its text encoder {rows}: .*give the complete"
    ):
        text_of(family, **{name: tokenizer})


def test_rows_of_the_encoder_that_are_only_padding_are_no_fault():
    """As released: 32,100 tokens for 32,128 rows."""
    pieces = [(piece, -1.0) for piece in ("<pad>", "</s>", "<unk>", "▁", *(f"▁{w}" for w in WORDS[:-1]))]
    assert len(text_of("wan21", tokenizer=T5Tokenizer(pieces, extra_ids=0)).pipeline.tokenizer) == 15


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_more_tokens_than_positions_are_refused(family):
    tokenizer = clip_tokenizer()
    tokenizer.model_max_length = CLIP_TOKENS + 1
    with pytest.raises(
        ValueError, match=f"tokenizer makes up to 37 tokens .* takes {CLIP_TOKENS}: its tokenizer_config"
    ):
        text_of(family, tokenizer=tokenizer)


def test_the_vocabulary_is_part_of_the_identity():
    """An embedding made with another tokenizer is another one, whatever folder and weights say."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in reversed(WORDS))]
    other = T5Tokenizer([(piece, -float(n)) for n, piece in enumerate(pieces)], extra_ids=0)
    plain = text_of("flux").identity()
    assert text_of("flux", tokenizer_2=t5_tokenizer()).identity() == plain
    assert text_of("flux", tokenizer_2=other).identity() != plain
