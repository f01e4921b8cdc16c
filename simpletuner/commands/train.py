"""`simpletuner train`: resolve the settings, then run here or start the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from simpletuner.commands.options import as_arguments
from simpletuner.errors import SettingsError
from simpletuner.report import Report
from simpletuner.run_log import start_run_log
from simpletuner.system.files.paths import descriptor_of
from simpletuner.system.importing import no_collection
from simpletuner.system.processes.console import lasting

if TYPE_CHECKING:
    from simpletuner.settings import Loaded, Settings
    from simpletuner.settings.declared.sections import Launch

DRY_RUN = typer.Option(False, "--dry_run", "--dry-run", help="Show what each machine would start, without starting it.")
AS_JSON = typer.Option(False, "--json", help="With --dry_run: as JSON, for scripts.")


def train(flags: Mapping[str, object], config: Path | None, *, dry_run: bool = DRY_RUN, json: bool = AS_JSON) -> None:
    """Fine-tune a model. Run the same command again to resume."""
    from simpletuner.settings.resolving.sources import collect_sources
    from simpletuner.tools.run_check import check_run, load_run

    loaded = load_run(collect_sources(flags, config, os.environ))
    # after what a mistake ends, which takes half as long without them
    from simpletuner.launch.plan import is_rank
    from simpletuner.launch.started_tasks import rank_variables
    from simpletuner.models.catalog.support import check_runnable

    if not dry_run and (variables := rank_variables(loaded.settings.launch, os.environ)):
        os.environ.update(variables)
        loaded = load_run(collect_sources(flags, config, os.environ))  # num_processes is what was started
    loaded.pass_on_variables(os.environ)  # first: CUDA_VISIBLE_DEVICES decides which GPUs there are
    given = loaded
    # What started a rank has checked all this, or each rank does so as it goes.
    loaded = check_runnable(loaded) if is_rank(os.environ) else check_run(loaded)
    if json and not dry_run:
        raise SettingsError("--json needs --dry_run", "add --dry_run")
    if dry_run:
        Report().warn_all(loaded.warnings)
        show_plan(loaded, flags, config, json)
        return
    if loaded.settings.parallel.zero_stage is not None and not is_rank(os.environ):
        check_deepspeed(loaded.settings)
    if loaded.settings.launch.num_machines == 1 and not is_rank(os.environ):
        from simpletuner.data.samples.dataset_warnings import check_few_images

        check_few_images(loaded.settings)
    launches = loaded.settings.launch.num_processes > 1 and not is_rank(os.environ)
    start_run_log(source_of(loaded.settings.launch, launches))
    with lasting("stdout"):
        if launches:
            from simpletuner.launch.supervisor import launch_ranks

            # Ranks print the others: what only the datasets tell is known here.
            Report().warn_all(loaded.warnings[len(check_runnable(given).warnings) :])
            launch_ranks(loaded, ["train", *as_arguments(flags, config)], loaded.settings.training.output_dir)
        else:
            train_rank(loaded)


def train_rank(loaded: Loaded) -> None:
    from simpletuner.launch.plan import prepare_rank
    from simpletuner.system.processes.signals import exit_on_interrupt

    prepare_rank(loaded, os.environ)
    read_checkpoint_ahead(loaded.settings)
    # torch is imported from here on: launchers and --dry_run answer without it.
    with Report(quiet=os.environ.get("RANK", "0") != "0").phase("importing torch"), exit_on_interrupt():
        run_rank = import_rank(loaded.settings)
    run_rank(loaded)


def import_rank(settings: Settings) -> Callable[[Loaded], None]:
    with no_collection():
        from simpletuner.private_api.of_torch import leave_out_compiler

        if not may_compile(settings):
            leave_out_compiler()
        from simpletuner.worker import run_rank
    return run_rank


def may_compile(settings: Settings) -> bool:
    """True if the compiler may be needed: `auto` compiles on GPUs alone."""
    from torch import cuda

    is_auto = settings.compile.dynamo_backend == "auto"
    return settings.compile.is_on or (is_auto and not settings.launch.use_cpu and cuda.is_available())


def source_of(launch: Launch, launches: bool) -> str:
    """Return the prefix of this process in the log; empty for rank 0."""
    if launches:
        return f"[launcher {launch.machine_rank}]"
    rank = os.environ.get("RANK", "0")
    return f"[rank {rank}]" if rank != "0" else ""


def read_checkpoint_ahead(settings: Settings) -> None:
    """Read what this rank verifies of the checkpoint while torch is imported, which takes 5 to 10 s."""
    from simpletuner.checkpoints.layout import files_to_resume_from
    from simpletuner.system.files.atomic import read_ahead

    root = settings.training.output_dir / "checkpoints"
    files = files_to_resume_from(root, settings.checkpoints.resume_from_checkpoint)
    read_ahead(files[int(os.environ.get("RANK", "0")) :: int(os.environ.get("WORLD_SIZE", "1"))])


def check_deepspeed(settings: Settings) -> None:
    """Raise EnvironmentNotReady before any rank is started if DeepSpeed lacks a package or compiler here."""
    from simpletuner.deepspeed.requirements import check_compiler, check_installed
    from simpletuner.settings.foreign.deepspeed_config import deepspeed_options

    check_installed()
    if (zero := deepspeed_options(settings)) is not None and zero.uses_nvme:
        check_compiler()


def show_plan(loaded: Loaded, flags: Mapping[str, object], config: Path | None, as_json: bool) -> None:
    """Print the command of each machine, and the processes that it starts."""
    from simpletuner.launch.plan import as_text, describe_plans
    from simpletuner.settings.declared.errors import mask_arguments

    # Every machine gets its own --machine_rank.
    shared = {name: value for name, value in flags.items() if name != "machine_rank"}
    arguments = mask_arguments([as_typed(argument) for argument in as_arguments(shared, config)])
    plans = describe_plans(loaded.settings.launch, ["train", *arguments])
    if as_json:
        Report().json(plans)
    else:
        Report().text("\n\n".join(as_text(plan) for plan in plans) + "\n")


def as_typed(argument: str) -> str:
    """Return a flag as it was typed, where the shell has replaced `<(...)` by the number of a pipe."""
    name, _, value = argument.partition("=")
    return f"{name}=<(...)" if descriptor_of(value) else argument
