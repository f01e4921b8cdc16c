"""Pipelines that training by their own call would get wrong are refused with one sentence, before anything is encoded.

Faults are planted into the source of a real pipeline's call, or into a folder.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from foreign import build_foreign
from models.automatic.test_parity import SAME, TOKENS, automatic, expect_parity
from models.test_inputs import CPU

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.automatic.family import SMALLEST, AutomaticFamily
from simpletuner.models.automatic.hooks import ALWAYS
from simpletuner.models.automatic.pipeline_run import without_package
from simpletuner.models.families.ltxvideo import LTXVideo
from simpletuner.settings.declared.sections import Data, Model, Settings

STEP = "self.scheduler.step(noise_pred, t, latents"
ADVICE = "a class of your own can: docs/families.md has a complete one"


def planted(cls: Any, old: str, new: str) -> Any:
    """Return a subclass of a pipeline whose call has one piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.__call__)))
    assert old in source
    namespace = dict(vars(sys.modules[cls.__module__]))
    code = "from __future__ import annotations\n" + source[source.index("def __call__") :].replace(old, new)
    exec(compile(code, cls.__name__, "exec"), namespace)
    return type(cls.__name__, (cls,), {"__call__": namespace["__call__"], "__module__": cls.__module__})


def opened_as(cls: Any, folder: Path, tokens: int | None = TOKENS) -> AutomaticFamily:
    """Open a folder as a pipeline class that diffusers does not have."""

    class Planted(AutomaticFamily):
        pipeline_class = cls

    data = Data(tokenizer_max_length=tokens)
    return Planted(folder, Settings(model=Model(model_family="auto"), data=data, **SAME))


def test_a_package_that_a_pipeline_misses_is_named():
    error = without_package("PRXPipeline", NameError(name="ftfy"))
    assert isinstance(error, EnvironmentNotReady) and str(error) == "PRXPipeline needs the package ftfy"
    assert isinstance(without_package("PRXPipeline", NameError(name="unknown")), SettingsError)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (STEP, STEP.replace("noise_pred", "noise_pred * (-1) ** i"), "depends on the number of the step"),
        ("timestep=timestep / 1000", "timestep=timestep / 1000 + i / 9", "depends on the number of the step (timestep"),
        ("encoder_hidden_states=prompt_embeds", "encoder_hidden_states=prompt_embeds * (i < 2)", "at step 3"),
        ("encoder_hidden_states=prompt_embeds", "encoder_hidden_states=prompt_embeds * (i < 3)", "at step 4"),
        (STEP, STEP.replace("latents", "-latents"), "elements of latents"),
        (STEP, "self.transformer(hidden_states=latents);" + STEP, "its own call fails with"),
        ("height = height or", "height, width = 128, 128 or", "it does not keep to the size it is asked for"),
        ("self._num_timesteps =", "randn_tensor((1,)); self._num_timesteps =", "it draws noise twice"),
        ("image = self.vae.decode(", "image = self.vae.decode(0 * ", "elements of latents"),
        (
            "decode(latents, return_dict=False)[0]",
            "decode(latents, return_dict=False)[0].flip(-1)",
            "its image differs",
        ),
    ],
)
def test_a_fault_in_a_pipeline_s_call_is_refused(old, new, sentence, flux):
    from diffusers import FluxPipeline

    family = opened_as(planted(FluxPipeline, old, new), flux)
    with pytest.raises(SettingsError) as refusal:
        family.prove([SMALLEST], CPU)
    assert sentence in refusal.value.message and refusal.value.hint == ADVICE
    assert refusal.value.message.startswith("FluxPipeline cannot be trained by its own call: ")


def test_a_class_with_a_wrong_sign_and_a_call_without_gradients_are_found(flux, pipelines, monkeypatch):
    from diffusers import FluxPipeline

    # The inputs of LTX-Video are all equal then: its pipeline negates what the denoiser predicts.
    right = LTXVideo.predict
    monkeypatch.setattr(LTXVideo, "predict", lambda *args: -right(*args))
    with pytest.raises(AssertionError, match="not close"):
        expect_parity("ltxvideo", pipelines)

    class Wrapped(FluxPipeline):
        def __call__(self, prompt=None, height=None, width=None, num_inference_steps=4, output_type="pil", **more):
            kwargs = {"num_inference_steps": num_inference_steps, "output_type": output_type, **more}
            return super().__call__(prompt, height=height, width=width, return_dict=False, **kwargs)

    with pytest.raises(SettingsError, match="computes no gradients"):
        opened_as(Wrapped, flux).prove([SMALLEST], CPU)


def changed(folder: Path, target: Path, file: str, **changes: Any) -> Path:
    shutil.copytree(folder, target)
    content = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(content | changes))
    return target


def test_folders_that_cannot_be_trained_are_refused(flux, tmp_path):
    index = "model_index.json"
    edm = {"scheduler": ["diffusers", "EDMEulerScheduler"]}
    diffusers = build_foreign("PixArtAlphaPipeline", tmp_path / "clipped", scheduler={"class_name": "DDIMScheduler"})
    for folder, sentence in (
        (changed(flux, tmp_path / "a", index, _class_name="OmniGenPipeline"), "it has no encode_prompt"),
        (changed(flux, tmp_path / "b", index, transformer_2=["diffusers", "X"]), "transformer and transformer_2"),
        (changed(flux, tmp_path / "c", index, transformer=[None, None]), "it has none of transformer, unet"),
        (changed(flux, tmp_path / "d", index, **edm), "EDMEulerScheduler is for EDM"),
        (changed(flux, tmp_path / "f", index, scheduler=["diffusers", "IPNDMScheduler"]), "has no noise levels"),
        (changed(flux, tmp_path / "e", index, _class_name="AutoencoderKL"), "it is no DiffusionPipeline"),
        (
            build_foreign("AllegroPipeline", tmp_path / "tiles"),
            "its VAE encodes no image: NotImplementedError, Encoding",
        ),
        (diffusers, "do not lead its own loop to known latents"),
    ):
        with pytest.raises(SettingsError) as refusal:
            automatic(folder)
        assert sentence in refusal.value.message and refusal.value.hint == ADVICE


def test_a_scheduler_that_draws_noise_while_it_steps_is_proven_by_where_it_ends(tmp_path):
    # Ancestral noise is drawn anew at each step but the last, so exact predictions still end at the known latents.
    ancestral = {"class_name": "EulerAncestralDiscreteScheduler"}
    family = automatic(build_foreign("PixArtAlphaPipeline", tmp_path / "base", scheduler=ancestral))
    assert family.found.schedule.objective == "diffusion" and family.found.sign == 1.0
    assert [check.name for check in family.checks if check.off is not None] == [
        "own loop",
        "image",
        "later step",
        "replay",
    ]


def test_no_language_model_rewrites_captions():
    import diffusers

    for cls in (diffusers.ErnieImagePipeline, diffusers.LongCatImagePipeline):
        parameters = inspect.signature(inspect.unwrap(cls.__call__)).parameters.values()
        on = {each.name for each in parameters if each.default is True} - {"return_dict", "enable_cfg_renorm"}
        assert on and all(ALWAYS[name] is False for name in on)
