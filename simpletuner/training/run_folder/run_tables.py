"""Tables before and after a run: what will run, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpletuner.checkpoints.layout import BEST_SUFFIX, PAGE, list_checkpoints
from simpletuner.data.samples.dataset_summary import MUCH_ENLARGED, summarize, texts_among_captions
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import FlowMatching
from simpletuner.models.family.schedulers import describe_shift
from simpletuner.parallel.fsdp2 import format_units
from simpletuner.parallel.gpu import describe_device
from simpletuner.parallel.model.activations import describe_activations
from simpletuner.parallel.model.blocks import count_parameters
from simpletuner.preparation.plan import Plan, describe_buckets, samples_by_shape
from simpletuner.preparation.sampled_prompts import SampledPrompt
from simpletuner.report import Report
from simpletuner.runs.charts import CURVE
from simpletuner.runs.facts import Rows, describe_result
from simpletuner.runs.metrics import METRICS, read_columns
from simpletuner.settings import Settings, provenance
from simpletuner.settings.values.parsed import LORA_TYPES
from simpletuner.system.numbers import count_noun
from simpletuner.training.auto import Resolved
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.run_folder.output_dir import pipelines_of, single_file_of


def describe_run(resolved: Resolved, family: ModelFamily, state: TrainingState, plan: Plan) -> Rows:
    """Return names and values of the run that begins: model, engine, data, schedule."""
    session, settings, world = resolved.session, resolved.session.settings, resolved.session.world
    parallel, training = settings.parallel, settings.training
    engine = format_engine(settings, world.size)
    count = format_trained(family, state.engine.num_parameters)
    ranks = "ranks" if session.mesh.cp == 1 else f"ranks / context_parallel_size = {session.mesh.cp}"
    batch = f"{training.train_batch_size} x {session.mesh.data_size} x {training.gradient_accumulation_steps}"
    float8 = ", linear layers of blocks in float8" if training.float8 else ""
    return [
        ("model", f"{settings.model.model_family}, {count}, mixed precision: {training.mixed_precision}{float8}"),
        *family.facts().items(),
        *describe_noise_levels(family, plan),
        ("engine", f"{engine}, {count_noun(world.size, 'rank')}"),
        ("device", describe_device(world.device)),
        *([("wrapping", format_units(family.meta_denoiser, parallel))] if parallel.fsdp_enable else []),
        *([("compiled", resolved.compiler)] if resolved.compiler else []),
        ("activations", describe_activations(settings) + f"; {resolved.recomputation}" * bool(resolved.recomputation)),
        ("images", describe_buckets(plan)),
        *describe_class_images(settings, plan),
        ("effective batch", f"{settings.effective_batch_size} = {batch} (batch x {ranks} x accumulation)"),
        ("steps", f"{state.step} to {state.schedule.max_steps}"),
        ("output", training.output_dir),
        *([("mirror", settings.checkpoints.mirror_output)] if settings.checkpoints.mirror_output else []),
        ("settings", provenance(session.loaded)),
    ]


def describe_class_images(settings: Settings, plan: Plan) -> Rows:
    if not any(dataset.prior_images for dataset in plan.datasets):
        return []
    from simpletuner.preparation.class_images import class_images_of  # which other runs do not load

    found = class_images_of(settings, plan.samples.parts)
    return [("class images", f"{each.dataset.id}: {each.describe()}") for each in found]


def describe_noise_levels(family: ModelFamily, plan: Plan) -> Rows:
    """Return the shift of a flow's noise levels at the trained sizes; no row for other objectives."""
    objective = family.objective()
    if not isinstance(objective, FlowMatching):
        return []
    return [("noise levels", describe_shift(family, objective.shift, [each.target for each in samples_by_shape(plan)]))]


def print_datasets(plan: Plan, report: Report) -> None:
    """Print what becomes of the images of each dataset, before hours are spent on encoding them."""
    if report.quiet:  # another rank prints it
        return
    rows = [
        (
            each.id,
            f"{each.total.images:,}",
            f"{each.total.samples:,.0f}",
            f"{each.total.held_out:,}",
            len(each.buckets),
            f"{each.total.mean_cropped:.1%}, at most {each.total.most_cropped:.1%}",
            f"{each.total.enlarged:,}",
        )
        for each in summarize(plan.samples, plan.buckets, plan.held_out)
    ]
    enlarged = f"enlarged > {MUCH_ENLARGED:g}x"
    report.table("datasets", rows, ("", "images", "per epoch", "held out", "buckets", "cropped", enlarged))
    report.say("hint: `simpletuner dataset check` with the same settings shows more", style="dim")


def format_trained(family: ModelFamily, parameters: int) -> str:
    """Describe what is trained, and over what."""
    if (adapter := family.adapter) is None:
        return f"{parameters:,} parameters"
    base, precision = count_parameters(family.meta_denoiser), family.settings.lora.base_model_precision
    frozen = f"{base:,} frozen{'' if precision == 'no_change' else f' in {precision}'}"
    label = f"{LORA_TYPES[adapter.kind]} of {'blocks' if adapter.kind == 'oft' else 'rank'} {adapter.rank}"
    return f"{label} on {len(adapter.modules)} layers: {parameters:,} parameters over {frozen}"


def format_engine(settings: Settings, world_size: int) -> str:
    parallel = settings.parallel
    if parallel.zero_stage is not None:
        places = {"cpu": "in the machine's memory", "nvme": "in files"}
        away = (("optimizer", parallel.offload_optimizer), ("weights", parallel.offload_param))
        return ", ".join(
            [f"ZeRO-{parallel.zero_stage}", *(f"{what} {places[place]}" for what, place in away if place in places)]
        )
    if parallel.fsdp_enable:
        copies = parallel.dp_replicate_size
        return f"FSDP2, {copies} copies over {world_size // copies} ranks each" if copies > 1 else "FSDP2"
    return "data-parallel" if world_size > 1 else "plain"


def describe_prompts(sampled: Sequence[SampledPrompt], plan: Plan) -> Rows:
    """Count the prompts that are captions of the data, if any is: images of the others were not memorized."""
    prompts = list(dict.fromkeys(each.prompt.prompt for each in sampled))
    known = texts_among_captions(plan.samples.parts, prompts)
    if not known:
        return []
    new = [prompt for prompt in prompts if prompt not in known]
    named = f"; new: {', '.join(new)}" if new else ""
    return [("prompts", f"captions of the images: {len(known)} of {len(prompts)}{named}")]


def print_result(settings: Settings, prompts: Rows, report: Report) -> None:
    """Print how the run went, where everything is, and what shows how the result is used."""
    output = settings.training.output_dir
    numbers = describe_result(read_columns(output / METRICS)) if not report.quiet else []
    if not numbers:
        return
    grids = sorted((output / "validation").glob("grid-*.png"))
    checkpoints = list_checkpoints(output / "checkpoints")
    exported = pipelines_of(settings)
    shows_average = settings.ema.use_ema and settings.validation.ema_validation == "ema_only"
    if shows_average:  # first what the images show
        exported[:2] = exported[1::-1]
    places = [
        ("checkpoint", checkpoints[0] if checkpoints else "-"),
        ("images" + " of the EMA" * shows_average, grids[-1] if grids else "none: give --validation_prompt"),
        ("report", output / PAGE),
        ("loss curve", output / CURVE),
        *[row for path in exported if path.is_dir() for row in describe_export(settings, path)],
        ("to use it", f"{exported[0] / 'README.md'} has the code"),
    ]
    report.table("finished", [*numbers, *prompts, *places])


def describe_export(settings: Settings, folder: Path) -> Rows:
    """Return the path of an exported folder, and of the same weights as one file, if written."""
    kind = ", EMA" * folder.name.endswith("-ema") + ", best step" * folder.name.endswith(BEST_SUFFIX)
    rows: Rows = [(("LoRA" if settings.model.model_type == "lora" else "pipeline") + kind, folder)]
    single_file = single_file_of(folder)
    return [*rows, (f"one file{kind}", single_file)] if single_file.is_file() else rows
