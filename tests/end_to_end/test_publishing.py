"""What a run makes known of itself: report, model card, upload to a hub on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ranks
import yaml
from conftest import ROOT, SMALL, base
from hub import serving
from modular import build_modular
from PIL import Image

from simpletuner.runs.images import read_info

CODE = re.compile(r"^(`{3,})python\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
PROMPT = "a red | circle </td> `x` 猫"


@pytest.fixture
def run_code(starter, tmp_path) -> Callable[[Path], Path]:
    """Run the Python of a card as it is written; return the image that it saves."""

    def run(card: Path) -> Path:
        found = CODE.search(card.read_text())
        assert found is not None
        started = starter.start(ranks.run_python, 1, found[2], str(tmp_path))
        assert started.wait() == [0], started.said
        return tmp_path / "image.png"

    return run


def assert_same_image(path: Path, other: Path) -> None:
    one, two = (np.asarray(Image.open(each).convert("RGB"), dtype=float) for each in (path, other))
    assert one.shape == two.shape and np.abs(one - two).mean() < 2, "in 8 bits"


def test_a_run_leaves_a_report_and_a_card_and_uploads_them_with_its_pipeline(sdxl_flags, starter, tmp_path):
    output, hooks = tmp_path / "run", tmp_path / "hooks"
    flags = (*sdxl_flags, *SMALL, f"--output_dir={output}", f"--validation_prompt={PROMPT}", "--use_ema")
    flags = (*flags, "--validation_num_inference_steps=1", "--max_train_steps=2", "--train_batch_size=2")
    flags = (*flags, "--push_to_hub", "--hub_model_id=me/shapes", "--eval_split=0.1")
    flags = (*flags, "--notify_url=http://127.0.0.1:9/secret", "--validation_step_interval=1")
    (tmp_path / "hub").mkdir()
    with serving(tmp_path / "hub") as hub:
        own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(hooks), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
        # A process of its own: the library reads where a token may be when it is imported.
        command = [sys.executable, "-m", "simpletuner", "train", *flags]
        refused = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
        assert refused.returncode == 3 and "push_to_hub needs a token" in refused.stderr and not output.exists()

        def run(**more: str) -> str:
            started = starter.start(ranks.command_line_with, 1, {**own, "HF_TOKEN": "hf_x", **more}, ["train", *flags])
            assert started.wait() == [0], started.said
            return started.said

        lost = run(HF_ENDPOINT="http://127.0.0.1:9")
        assert lost.count("was not uploaded to me/shapes") == 2 and "Connection refused" in lost
        said = " ".join(lost.split())
        assert f"upload it with: hf upload me/shapes {output}/pipeline . --private uploading" in said
        assert lost.count("no message could be sent to notify_url: Connection refused") == 1
        again = run()
        assert "finished already" in again and "warning" not in again.replace("warning: no message", ""), again
        assert hub.created[0]["name"] == "shapes" and "private" in (hub.created[0].get("visibility"), *hub.created[0])
        assert hub.tokens == {"Bearer hf_x"}
    uploaded = tmp_path / "hub" / "me" / "shapes"
    for folder, place in ((output / "pipeline", uploaded), (output / "pipeline-ema", uploaded / "ema")):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) > 10
        for path in files:
            assert (place / path.relative_to(folder)).read_bytes() == path.read_bytes()
    card = (output / "pipeline" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["library_name"] == "diffusers" and facts["pipeline_tag"] == "text-to-image"
    assert "sdxl" in facts["tags"] and "base_model" not in facts
    assert facts["widget"] == [{"text": PROMPT, "output": {"url": "samples/00.png"}}] and "license" not in facts
    assert text.lstrip().splitlines()[2] == "# shapes" and "No `license` is set" in text
    assert 'from_pretrained("me/shapes", dtype=torch.float32)' in text
    average = (output / "pipeline-ema" / "README.md").read_text()
    assert 'from_pretrained(snapshot_download("me/shapes", allow_patterns="ema/*") + "/ema", dtype' in average
    assert str(tmp_path) not in card and "secret" not in card, "paths of a machine and addresses are not published"
    assert "| samples/00.png" not in text and "![sample](samples/00.png)" in text
    assert r"| a red \| circle &lt;/td&gt; \`x\` 猫 |" in text
    assert "at first" in text and "--max_train_steps=2" in text and "| held-out loss |" in text
    _, info = read_info(output / "pipeline-ema" / "samples" / "00.png")
    assert info is not None and (info.weights, info.step, info.prompt) == ("ema", 2, PROMPT)
    page = (output / "report.html").read_text()
    assert 'class="status">finished<' in page and "127.0.0.1:9" not in page


def test_a_later_run_renews_the_card_unless_somebody_has_made_it_theirs(sdxl_flags, train, run_code, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=4", f"--validation_prompt={PROMPT}", "--validation_guidance=3")
    flags = (*flags, "--validation_num_inference_steps=2")
    card = tmp_path / "run" / "pipeline" / "README.md"
    train(tmp_path / "run", *flags, "--max_train_steps=1")
    assert "| steps | 1 |" in card.read_text() and "| `train_batch_size` | 4 |" not in card.read_text()
    assert "| `validation_guidance` | 3 |" in card.read_text(), "names in code spans have no backslashes"
    assert_same_image(run_code(card), card.parent / "samples/00.png")
    said = train(tmp_path / "run", *flags, "--max_train_steps=2", "--use_ema", "--ema_validation=ema_only").said
    # The average alone was sampled: it is named first, and the other card has its prompt and no image of step 1.
    table = "".join(said[said.rindex("loss curve") :].split())  # which is wrapped, also within paths
    average = f"{card.parent}-ema"
    assert f"pipeline,EMA{average}pipeline{card.parent}touseit{average}/README.mdhasthecode" in table
    assert "images of the EMA" in said
    text = card.read_text()
    assert "| steps | 2 |" in text and "![sample]" not in text and not (card.parent / "samples").exists()
    assert f"prompt={json.dumps(PROMPT, ensure_ascii=False)}" in text and "guidance_scale=3.0" in text
    assert "which the average (EMA) alone made" in text
    assert_same_image(run_code(tmp_path / "run" / "pipeline-ema" / "README.md"), Path(average) / "samples/00.png")
    card.write_text("# mine")
    train(tmp_path / "run", *flags, "--max_train_steps=3")
    assert card.read_text() == "# mine"


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_that_is_killed_as_soon_as_it_has_exported_has_left_its_card(kind, sdxl_flags, starter, train, tmp_path):
    output = tmp_path / "run"
    flags = (*sdxl_flags, f"--model_type={kind}", "--max_train_steps=1", "--validation_prompt=a circle")
    flags = (*flags, "--validation_num_inference_steps=1")
    folder = output / ("pipeline" if kind == "full" else "pipeline_lora_weights")
    command = ["train", *SMALL, *flags, f"--output_dir={output}"]
    killed = starter.start(ranks.command_line_killed_once, 1, str(folder / "simpletuner.json"), command)
    assert killed.wait() == [-signal.SIGKILL], killed.said
    assert "finished already" in train(output, *flags).said
    card = (folder / "README.md").read_text()
    assert str(folder) in card and "unfinished" not in card and (folder / "samples" / "00.png").is_file()


@pytest.mark.parametrize(
    ("family", "kind", "label"),
    [("flux", "lora", "LoRA"), ("qwen_image", "lokr", "LoKr"), ("sdxl", "oft", "OFT"), ("wan", "dora", "DoRA")],
)
def test_the_code_of_a_lora_s_card_samples_its_first_image(
    family, kind, label, pipelines, few_shapes, train, run_code, tmp_path
):
    flags = (*base(family, pipelines(family), few_shapes), "--model_type=lora", "--lora_rank=4", "--learning_rate=1e-2")
    flags = (*flags, f"--lora_type={kind}")
    if family == "flux":
        assistant = train(tmp_path / "assistant", *flags, "--max_train_steps=2").output
        file = (assistant / "pipeline_lora_weights/pytorch_lora_weights.safetensors").rename(
            tmp_path / "helper.safetensors"
        )
        # The LoRA is of other layers: diffusers merges and unloads the assistant before it loads it.
        flags = (*flags, f"--assistant_lora={file}", "--assistant_lora_strength=0.5", "--lora_target_modules=to_q")
    sampling = ("--validation_prompt=a red circle", "--validation_num_inference_steps=2", "--validation_guidance=2")
    output = train(tmp_path / "run", *flags, *sampling, "--max_train_steps=2").output
    card = output / "pipeline_lora_weights" / "README.md"
    assert re.search(f"An? {label} for", card.read_text())
    assert ("the assistant LoRA helper.safetensors merged" in card.read_text()) == (family == "flux")
    assert_same_image(run_code(card), card.parent / "samples/00.png")


@pytest.mark.parametrize(("name", "kind"), [("AnimaModularPipeline", "full"), ("Flux3ModularPipeline", "lora")])
def test_the_code_of_a_modular_pipeline_s_card_samples_its_first_image(name, kind, shapes, train, run_code, tmp_path):
    flags = (
        *base("auto", build_modular(name, tmp_path / "base"), shapes),
        f"--model_type={kind}",
        "--max_train_steps=2",
    )
    sampling = ("--validation_prompt=a red circle", "--validation_num_inference_steps=2", "--validation_guidance=2")
    # Layers of FLUX.3 for images to start from get no gradient, which data parallelism would wait for.
    run = train(tmp_path / "run", *flags, *sampling, "--aspect_bucket_alignment=32", "--learning_rate=1e-2", world=2)
    card = run.output / ("pipeline" if kind == "full" else "pipeline_lora_weights") / "README.md"
    assert_same_image(run_code(card), card.parent / "samples/00.png")
