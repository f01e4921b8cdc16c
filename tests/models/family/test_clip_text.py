"""Captions as CLIP was trained with them: characters that ftfy exchanges mean what they mean in ASCII."""

from __future__ import annotations

import ftfy
import torch
from models.test_inputs import CPU, opened

from simpletuner.models.family.text_encoding import ENTITIES, has_clip, is_cleaned, replacements

TEXTS = [
    "a “curly” cat’s toy, ‘quoted’",
    "it\u02bcs ‛odd‟ „low“",
    "&quot;fish &amp; chips&quot; &lt;b&gt; it&#39;s",
    "ﬁve ﬂuﬀy oﬃces, Ĳsselmeer, ǆ ﬆ ﬅ",
    "ＡＢＣ１２３！ｱｲｳ　ﾞ",
    "naïve café 猫 été 🐈 zero\u200bwidth",
    "plain text, 'straight' \"quotes\" & < >",
]


def test_tokens_are_those_of_text_that_ftfy_has_cleaned(pipelines):
    pipeline = opened("sdxl", pipelines("sdxl")).text_encoder(CPU, torch.float32).pipeline
    from transformers import CLIPTokenizer

    plain = CLIPTokenizer.from_pretrained(opened("sdxl", pipelines("sdxl")).folder / "tokenizer")
    for text in TEXTS:
        assert pipeline.tokenizer(text).input_ids == plain(ftfy.fix_text(text)).input_ids, text
        assert is_cleaned(text) is (text not in TEXTS[-2:]), "a cache keeps what it has of the others"
    assert [ftfy.fix_text(text) == text for text in TEXTS] == [False] * 5 + [True] * 2
    assert [has_clip(opened(key, pipelines(key)).index) for key in ("sdxl", "flux", "wan")] == [True, True, False]


def test_every_replaced_character_is_what_ftfy_makes_of_it():
    singles = {key: sign for key, sign in replacements().items() if len(key) == 1}
    assert len(singles) > 150
    # Between letters: ftfy leaves texts alone that it takes for another encoding.
    wrong = {key: sign for key, sign in singles.items() if ftfy.fix_text(f"a {key} b") != f"a {sign} b"}
    assert wrong == {}
    assert {ftfy.fix_text(entity) for entity in ENTITIES} == set(ENTITIES.values())


def test_t5_beside_clip_reads_a_caption_as_it_is(pipelines):
    encoder = opened("flux", pipelines("flux")).text_encoder(CPU, torch.float32)
    curly, straight = (encoder.encode([text]) for text in ("“a” cat", '"a" cat'))
    torch.testing.assert_close(curly["pooled_prompt_embeds"], straight["pooled_prompt_embeds"])
    assert not torch.equal(curly["prompt_embeds"], straight["prompt_embeds"])
