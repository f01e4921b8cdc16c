"""Validation images of real runs: prompts of a file, on one rank and on two that share the weights."""

from __future__ import annotations

import json

import numpy as np
from PIL import Image

from simpletuner.runs.images import ImageInfo, read_info

PROMPTS = [
    {"prompt": "a blue square", "seed": 7, "resolution": "96x64", "guidance": 1},
    {"prompt": "", "num_inference_steps": 1, "negative_prompt": "grey"},
    {"prompt": "two stars", "resolution": "64,48x64"},
]


def test_each_prompt_of_a_file_has_its_own_seed_size_and_guidance_on_any_number_of_ranks(sdxl_flags, train, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    flags = (*sdxl_flags, "--validation_prompt=", f"--validation_prompt_file={path}", "--max_train_steps=1")
    flags = (*flags, "--validation_num_inference_steps=2", "--validation_guidance=3", "--validation_step_interval=0")
    one = train(tmp_path / "one", *flags, "--train_batch_size=4").output
    two = train(tmp_path / "two", *flags, "--train_batch_size=2", "--fsdp_enable", world=2).output
    folders = [output / "validation" / "step-000001" for output in (one, two)]
    names = ["trained-00.png", "trained-01.png", "trained-02.png", "trained-03-48x64.png", "trained-03-64x64.png"]
    assert [[path.name for path in sorted(folder.iterdir())] for folder in folders] == [names, names]
    assert [read_info(folders[0] / name)[1] for name in names] == [
        ImageInfo("", "", 42, 2, 3, 64, 64, 1, "trained"),
        ImageInfo("a blue square", "", 7, 2, 1, 96, 64, 1, "trained"),
        ImageInfo("", "grey", 44, 1, 3, 64, 64, 1, "trained"),
        ImageInfo("two stars", "", 45, 2, 3, 48, 64, 1, "trained"),
        ImageInfo("two stars", "", 45, 2, 3, 64, 64, 1, "trained"),
    ]
    for name in names:
        images = [Image.open(folder / name) for folder in folders]
        assert images[0].text == images[1].text and images[0].size == images[1].size
        pixels = [np.asarray(image).astype(int) for image in images]
        assert np.abs(pixels[0] - pixels[1]).max() <= 2
    path.write_text('{"prompt": "a", "resolution": "60x64"}\n')
    uneven = train(tmp_path / "one", *flags, "--max_train_steps=2", code=2).said
    assert "resolution of the prompt 'a' = 60x64: all sides must be multiples" in uneven
