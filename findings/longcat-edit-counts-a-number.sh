#!/usr/bin/env bash
# diffusers' LongCatImageEditPipeline ends with a TypeError on a prompt of more than 512 tokens, which it means to cut.
#
# The warning that announces the cut counts the tokens of a number: len(len(tokens)). The pipeline of the same model without an
# image, LongCatImagePipeline, warns and cuts. What is caught too late: the prompt is read only after the models are loaded.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy diffusers==0.42.1 transformers==5.23.0
cat > "$folder/encode.py" <<'PY'
import string

import diffusers
import transformers
from PIL import Image
from transformers import Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

print(f"diffusers {diffusers.__version__}, transformers {transformers.__version__}")
letters = [*string.ascii_letters, "Ġ", "Ċ", *string.punctuation]
marks = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
tokenizer = Qwen2Tokenizer(vocab={each: number for number, each in enumerate(letters)}, merges=[], extra_special_tokens=marks)


class Processor:
    """Of a Qwen2VLProcessor, which needs torchvision, the part that is used."""

    image_processor = Qwen2VLImageProcessorPil()



def outcome(name, *image):
    """Encode a prompt of 600 letters without a text encoder, which would come next."""
    cls = getattr(diffusers, name)
    pipeline = cls(scheduler=None, vae=None, text_encoder=None, tokenizer=tokenizer, text_processor=Processor(), transformer=None)
    try:
        pipeline._encode_prompt(["a" * 600], *image)
    except TypeError as error:
        return str(error)


found = {"LongCatImageEditPipeline": outcome("LongCatImageEditPipeline", Image.new("RGB", (56, 56)))}
found["LongCatImagePipeline"] = outcome("LongCatImagePipeline")
print(f"LongCatImageEditPipeline, a prompt of 600 tokens: TypeError: {found['LongCatImageEditPipeline']}")
assert "has no len()" in found["LongCatImageEditPipeline"], found
assert "not callable" in found["LongCatImagePipeline"], found  # the text encoder, which is not there
print("LongCatImagePipeline, the same: cut to 512 tokens, and on to the text encoder")
PY
"$folder/venv/bin/python" "$folder/encode.py" 2>/dev/null
