"""`simpletuner sample`: try a prompt on a run that trains, has stopped or has finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from simpletuner.commands.help import path_argument, path_option
from simpletuner.commands.runs import setting_option
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.system.importing import no_collection


def sample(
    folder: Annotated[Path, path_argument("Output folder of a run.")],
    prompt: Annotated[str, typer.Option("--prompt", help="Text to sample.", metavar="TEXT")],
    negative_prompt: Annotated[
        str | None, typer.Option("--negative_prompt", help="Default: that of the run's validation.", metavar="TEXT")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Step, name or best. Default: the run's, or its newest.", metavar="N")
    ] = "",
    ema: Annotated[bool, typer.Option("--ema", help="Take the averaged weights.")] = False,
    base: Annotated[bool, typer.Option("--base", help="Take the base model, without what was trained.")] = False,
    with_base: Annotated[bool, typer.Option("--with_base", help="Sample the base model as well.")] = False,
    image: Annotated[
        list[Path] | None, path_option("--image", "Image to edit, or a clip's first frame; may be repeated.", "FILE")
    ] = None,
    keep_aspect: Annotated[
        bool, typer.Option("--keep_aspect", help="Images keep their aspect, as reference_loose does.")
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Default: that of the run's validation.")] = None,
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Edge, WIDTHxHEIGHT, or with @FRAMES. Default: the run's.")
    ] = "",
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Default: as in the run's validation.")] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", help="Default: as in the run's validation.")] = None,
    strength: Annotated[float, typer.Option("--strength", help="Scale of the run's LoRA.")] = 1.0,
    output: Annotated[
        Path | None, path_option("--output", "Folder of the images; empty: samples in that of the run.")
    ] = None,
    use_cpu: Annotated[str, setting_option("use_cpu", "Sample here, on the CPU.")] = "",
    model: Annotated[str, setting_option("pretrained_model_name_or_path")] = "",
    config: Annotated[str, setting_option("single_file_config")] = "",
    revision: Annotated[str, setting_option("revision")] = "",
    families: Annotated[str, setting_option("model_families")] = "",
) -> None:
    """Sample one prompt with the weights of a run, and print the image's path.

    A run that trains samples it after its current step, with the weights of that step; its losses stay the same. Of any
    other, and with --checkpoint, this process samples, with the seed, size and steps of the run's validation.
    """
    from simpletuner.runs.folder import check_run

    check_run(folder)
    weights = weights_to_sample(base, ema, with_base, checkpoint)
    is_over, report = end_of(folder), Report()
    with report.phase("importing torch"), no_collection():
        from simpletuner.runs.settings_record import NAMED
        from simpletuner.tools.sampling import SampleOptions, ask_run, sample_here

    options = SampleOptions(
        prompt, negative_prompt, seed, size, steps, guidance, strength, weights, checkpoint,
        dict(zip(NAMED, (model, config, revision, families), strict=True)) | {"use_cpu": use_cpu},
        tuple(image or ()), keep_aspect,
    )  # fmt: skip
    if not (checkpoint or output or is_over()) and (found := ask_run(folder, options, report, is_over)) is not None:
        report.say(f"sampled at step {found.step}")
        report.text("".join(f"{folder / image}\n" for image in found.images))
        return
    written = sample_here(folder, options, output or folder / "samples", report)
    report.text("".join(f"{path}\n" for path in written))


def weights_to_sample(base: bool, ema: bool, with_base: bool, checkpoint: str) -> tuple[str, ...]:
    """Return the sets of weights, in the order of their images. Raises SettingsError for conflicts."""
    if base and (ema or with_base or checkpoint):
        raise SettingsError("--base takes no --ema, --with_base or --checkpoint", "leave one of them out")
    trained = "ema" if ema else "trained"
    return ("base",) if base else ("base", trained) if with_base else (trained,)


def end_of(folder: Path) -> Callable[[], bool]:
    """Return what tells whether the run in a folder has ended."""
    from simpletuner.runs.condition import KnownStart
    from simpletuner.runs.folder import Folders, RunFolder
    from simpletuner.runs.listing import summarize
    from simpletuner.system.processes.run_status import RunState

    run = RunFolder(folder.resolve(), Folders.of([folder]))
    return lambda: summarize(run, KnownStart()).condition.state not in (RunState.RUNNING, RunState.STARTING)
