#!/usr/bin/env bash
# Modular Wan without guidance ends as it encodes the prompt: at a scale of 1, which distilled Wan is sampled with, the
# text encoder's block returns a negative embedding that it has not made. Other families' blocks return None.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0 ftfy==6.3.1 numpy
HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import diffusers
import transformers
from diffusers import ClassifierFreeGuidance
from diffusers.modular_pipelines.wan.encoders import WanTextEncoderStep
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

diffusers.utils.logging.set_verbosity(50)
words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "boat": 2, "<unk>": 3}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PARTS = {
    "tokenizer": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>"),
    "text_encoder": UMT5EncoderModel(UMT5Config(vocab_size=4, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)),
}


def encoded(scale):
    pipeline = WanTextEncoderStep().init_pipeline()
    pipeline.update_components(**PARTS, guider=ClassifierFreeGuidance(guidance_scale=scale))
    try:
        return str(tuple(pipeline(prompt="a boat", output="prompt_embeds").shape))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


found = {scale: encoded(scale) for scale in (5.0, 1.0)}
print(f"diffusers {diffusers.__version__}, transformers {transformers.__version__}")
for scale, text in found.items():
    print(f"guidance {scale}: {text}")
assert found[5.0] == "(1, 512, 16)"
assert found[1.0].startswith("UnboundLocalError") and "negative_prompt_embeds" in found[1.0]
PY
