"""`simpletuner plan`: what a run takes in memory, time and disk, before it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from simpletuner.commands.help import path_option
from simpletuner.commands.listing import AsJson
from simpletuner.errors import DataError, EnvironmentNotReady, SettingsError, SimpleTunerError
from simpletuner.parallel.devices import DEVICES, GIB, Device, MemoryBudget, device_by_driver_name, device_by_name
from simpletuner.report import Report
from simpletuner.settings import Loaded, load
from simpletuner.settings.values.spelling import as_text
from simpletuner.system.importing import no_collection
from simpletuner.system.numbers import count_noun, format_count, format_flops, format_gib, parse_bytes

if TYPE_CHECKING:
    from simpletuner.tools.plan.estimate import RunPlan
    from simpletuner.tools.plan.planner import Planner
    from simpletuner.tools.plan.prices import Offer
    from simpletuner.tools.plan.search import Proposal

LEGEND = "P parameters that are trained, F frozen ones, U those of the largest unit, N ranks that share them"
# Names of the parts of a step, where those of the fields do not say it.
PARTS = {"products": "matrix products", "other": "all other operators"}

Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help=f"GPU to plan for: {', '.join(DEVICES)}; empty: this machine's.", metavar="NAME"),
]
GpuMemory = Annotated[
    str | None, typer.Option("--gpu_memory", help="Memory of each GPU, such as 24GiB.", metavar="BYTES")
]
HostMemory = Annotated[
    str | None, typer.Option("--host_memory", help="Memory of each machine; empty: enough.", metavar="BYTES")
]
Auto = Annotated[bool, typer.Option("--auto", help="Propose the fastest settings that fit, and say why.")]
Measure = Annotated[bool, typer.Option("--measure", help="Measure ten steps on this machine, with random weights.")]
Price = Annotated[
    float | None,
    typer.Option("--price", min=0, max=1e6, help="Price of a GPU hour: what the run costs.", metavar="NUMBER"),
]
Compare = Annotated[bool, typer.Option("--compare", help="Compare the offers of GPUs in ~/.simpletuner/prices.toml.")]
Apply = Annotated[Path | None, path_option("--apply", "Write what --auto proposes into this config file.", "FILE")]


def plan(
    flags: Mapping[str, object],
    config: Path | None,
    *,
    gpu: Gpu = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    auto: Auto = False,
    apply: Apply = None,
    measure: Measure = False,
    price: Price = None,
    compare: Compare = False,
    as_json: AsJson = False,
) -> None:
    """Show the memory, time and disk that a run takes. Needs no GPU, and no weights of a published model."""
    if apply is not None and not auto:
        raise SettingsError("--apply needs --auto", "add --auto, whose proposal it writes")
    offers = offers_to_compare([gpu, gpu_memory, auto, measure, price]) if compare else []
    loaded = load(flags, config or apply, complete=False)
    loaded.pass_on_variables(os.environ)
    otherwise = "for any other, give --gpu_memory and no time is estimated"
    named = device_by_name(gpu, otherwise) if gpu else None
    named_bytes = parse_bytes(gpu_memory, "--gpu_memory") if gpu_memory else None
    host_bytes = parse_bytes(host_memory, "--host_memory") if host_memory else None
    report = Report()
    with report.phase("importing torch"), no_collection():  # after what can be refused without it
        leave_out_what_counts_need_not(loaded, measure)
        from simpletuner.tools.plan.planner import Planner

    if offers:
        compare_prices(offers, Planner(loaded, flags, config, None, MemoryBudget(None, host_bytes), report), as_json)
        return
    # Asked only without --gpu: it starts CUDA on the GPU of this machine.
    device = named or device_of_this_machine(loaded)
    gpu_bytes = named_bytes or (device and device.memory_bytes)
    budget = MemoryBudget(gpu_bytes, host_bytes)
    if auto and (device is None or gpu_bytes is None):
        raise SettingsError(
            "--auto needs to know the GPU", f"give --gpu={next(iter(DEVICES))}, or another of the table"
        )
    planner = Planner(loaded, flags, config or apply, device, budget, report)
    proposal = planner.run(auto, measure)
    if as_json:
        report.json({**as_dict(proposal, budget, device), "price": prices_of(proposal.plan, price)})
    else:
        print_plan(proposal, budget, device, report, price)
    # No error: a plan is often made on another machine than the run's.
    if proposal.plan.room is not None and (lack := proposal.plan.room.problem) is not None:
        report.warn(lack.message, lack.hint)
    if apply is not None:
        write_settings(apply, proposal.settings, report)
    # After the tables: who is refused needs the numbers most.
    elif missing := proposal.plan.shortfall(budget):
        raise EnvironmentNotReady(f"this does not fit: it needs {missing}", "--auto proposes what does")
    if proposal.problem is not None:
        raise DataError("the plan is of images that no run would start with, for the reason above")


def leave_out_what_counts_need_not(loaded: Loaded, measure: bool) -> None:
    if measure or "diffusers" in sys.modules:  # who has imported it may need all of it
        return
    from simpletuner.private_api.of_torch import leave_out_compiler

    leave_out_compiler()
    from simpletuner.models.opening.loading import leave_out_unused

    leave_out_unused(loaded.settings, only_counts=True)
    import torch

    # The few real numbers are tables of positions, and threads that wait for work take 1 CPU s.
    torch.set_num_threads(1)


def device_of_this_machine(loaded: Loaded) -> Device | None:
    """Return the GPU of this machine if the table has it; None for others, and with use_cpu."""
    import torch

    if loaded.settings.launch.use_cpu or not torch.cuda.is_available():
        return None
    found = device_by_driver_name(torch.cuda.get_device_name())
    # Cards of one name may have less: an RTX 3060 has 12 or 8 GB.
    total_gib = torch.cuda.get_device_properties().total_memory / GIB
    return found and replace(found, memory_gib=min(found.memory_gib, total_gib))


def offers_to_compare(others: Sequence[object]) -> list[Offer]:
    """Return the user's offers. Raises SettingsError beside options that are about one GPU."""
    if any(each not in (None, False) for each in others):
        raise SettingsError(
            "--compare takes GPUs and prices from the user's table", "leave out --gpu, --auto, --measure and --price"
        )
    from simpletuner.tools.plan.prices import prices_file, read_offers

    return read_offers(prices_file())


def compare_prices(offers: Sequence[Offer], planner: Planner, as_json: bool) -> None:
    """Plan for the GPU of each offer, and print time and price, cheapest first."""
    from simpletuner.tools.plan.prices import COLUMNS, Planned, compare_offers, row_of

    def plan_for(device: Device) -> Planned:
        budget = replace(planner.budget, gpu_bytes=device.memory_bytes)
        plan = replace(planner, device=device, budget=budget).run(auto=False, measure=False).plan
        return not plan.shortfall(budget), plan.step_seconds, plan.steps, plan.settings.launch.num_processes

    costs = compare_offers(offers, plan_for)
    if as_json:
        rows = [{**each.offer.model_dump(), "fits": each.fits, "step_seconds": each.step_seconds} for each in costs]
        sums = [{"hours": each.hours, "cost": each.price, "cost_per_1000_steps": each.per_thousand} for each in costs]
        planner.report.json([row | more for row, more in zip(rows, sums, strict=True)])
        return
    planner.report.data_table("", [row_of(each) for each in costs], COLUMNS)
    sources = {source_of_rates(each.offer.device) for each in costs}
    planner.report.line(
        f"predicted from {' and '.join(sorted(sources))}; encoding and validation are not in it", style="dim"
    )


def prices_of(plan: RunPlan, price: float | None) -> dict[str, float | None] | None:
    """Return the prices of the run, of 1,000 steps and of an epoch; None without a price of a GPU hour."""
    if price is None:
        return None
    from simpletuner.tools.plan.prices import price_of

    gpus = plan.settings.launch.num_processes
    counted = {"run": plan.steps, "1,000 steps": 1000, "epoch": plan.epoch_steps}
    return {name: price_of(steps, plan.step_seconds, gpus, price) for name, steps in counted.items()}


def print_plan(
    proposal: Proposal, budget: MemoryBudget, device: Device | None, report: Report, price: float | None
) -> None:
    """Print tables for people: memory by kind and by phase, time, disk, and what was proposed."""
    plan, ranks = proposal.plan, proposal.plan.memory.inputs.ranks_per_machine
    report.line(title_of(proposal), style="bold")
    rows = [(row.name, format_gib(row.gpu), format_gib(row.host * ranks), row.formula) for row in plan.memory.rows]
    rows.append(("together", format_gib(plan.memory.gpu_bytes), format_gib(plan.memory.host_bytes), ""))
    report.data_table("", rows, ("", "per GPU", "per machine", "per rank"))
    report.line(LEGEND, style="dim")
    rows = [*class_image_rows(proposal), *summary(plan, budget, device), *price_rows(plan, price)]
    report.data_table("", rows, ())
    for name, value in proposal.settings.items():
        report.line(f"{name} = {as_text(value)}", style="bold")
    for name, reason in proposal.reasons.items():
        report.line(f"  {name}: {reason}", style="dim")
    if device is None and not plan.settings.launch.use_cpu:
        missing = "the time of a step" if budget.gpu_bytes else "whether it fits and the time of a step"
        report.line(f"--gpu={next(iter(DEVICES))}, or another of `plan --help`, says {missing}", style="bold")


def class_image_rows(proposal: Proposal) -> Iterator[tuple[str, str]]:
    for each, seconds in proposal.class_images:
        time = f", about {timedelta(seconds=round(seconds))}" if seconds and each.missing else ""
        yield "class images", f"{each.dataset.id}: {each.describe()}"
        yield "", f"{each.describe_missing()}{time}"


def title_of(proposal: Proposal) -> str:
    from simpletuner.training.run_folder.run_tables import format_engine

    settings, inputs = proposal.plan.settings, proposal.plan.memory.inputs
    training, launch = settings.training, settings.launch
    unused = f", of which {format_count(inputs.unused_parameters)} are not used" if inputs.unused_parameters else ""
    frozen = f" over {format_count(inputs.frozen_parameters)} frozen" if inputs.frozen_parameters else ""
    batch = f"{training.train_batch_size} x {launch.num_processes} x {training.gradient_accumulation_steps}"
    name, engine = (
        f"{settings.model.model_family} {settings.model.model_flavour}".strip(),
        format_engine(settings, launch.num_processes),
    )
    return (
        f"{name}: {format_count(inputs.num_parameters)} parameters{frozen}{unused}; {engine}, "
        f"{proposal.shape} px, batch {settings.effective_batch_size} = {batch}"
    )


def summary(plan: RunPlan, budget: MemoryBudget, device: Device | None) -> Iterator[tuple[str, str]]:
    for phase, size in plan.phases.items():
        mark = " <- the most" if phase == plan.peak_phase else ""
        yield phase, f"{format_gib(size)}{mark}" if size else "unknown: needs the files of the model"
    if budget.gpu_bytes is not None:
        left = budget.gpu_bytes - plan.peak_bytes
        fits = f"{format_gib(left)} of {format_gib(budget.gpu_bytes)} are left"
        yield "fits", fits if not plan.shortfall(budget) else f"no: {plan.shortfall(budget)}"
    yield "compute", f"{format_flops(plan.flops_per_sample)} per sample of the largest size"
    if plan.step_seconds is not None and plan.samples_per_second is not None:
        mfu = f", MFU {plan.mfu(device):.0%}" if device else ""
        said = "measured here, on one rank"
        if plan.parts is not None and device is not None:
            said = f"predicted from {source_of_rates(device)}; --measure measures"
        yield "step", f"{plan.step_seconds:.3g} s, {plan.samples_per_second:.3g} samples/s{mfu} ({said})"
        if plan.parts is not None:
            parts = {PARTS.get(name, name): seconds for name, seconds in asdict(plan.parts).items() if seconds}
            yield "of which", ", ".join(f"{name} {seconds:.2g} s" for name, seconds in parts.items())
        if plan.steps is not None:
            duration = timedelta(seconds=round(plan.steps * plan.step_seconds))
            yield "run", f"{duration} for {count_noun(plan.steps, 'step')}"
    yield "disk", f"{decimal(plan.disk.total_bytes)} at most: {plan.disk.parts}"
    if plan.room is not None and plan.room.free_bytes is not None:
        lack = "no: " * (plan.room.problem is not None)
        yield "free there", f"{lack}{decimal(plan.room.free_bytes)}, of which it takes {decimal(plan.room.need_bytes)}"


def price_rows(plan: RunPlan, price: float | None) -> Iterator[tuple[str, str]]:
    known = [f"{each:,.2f} for {name}" for name, each in (prices_of(plan, price) or {}).items() if each is not None]
    named = [each.replace("for run", "for the run").replace("for epoch", "per epoch") for each in known]
    if price is not None:
        gpus = count_noun(plan.settings.launch.num_processes, "GPU")
        yield "price", f"{', '.join(named)} ({gpus} at {price:g} per hour)" if named else "unknown: it needs --gpu"


def source_of_rates(device: Device) -> str:
    from simpletuner.tools.plan.rates import rates_of  # which `--help` has no use for

    return str(rates_of(device))


def as_dict(proposal: Proposal, budget: MemoryBudget, device: Device | None) -> dict[str, object]:
    """Return the form of `--json`: bytes and seconds."""
    plan = proposal.plan
    return {
        "parameters": plan.memory.inputs.num_parameters,
        "frozen_parameters": plan.memory.inputs.frozen_parameters,
        "unused_parameters": plan.memory.inputs.unused_parameters,
        "size_px": list(proposal.shape.size),
        "memory": [asdict(row) for row in plan.memory.rows],
        "gpu_bytes": plan.memory.gpu_bytes,
        "host_bytes_per_machine": plan.memory.host_bytes,
        "gpu_memory_bytes": budget.gpu_bytes,
        "phases": plan.phases,
        "peak_bytes": plan.peak_bytes,
        "fits": None if budget.gpu_bytes is None else not plan.shortfall(budget),
        "flops_per_sample": plan.flops_per_sample,
        "step_seconds": plan.step_seconds,
        "step_seconds_of": plan.parts and asdict(plan.parts),
        "step_seconds_from": source_of_rates(device) if plan.parts and device else None,
        "samples_per_second": plan.samples_per_second,
        "mfu": plan.mfu(device) if device else None,
        "steps": plan.steps,
        "checkpoint_bytes": plan.disk.checkpoint_bytes,
        "disk_bytes": plan.disk.total_bytes,
        "disk_free_bytes": plan.room and plan.room.free_bytes,
        "disk_need_bytes": plan.room and plan.room.need_bytes,
        "disk_problem": problem_of(plan.room.problem if plan.room is not None else None),
        "settings": proposal.settings,
        "reasons": proposal.reasons,
        "problem": problem_of(proposal.problem),
        "class_images": [
            {
                "dataset": each.dataset.id,
                "missing": each.missing,
                "said": f"{each.describe()}; {each.describe_missing()}",
                "seconds": seconds,
            }
            for each, seconds in proposal.class_images
        ],
    }


def problem_of(error: SimpleTunerError | None) -> dict[str, str] | None:
    return error and {"message": error.message, "hint": error.hint}


def write_settings(file: Path, values: Mapping[str, object], report: Report) -> None:
    from simpletuner.settings.editors.editing import set_in_file

    for name, value in values.items():
        set_in_file(file, name, value)
    written = ", ".join(f"{name} = {as_text(value)}" for name, value in values.items())
    report.say(f"{file}: {written}" if written else f"{file} stays as it is: nothing is faster")
