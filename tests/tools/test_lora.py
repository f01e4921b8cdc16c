"""`simpletuner lora`: what it writes is opened by diffusers, and is what float64 arithmetic makes of the files."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from malloc_info import allocated_bytes
from memory import watching
from models.test_inputs import diffusers_denoiser
from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from simpletuner.app import main
from simpletuner.checkpoints.writing import write_full
from simpletuner.errors import SettingsError
from simpletuner.models.family.adapter import layers_ending_with
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.opening.lora_config import write_formats
from simpletuner.models.opening.lora_file import write_lora
from simpletuner.models.opening.stored_weights import StoredTensors
from simpletuner.parallel.world import joined_world
from simpletuner.settings.declared.sections import Lora, Model, Settings
from simpletuner.system.files.locks import sole_writer
from simpletuner.tools.lora.deltas import product
from simpletuner.tools.lora.low_rank import Wanted, best_pair
from simpletuner.tools.lora.merging import Rounding, group_of
from simpletuner.tools.lora.results import ResultOrigin, writing_to

RANK = 4
FAMILIES = {"sdxl": "unet", "flux": "transformer", "wan": "transformer"}


@pytest.fixture
def lora(capsys, tmp_path, monkeypatch) -> Callable[..., str]:
    """Run a command of `simpletuner lora` in a folder of its own; return what it said."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["lora", *map(str, words)])
        if dist.is_initialized():  # after an error it ends with the process
            dist.destroy_process_group()
        said = capsys.readouterr()
        assert ended.value.code == code, said.err
        return " ".join((said.out + said.err).split())

    return run


def opened(key: str, folder: Path, **lora: Any) -> ModelFamily:
    model = Model(model_family=key, model_type="lora", pretrained_model_name_or_path=str(folder))
    return family_class(model).open(folder, Settings(model=model, lora=Lora(**{"lora_rank": RANK, **lora})))


def weights_of(folder: Path, component: str) -> dict[str, Tensor]:
    return {name: each for path in (folder / component).glob("*.safetensors") for name, each in load_file(path).items()}


def written_lora(folder: Path, family: ModelFamily, seed: int = 1) -> dict[str, Tensor]:
    """Write a LoRA of random matrices as a run does; return it."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) / 8 for name, shape in family.trained_shapes().items()}
    for name in [name for name in weights if "lora_B" in name][::2]:  # so that layers differ in how much a rank holds
        weights[name] *= torch.logspace(0, -2, weights[name].shape[1]).view(-1, *[1] * (weights[name].ndim - 2))
    assert family.adapter is not None
    folder.mkdir(exist_ok=True)
    write_lora(folder, family, family.adapter, weights)
    return weights


def delta(weights: dict[str, Tensor], layer: str, scale: float = 1.0) -> Tensor:
    down, up = (weights[f"{layer}.lora_{part}.weight"].double().flatten(1) for part in "AB")
    return up @ down * scale


def in_bf16(folder: Path, copy: Path, component: str, parts: int = 2) -> Path:
    """Copy a pipeline whose denoiser is in bf16, in several files with an index, as diffusers saves large ones."""
    shutil.copytree(folder, copy)
    own = {name: each.bfloat16() for name, each in weights_of(folder, component).items()}
    [path] = (copy / component).glob("*.safetensors")
    path.unlink()
    weight_map = {
        name: f"{path.stem}-{1 + index % parts:05d}-of-{parts:05d}.safetensors" for index, name in enumerate(own)
    }
    for file in sorted(set(weight_map.values())):
        part = {name: own[name].contiguous() for name in own if weight_map[name] == file}
        save_file(part, copy / component / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(each.nbytes for each in own.values())}, "weight_map": weight_map}
    (copy / component / f"{path.name}.index.json").write_text(json.dumps(index))
    return copy


@pytest.mark.parametrize("key", FAMILIES)
def test_a_merge_is_the_sum_in_float64_rounded_once_and_what_diffusers_fuses(key, pipelines, tmp_path, lora):
    component = FAMILIES[key]
    base = in_bf16(pipelines(key), tmp_path / "base", component)
    family = opened(key, base, lora_alpha=6)
    made = written_lora(tmp_path / "own", family)
    said = lora("merge", base, "own", "--output=merged", "--strength=0.5")
    assert "bfloat16 rounds" in said
    before, after = weights_of(base, component), weights_of(tmp_path / "merged", component)
    assert before.keys() == after.keys() and {each.dtype for each in after.values()} == {torch.bfloat16}
    layers = set(family.adapter.modules)  # pyright: ignore[reportOptionalMemberAccess]
    for name, weight in before.items():
        layer = name.removesuffix(".weight")
        if layer not in layers or not name.endswith(".weight"):
            assert torch.equal(weight, after[name]), name
            continue
        exact = weight.double() + delta(made, layer, 0.5 * 6 / RANK).view(weight.shape)
        nearest = exact.bfloat16()
        # The sum is in float32, whose last digit may decide between two neighbours in bf16.
        assert (nearest == after[name]).double().mean() > 0.999, name
        torch.testing.assert_close(after[name].double(), exact, rtol=2**-8, atol=1e-9)
    pipeline = family.pipeline_class.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    fused = family.load_pipeline(vae=None, model=diffusers_denoiser(family).float())
    fused.load_lora_weights(tmp_path / "own")
    fused.fuse_lora(lora_scale=0.5)
    own = dict(getattr(pipeline, component).named_parameters())
    for layer in layers:
        by_diffusers = getattr(fused, component).get_parameter(f"{layer}.base_layer.weight")
        torch.testing.assert_close(own[f"{layer}.weight"], by_diffusers, rtol=2**-7, atol=1e-6)
    [file] = (tmp_path / "merged" / component).glob("*.safetensors")
    with safe_open(file, "pt") as header:
        assert header.metadata()["made_from"] == "own (strength 0.5)"
    assert "own, strength 0.5" in (tmp_path / "merged" / "README.md").read_text()


def test_a_merge_in_float8_is_rounded_once_and_opened_by_diffusers(flux, own, tmp_path, lora):
    assert "float8 rounds" in lora("merge", flux, own, "--output=eight", "--export_precision=float8")
    made = {name.removeprefix("transformer."): each for name, each in load_file(own).items()}
    before, after = weights_of(flux, "transformer"), weights_of(tmp_path / "eight", "transformer")
    family = opened("flux", flux)
    eight = {name for name, each in after.items() if each.dtype == torch.float8_e4m3fn}
    assert eight and all(name.startswith(("transformer_blocks", "single_transformer")) for name in eight)
    assert not any(
        "norm" in name.rpartition(".linear")[0][-5:] for name in after.keys() - eight if "blocks" not in name
    )
    for name, weight in before.items():
        exact = weight.double()
        if f"{name.removesuffix('.weight')}.lora_A.weight" in made:
            exact = exact + delta(made, name.removesuffix(".weight"))
        dtype = torch.float8_e4m3fn if name in eight else torch.bfloat16
        expected = exact.float().to(dtype).float()
        close = (after[name].float() - expected).abs() <= (2**-3 if name in eight else 2**-7) * expected.abs()
        assert after[name].dtype == dtype and (after[name].float() == expected).double().mean() > 0.99, name
        assert close.all(), name
    model = family.pipeline_class.from_pretrained(tmp_path / "eight", dtype=torch.bfloat16).transformer
    name = min(eight)
    assert torch.equal(model.get_parameter(name), after[name].bfloat16())
    assert "is not known" in lora("merge", flux, own, "--output=x", "--export_precision=int3", code=2)
    assert "which LoRA" in lora("merge", flux, "--output=x", code=2)
    lora("merge", flux, "--output=alone", "--export_precision=fp16")
    alone = weights_of(tmp_path / "alone", "transformer")
    assert all(torch.equal(alone[name], weight.half()) for name, weight in before.items())
    assert "in 8 bits" in lora("merge", tmp_path / "eight", own, "--output=x", code=2)


KINDS = {
    "dora": LoraConfig(r=RANK, lora_alpha=6, use_dora=True, target_modules=["to_q", "to_out.0"]),
    "bias": LoraConfig(r=RANK, lora_alpha=6, lora_bias=True, use_rslora=True, target_modules=["to_q"]),
    "loha": LoHaConfig(r=RANK, alpha=6, target_modules=["to_q", "to_out.0"]),
    "lokr": LoKrConfig(r=RANK, alpha=6, target_modules=["to_q", "to_out.0"]),
    "whole lokr": LoKrConfig(r=64, alpha=32, decompose_factor=4, target_modules=["to_q"]),
    "oft": OFTConfig(r=0, oft_block_size=4, target_modules=["to_q", "to_out.0"]),
}


def randomized(model: torch.nn.Module) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if any(part in name for part in ("lora_", "hada_", "lokr_", "oft_R")):
                each.copy_(torch.randn_like(each).abs() + 1 if "magnitude" in name else torch.randn_like(each) / 8)


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.*", "ignore:.*LoRA tensor.s. have invalid shape")
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_merged_as_peft_merges_them_in_float64(kind, flux, tmp_path, lora):
    family = opened("flux", flux)
    adapted = get_peft_model(diffusers_denoiser(family), KINDS[kind])
    randomized(adapted)
    adapted.save_pretrained(tmp_path / "peft")
    lora("merge", flux, "peft", "--output=merged")
    merged = adapted.double().merge_and_unload().state_dict()
    found, before = weights_of(tmp_path / "merged", "transformer"), weights_of(flux, "transformer")
    changed = {name for name in found if not torch.equal(found[name], before[name])}
    assert any("to_q" in name for name in changed) and all("to_q" in each or "to_out" in each for each in changed)
    for name, each in found.items():
        torch.testing.assert_close(each.double(), merged[name], rtol=1e-5, atol=1e-6)


def test_files_of_lycoris_are_merged_by_its_formulas(pipelines, tmp_path, lora):
    """LoHa and LoKr in kohya's names, with an alpha for each layer, on a layer, a stack and a convolution."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 4

    flux, sdxl = pipelines("flux"), pipelines("sdxl")
    before = weights_of(flux, "transformer")
    parts = [f"transformer_blocks.0.attn.{name}.weight" for name in ("to_q", "to_k", "to_v")]
    rows, columns = sum(len(before[name]) for name in parts), before[parts[0]].shape[1]
    stack = "lora_unet_double_blocks_0_img_attn_qkv"
    hada = {
        f"{stack}.hada_w1_a": random(rows, RANK), f"{stack}.hada_w1_b": random(RANK, columns),
        f"{stack}.hada_w2_a": random(rows, RANK), f"{stack}.hada_w2_b": random(RANK, columns),
        f"{stack}.alpha": torch.tensor(2.0),
    }  # fmt: skip
    save_file(hada, tmp_path / "loha.safetensors")
    lora("merge", flux, "loha.safetensors", "--output=flux")
    one, two = (hada[f"{stack}.hada_w{i}_a"].double() @ hada[f"{stack}.hada_w{i}_b"].double() for i in (1, 2))
    expected = torch.cat([before[name].double() for name in parts]) + one * two * 2 / RANK
    found = weights_of(tmp_path / "flux", "transformer")
    torch.testing.assert_close(torch.cat([found[name].double() for name in parts]), expected, rtol=1e-5, atol=1e-6)

    weight = weights_of(sdxl, "unet")[name := "down_blocks.0.resnets.0.conv1.weight"]
    outputs, inputs = weight.shape[:2]
    layer = "lora_unet_input_blocks_1_0_in_layers_2"
    kron = {
        f"{layer}.lokr_w1": random(4, 4), f"{layer}.lokr_t2": random(RANK, RANK, 3, 3),
        f"{layer}.lokr_w2_a": random(RANK, outputs // 4), f"{layer}.lokr_w2_b": random(RANK, inputs // 4),
        f"{layer}.alpha": torch.tensor(1.0),
    }  # fmt: skip
    save_file(kron, tmp_path / "lokr.safetensors")
    lora("merge", sdxl, "lokr.safetensors", "--output=sdxl")
    core = torch.einsum("ijkl,ip,jr->prkl", *(kron[f"{layer}.lokr_{each}"].double() for each in ("t2", "w2_a", "w2_b")))
    small = kron[f"{layer}.lokr_w1"].double()
    added = torch.stack([torch.kron(small, core[..., i, j]) for i in range(3) for j in range(3)], -1).view(weight.shape)
    found = weights_of(tmp_path / "sdxl", "unet")[name].double()
    torch.testing.assert_close(found, weight.double() + added / RANK, rtol=1e-5, atol=1e-6)

    for base, component, made in ((flux, "transformer", "loha"), (sdxl, "unet", "lokr")):  # all directions: as LoRAs
        lora("resize", f"{made}.safetensors", "--energy=1", f"--output={made}-as-lora")
        lora("merge", base, f"{made}-as-lora", f"--output={made}-by-lora")
        whole = weights_of(tmp_path / ("flux" if made == "loha" else "sdxl"), component)
        for each, tensor in weights_of(tmp_path / f"{made}-by-lora", component).items():
            torch.testing.assert_close(tensor, whole[each], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["sdxl", "flux"])
def test_a_lora_of_text_encoders_in_kohya_s_and_diffusers_names_is_merged_into_them(key, pipelines, tmp_path, lora):
    base, component = pipelines(key), FAMILIES[key]
    family = opened(key, base, export_format="kohya")
    made = written_lora(tmp_path / "own", family)
    write_formats(tmp_path / "own", family, family.adapter, made)  # pyright: ignore[reportArgumentType]
    names = ["text_encoder", "text_encoder_2"]
    kohya = load_file(tmp_path / "own" / "lora_for_kohya.safetensors")
    by_diffusers = {f"{component}.{name}": each for name, each in made.items()}
    expected = {}
    for number, encoder in enumerate(names, start=1):
        weights = weights_of(base, encoder)
        weight = next(name for name in weights if name.endswith(("q_proj.weight", "SelfAttention.q.weight")))
        layer, (rows, columns) = weight.removesuffix(".weight"), weights[weight].shape
        down, up = torch.randn(2, columns) / 8, torch.randn(rows, 2) / 8
        te = "lora_te3" if key == "flux" and number == 2 else f"lora_te{number}"
        flat = f"{te}_{layer.replace('.', '_')}"
        kohya |= {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up, f"{flat}.alpha": torch.tensor(1.0)}
        by_diffusers |= {f"{encoder}.{layer}.lora_A.weight": down, f"{encoder}.{layer}.lora_B.weight": up / 2}
        expected[encoder] = (weight, weights[weight].double() + up.double() @ down.double() / 2)
    save_file(kohya, tmp_path / "kohya.safetensors")
    save_file(by_diffusers, tmp_path / "diffusers.safetensors")
    for file in ("kohya", "diffusers"):
        lora("merge", base, f"{file}.safetensors", f"--output={file}")
        for encoder, (weight, exact) in expected.items():
            found, before = weights_of(tmp_path / file, encoder), weights_of(base, encoder)
            torch.testing.assert_close(found[weight].double(), exact, rtol=1e-5, atol=1e-6)
            assert {name for name in found if not torch.equal(found[name], before[name])} == {weight}
        pipeline = family.pipeline_class.from_pretrained(tmp_path / file)
        assert pipeline.text_encoder_2.dtype == torch.float32
    one, two = (weights_of(tmp_path / file, component) for file in ("kohya", "diffusers"))
    for layer in family.adapter.modules:  # pyright: ignore[reportOptionalMemberAccess]
        torch.testing.assert_close(one[f"{layer}.weight"], two[f"{layer}.weight"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", FAMILIES)
def test_what_is_extracted_is_the_best_of_its_rank_and_merged_back_gives_the_fine_tune(key, pipelines, tmp_path, lora):
    base, component = pipelines(key), FAMILIES[key]
    family, tuned = opened(key, base), tmp_path / "tuned"
    shutil.copytree(base, tuned)
    before = weights_of(base, component)
    generator = torch.Generator().manual_seed(5)
    layers = layers_ending_with(family.meta_denoiser, "")
    chosen = {*layers[:3], *layers[len(layers) // 2 : len(layers) // 2 + 3]}
    other = [name for name in before if name.removesuffix(".weight") not in layers][:3]
    after = dict(before)
    for name in [*(f"{layer}.weight" for layer in chosen), *other]:
        after[name] = before[name] + torch.randn(before[name].shape, generator=generator) / 16
    [path] = (tuned / component).glob("*.safetensors")
    save_file(after, path, metadata={"format": "pt"})
    said = lora("extract", tuned, base, f"--rank={RANK}", "--output=small")
    assert f"{len(chosen)} layers of rank" in said and f"{len(other)} tensors of no matrix hold" in said
    small = load_file(tmp_path / "small" / "pytorch_lora_weights.safetensors")
    kept = changed = 0.0
    for layer in chosen:
        difference = (after[f"{layer}.weight"] - before[f"{layer}.weight"]).double().flatten(1)
        left, values, right = torch.linalg.svd(difference, full_matrices=False)
        best = left[:, :RANK] * values[:RANK] @ right[:RANK]
        pair = {name.removeprefix(f"{family.lora_prefix}."): each for name, each in small.items()}
        torch.testing.assert_close(delta(pair, layer), best, rtol=1e-3, atol=1e-5)
        kept, changed = kept + values[:RANK].square().sum().item(), changed + values.square().sum().item()
    changed += sum((after[name] - before[name]).double().square().sum().item() for name in other)
    assert f"{kept / changed:.2%}" in said
    lora("extract", tuned, base, "--energy=1", "--output=whole")
    formats = lora(
        "extract", tuned, base, "--rank=1", "--output=more", "--export_format=comfyui", code=2 * (key != "flux")
    )
    assert ("has no name there that is known" in formats) == (key != "flux")
    model = diffusers_denoiser(family)
    pipeline = family.load_pipeline(vae=None, model=model)
    pipeline.load_lora_weights(tmp_path / "whole", weight_name="pytorch_lora_weights.safetensors")
    pipeline.fuse_lora()
    fused = {name.replace(".base_layer.", "."): each for name, each in model.state_dict().items()}
    for layer in chosen:
        torch.testing.assert_close(fused[f"{layer}.weight"], after[f"{layer}.weight"], rtol=1e-4, atol=1e-5)
    lora("merge", base, "whole", "--output=again")
    again = weights_of(tmp_path / "again", component)
    for name in before:
        torch.testing.assert_close(again[name], after[name], rtol=1e-4, atol=1e-5)
    assert "there is no LoRA to extract" in lora("extract", base, base, "--rank=2", "--output=none", code=2)
    assert not (tmp_path / "none").exists()


def test_the_best_pair_of_a_large_matrix_is_found_without_all_of_its_directions():
    generator = torch.Generator().manual_seed(4)
    left, right = (torch.linalg.qr(torch.randn(size, 40, generator=generator).double())[0] for size in (2200, 2100))
    values = torch.logspace(0, -3, 40, dtype=torch.float64)
    matrix = left * values @ right.T
    for each in (matrix, matrix.T):
        down, up = best_pair(each, Wanted(8, None))
        best = left[:, :8] * values[:8] @ right[:, :8].T
        assert down.shape[0] == 8
        torch.testing.assert_close(up @ down, best if each is matrix else best.T, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.*", "ignore:.*LoRA tensor.s. have invalid shape")
def test_a_resized_lora_is_the_best_of_its_rank_in_the_names_of_its_file(flux, tmp_path, lora):
    family = opened("flux", flux, lora_alpha=2, export_format="comfyui,kohya")
    made = written_lora(tmp_path / "own", family)
    write_formats(tmp_path / "own", family, family.adapter, made)  # pyright: ignore[reportArgumentType]
    get_peft_model(diffusers_denoiser(family), KINDS["bias"]).save_pretrained(tmp_path / "peft")
    layers = family.adapter.modules  # pyright: ignore[reportOptionalMemberAccess]
    said = lora("resize", "own", "--rank=2", "--output=two")
    kept = whole = 0.0
    two = load_file(tmp_path / "two" / "pytorch_lora_weights.safetensors")
    for layer in layers:
        left, values, right = torch.linalg.svd(delta(made, layer, 2 / RANK), full_matrices=False)
        pair = {name.removeprefix("transformer."): each for name, each in two.items()}
        assert len(pair[f"{layer}.lora_A.weight"]) == 2
        torch.testing.assert_close(delta(pair, layer), left[:, :2] * values[:2] @ right[:2], rtol=1e-5, atol=1e-6)
        kept, whole = kept + values[:2].square().sum().item(), whole + values.square().sum().item()
    assert f"rank 4 -> 2, which holds {kept / whole:.2%}" in said
    before = weights_of(flux, "transformer")

    def merged(name: str) -> dict[str, Tensor]:
        lora("merge", flux, name, f"--output=of-{name}")
        return {key: each - before[key] for key, each in weights_of(tmp_path / f"of-{name}", "transformer").items()}

    # By energy, of layers of different ranks: diffusers reads them as we do.
    lora("resize", "own", "--energy=0.8", "--output=energy")
    stored = load_file(tmp_path / "energy" / "pytorch_lora_weights.safetensors")
    assert len({len(each) for name, each in stored.items() if "lora_A" in name}) > 1
    model = diffusers_denoiser(family)
    pipeline = family.load_pipeline(vae=None, model=model)
    pipeline.load_lora_weights(tmp_path / "energy")
    pipeline.fuse_lora()
    ours = merged("energy")
    for layer in layers:
        values = torch.linalg.svdvals(delta(made, layer, 2 / RANK)).square().cumsum(0)
        rank = len(stored[f"transformer.{layer}.lora_A.weight"])
        assert values[rank - 1] >= 0.8 * values[-1] and (rank == 1 or values[rank - 2] < 0.8 * values[-1])
        weight = model.get_parameter(f"{layer}.base_layer.weight")
        torch.testing.assert_close(
            weight.detach() - before[f"{layer}.weight"], ours[f"{layer}.weight"], atol=1e-6, rtol=1e-4
        )
    # A rank that is high enough changes nothing, in any program's names.
    same = merged("own")
    for program in ("comfyui", "kohya"):
        lora("resize", f"own/lora_for_{program}.safetensors", "--energy=1", f"--output={program}")
        for name, each in merged(program).items():
            torch.testing.assert_close(each, same[name], rtol=1e-4, atol=1e-6)
    lora("resize", "peft", "--rank=2", "--output=peft-2")
    assert json.loads((tmp_path / "peft-2" / "adapter_config.json").read_text())["lora_alpha"] == 2


def test_the_mean_of_loras_is_exact_for_different_ranks_and_cut_where_asked(flux, tmp_path, lora):
    family, wide = (
        opened("flux", flux, lora_alpha=2),
        opened("flux", flux, lora_rank=6, lora_target_modules="to_q,to_k"),
    )
    one, two = written_lora(tmp_path / "one", family), written_lora(tmp_path / "two", wide, seed=7)
    said = lora("average", "one", "two", "--weights=1,3", "--output=mean")
    assert "rank 4 to 10 -> 4 to 10" in said
    model = diffusers_denoiser(family)
    pipeline = family.load_pipeline(vae=None, model=model)
    pipeline.load_lora_weights(tmp_path / "mean")
    pipeline.fuse_lora()
    before = weights_of(flux, "transformer")
    for layer in family.adapter.modules:  # pyright: ignore[reportOptionalMemberAccess]
        exact = delta(one, layer, 2 / RANK) / 4
        if f"{layer}.lora_A.weight" in two:
            exact = exact + delta(two, layer) * 3 / 4
        found = model.get_parameter(f"{layer}.base_layer.weight").detach() - before[f"{layer}.weight"]
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-6)
    assert "rank 4 to 10 -> 3" in lora("average", "one", "two", "--rank=3", "--output=three")
    assert "weight 0.25" in (tmp_path / "mean" / "README.md").read_text()


def nearest(matrix: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank]


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_a_loha_and_a_lokr_become_the_nearest_lora_to_what_they_add_and_so_does_their_mean(kind, flux, tmp_path, lora):
    """The deltas are peft's, in float64; LoRAs of the written ones are opened by diffusers, or by peft."""
    family, deltas = opened("flux", flux, lora_type=kind, lora_alpha=6, lora_target_modules="to_q,to_k"), []
    before = {name: each.double() for name, each in weights_of(flux, "transformer").items()}
    assert family.adapter is not None
    for seed in (1, 2):
        made = written_lora(tmp_path / str(seed), family, seed)
        adapted = get_peft_model(diffusers_denoiser(family), peft_config_of(kind))
        set_peft_model_state_dict(adapted, {f"base_model.model.{name}": each for name, each in made.items()})
        merged = adapted.double().merge_and_unload().state_dict()
        deltas.append(
            {name: each - before[name] for name, each in merged.items() if not torch.equal(each, before[name])}
        )
    layers = [f"{name}.weight" for name in family.adapter.modules]
    assert deltas[0].keys() == {*layers}
    assert "neither --rank" in lora("resize", "1", "--output=r", code=2)
    said = lora("resize", "1", "--rank=2", "--output=two")
    kept = sum(nearest(deltas[0][name], 2).square().sum() for name in layers)
    assert f"a LoRA of rank 2, which holds {kept / sum(deltas[0][name].square().sum() for name in layers):.2%}" in said
    assert "of which no rank is given" in lora("average", "1", "2", "--output=r", code=2)
    lora("average", "1", "2", "--weights=1,3", "--rank=3", "--output=mean")
    lora("average", "1", "2", "--weights=1,3", "--energy=1", "--output=whole")
    mean = {name: deltas[0][name] / 4 + deltas[1][name] * 3 / 4 for name in layers}
    for folder, exact, rank in (("two", deltas[0], 2), ("mean", mean, 3), ("whole", mean, 9999)):
        model = diffusers_denoiser(family)
        if kind == "loha":
            model = PeftModel.from_pretrained(model, tmp_path / folder).merge_and_unload()
        else:
            pipeline = family.load_pipeline(vae=None, model=model)
            pipeline.load_lora_weights(tmp_path / folder)
            pipeline.fuse_lora()
            pipeline.unload_lora_weights()
        found = model.state_dict()
        for name in layers:
            torch.testing.assert_close(found[name] - before[name], nearest(exact[name], rank), rtol=1e-3, atol=1e-6)


def peft_config_of(kind: str) -> LoHaConfig | LoKrConfig:
    arguments = {"r": RANK, "alpha": 6, "target_modules": ["to_q", "to_k"]}
    return LoHaConfig(**arguments) if kind == "loha" else LoKrConfig(**arguments)


@pytest.fixture
def own(flux, tmp_path) -> Path:
    """A LoRA of the tiny FLUX, in a folder `own`."""
    written_lora(tmp_path / "own", opened("flux", flux))
    return tmp_path / "own" / "pytorch_lora_weights.safetensors"


def test_what_does_not_fit_or_is_damaged_is_one_sentence_and_leaves_nothing(flux, pipelines, own, tmp_path, lora):
    stored = load_file(own)
    name = min(stored)

    def other(file: str, **changed: Tensor | None) -> str:
        tensors = {key: each for key, each in {**stored, **changed}.items() if each is not None}
        save_file(tensors, tmp_path / file)
        return file

    (tmp_path / "old.pt").write_bytes(b"\x80\x02pickle")
    (tmp_path / "torn.safetensors").write_bytes(own.read_bytes()[:-100])
    (tmp_path / "header.safetensors").write_bytes(b"\xff" * 200)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "base.safetensors").write_bytes(own.read_bytes())
    shutil.copytree(flux, tmp_path / "bad")
    [weights] = (tmp_path / "bad" / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    nan = {name: stored[name] * float("nan")}
    unknown = {
        "transformer.elsewhere.to_q.lora_A.weight": torch.ones(RANK, 8),
        "transformer.elsewhere.to_q.lora_B.weight": torch.ones(8, RANK),
    }
    encoder = {
        "lora_te7_text_model_x.lora_down.weight": torch.ones(1, 4),
        "lora_te7_text_model_x.lora_up.weight": torch.ones(4, 1),
    }
    half = dict.fromkeys([name.replace("lora_A", "lora_B")])
    cases = {
        (flux, "old.pt"): (2, "is a pickle: loading it can run any code, so it is refused"),
        (flux, "torn.safetensors"): (3, "cannot read"),
        (flux, "header.safetensors"): (3, "cannot read"),
        (flux, "missing.safetensors"): (2, "there is no missing.safetensors"),
        (flux, flux): (2, f"{flux} has no LoRA hint: name a .safetensors file, or a folder with"),
        (flux, other("nan.safetensors", **nan)): (2, f"has NaN or infinite values in {name}"),
        (flux, other("unknown.safetensors", **unknown)): (2, "adapts elsewhere.to_q, which is no layer of FluxTransf"),
        (flux, other("half.safetensors", **half)): (2, "has one matrix of two for"),
        (flux, other("encoder.safetensors", **encoder)): (2, "and this model has no text_encoder_7"),
        (flux, other("shape.safetensors", **{name: torch.ones(4, 7)})): (2, "is of another model: what it adds to"),
        (flux, other("empty.safetensors", **dict.fromkeys(stored))): (2, "holds no tensors"),
        (pipelines("sdxl"), own): (2, "which is no layer of UNet2DConditionModel"),
        ("base.safetensors", own): (2, "is a file, and the model must be a pipeline"),
        ("nowhere/at/all", own): (2, "there is nothing of that name hint: the base model is a folder"),
        (own.parent, own): (2, "is the folder of a LoRA, not of a model"),
        ("bad", own): (3, "transformer"),
    }  # fmt: skip
    for (base, file), (code, sentence) in cases.items():
        said = lora("merge", base, file, "--output=result", code=code)
        assert sentence in said and "this is a bug" not in said, said
    lora("merge", flux, own, "--output=result")
    assert "exists already" in lora("merge", flux, own, "--output=result", code=2)
    assert "was not written by simpletuner" in lora("merge", flux, own, "--output=theirs", "--force", code=3)
    assert "from which it would be made" in lora("resize", own, "--rank=1", "--output=own", "--force", code=2)
    assert "given 2 times" in lora("merge", flux, own, "--output=r", "--strength=1", "--strength=2", code=2)
    assert "neither --rank nor --energy" in lora("resize", own, "--output=r", code=2)
    assert "different models" in lora("extract", flux, pipelines("sdxl"), "--rank=2", "--output=r", code=2)
    assert "no numbers of 0 or more" in lora("average", own, own, "--weights=1,x", "--output=r", code=2)
    assert "one LoRA has no mean" in lora("average", own, "--output=r", code=2)
    for part, sentence in (("hada_w1_a", "do not fit each other for"), ("oft_R", "it rotates the base's weights")):
        save_file({f"lora_unet_double_blocks_0.{part}": torch.ones(4, 4)}, tmp_path / "kind.safetensors")
        assert sentence in lora("resize", "kind.safetensors", "--rank=1", "--output=r", code=2)
    save_file(encoder, tmp_path / "alone.safetensors")
    assert "no layer in common" in lora("average", own, "alone.safetensors", "--output=r", code=2)
    for file in ("old.pt", "torn.safetensors", "nan.safetensors", "half.safetensors"):
        code = 3 if file.startswith("torn") else 2
        lora("resize", file, "--rank=1", "--output=r", code=code)
        lora("average", file, own, "--output=r", code=code)
    assert {each.name for each in tmp_path.iterdir() if each.is_dir()} == {"own", "theirs", "bad", "result"}
    lora("merge", flux, own, "--output=result", "--force", "--strength=2")
    assert "strength 2" in (tmp_path / "result" / "README.md").read_text()


def test_a_result_of_another_command_is_not_replaced_while_it_is_written_nor_once_it_is(own, tmp_path, lora):
    """Of two that resized at the same moment, one left a folder without its weights and ended with 0."""
    with sole_writer(tmp_path / "two"):
        said = lora("resize", own, "--rank=2", "--output=two", "--force", code=3)
        assert "another command is writing two" in said and not (tmp_path / "two").exists()
    with joined_world({}, use_cpu=True) as world, pytest.raises(SettingsError, match="exists already"):
        (tmp_path / "two").mkdir()  # since the command has looked
        with writing_to(tmp_path / "two", None, world, replace=False):
            raise AssertionError("it is replaced")


def test_a_full_disk_and_a_kill_leave_the_old_result_and_no_half_one(flux, own, tmp_path, lora, starter):
    def folders() -> list[str]:
        return sorted(each.name for each in tmp_path.iterdir() if each.is_dir())

    lora("merge", flux, own, "--output=result")
    before = {path: path.read_bytes() for path in (tmp_path / "result").rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        said = lora("merge", flux, own, "--output=result", "--force", "--strength=3", code=3)
        assert "cannot save to" in said and "File too large" in said
        lora("merge", flux, own, "--output=other", code=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in before} == before
    assert folders() == ["own", "result"]
    words = ["lora", "merge", str(flux), str(own), f"--output={tmp_path / 'result'}", "--force", "--strength=3"]
    started = starter.start(ranks.command_line, 1, words)
    begun: list[Path] = []
    while started.processes[0].is_alive() and not (begun := [*tmp_path.glob(".result*")]):
        pass
    started.kill()
    assert begun, started.said
    is_old = {path: path.read_bytes() for path in before} == before
    is_new = "strength 3" in (tmp_path / "result" / "README.md").read_text()
    assert is_old or is_new
    lora("merge", flux, own, "--output=result", "--force", "--strength=4")
    assert folders() == ["own", "result"]


def test_a_merge_holds_a_few_copies_of_one_weight(tmp_path):
    names = [f"layer{number}.weight" for number in range(40)]
    save_file({name: torch.ones(1024, 2048, dtype=torch.bfloat16) for name in names}, tmp_path / "base.safetensors")
    weight_bytes, pair = 4 * 1024 * 2048, (torch.ones(2, 2048), torch.ones(1024, 2))
    stored, origin, peaks = StoredTensors([tmp_path / "base.safetensors"]), ResultOrigin("merge", "base", []), []
    with joined_world({}, use_cpu=True) as world:
        group = group_of(stored, {name: [(1.0, product(*pair))] for name in names}, {}, origin, Rounding())
        begun = allocated_bytes()
        with watching(lambda: peaks.append(allocated_bytes() - begun)):
            write_full(tmp_path, group, world, "merged")
    assert len(peaks) > 3 and max(peaks) < 5 * weight_bytes < 40 * weight_bytes / 2  # of 40 weights in bf16
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == {*names} and all(each.eq(3).all() for each in merged.values())
