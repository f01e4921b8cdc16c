"""`simpletuner net check`: latency and bandwidth between the ranks of a run, before the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from simpletuner.commands.help import SettingsCommand
from simpletuner.commands.listing import CommandGroup
from simpletuner.commands.options import UNKNOWN_FLAGS, as_arguments, with_settings
from simpletuner.errors import EnvironmentNotReady, ExitCode, SettingsError, SimpleTunerError
from simpletuner.parallel.devices import DEVICES, device_by_name
from simpletuner.report import Report
from simpletuner.settings import load
from simpletuner.system.numbers import count_noun
from simpletuner.tools.net.results import as_ms, as_rate

if TYPE_CHECKING:
    from simpletuner.tools.net.check import PlannedCommunication
    from simpletuner.tools.net.results import NetworkMachine, NetworkResult, PairResult

SHOWN = (
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "use_cpu"),
    *("node_join_timeout", "run_secret_file", "model_family", "model_flavour", "model_type"),
    *("pretrained_model_name_or_path", "fsdp_enable", "zero_stage", "gradient_accumulation_steps"),
)
"""Settings that decide the ranks and their communication."""

# Limits of the matrix of pairs, and of the list of the slowest ones where there are more machines or ranks.
MOST_COLUMNS, MOST_ROWS = 8, 12


def build_net() -> typer.Typer:
    app = CommandGroup("Look after the network between the ranks.")
    app.command("check", cls=SettingsCommand, context_settings=UNKNOWN_FLAGS)(with_settings(net_check, SHOWN))
    return app


def net_check(
    flags: Mapping[str, object],
    config: Path | None,
    *,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Time of all measurements together.")] = 30,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help=f"GPU of the run: {', '.join(DEVICES)}; empty: this machine's.", metavar="NAME"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure the network between the ranks of a run: start this on every machine, with the settings of the run.

    With a model it predicts the share of a step that communication takes. Ends with 3 when a pair is slow.
    """
    from simpletuner.launch.plan import is_rank, prepare_rank
    from simpletuner.launch.started_tasks import rank_variables
    from simpletuner.launch.supervisor import launch_ranks

    loaded = load(flags, config, complete=False)
    if variables := rank_variables(loaded.settings.launch, os.environ):
        os.environ.update(variables)
        loaded = load(flags, config, complete=False)  # num_processes is what was started
    loaded.pass_on_variables(os.environ)
    device = device_by_name(gpu) if gpu else None
    if loaded.settings.launch.num_processes == 1:
        raise SettingsError("one rank has no network to check", "say how many ranks the run has: --num_processes=16")
    if not is_rank(os.environ):
        own = [f"--seconds={seconds}", *([f"--gpu={gpu}"] if gpu else []), *(["--json"] if as_json else [])]
        launch_ranks(loaded, ["net", "check", *own, *as_arguments(flags, config)], None)
        return
    prepare_rank(loaded, os.environ)
    report = Report(quiet=os.environ["RANK"] != "0")
    with report.phase("importing torch"):
        from simpletuner.tools.net.check import run_rank

    def show(result: NetworkResult) -> None:
        planned: PlannedCommunication | str = "unknown: no model_family is set"
        if loaded.settings.model.model_family:
            from simpletuner.commands.plan import device_of_this_machine
            from simpletuner.tools.net.check import plan_communication

            known, rate = device or device_of_this_machine(loaded), result.bus_bytes_per_second
            try:
                planned = plan_communication(loaded, flags, config, known, rate, report)
            except SimpleTunerError as error:
                planned = f"unknown: {error.message}"
        conclude(result, planned, as_json, report)

    run_rank(loaded, seconds, report, show)


def conclude(result: NetworkResult, planned: PlannedCommunication | str, as_json: bool, report: Report) -> None:
    """Print the result. Raises EnvironmentNotReady where a pair is slow."""
    slow = list(result.slow_sentences())
    code = ExitCode.ENVIRONMENT if slow else ExitCode.OK
    if as_json:
        about = {"unknown": planned} if isinstance(planned, str) else planned.as_json()
        report.json({**result.as_json(), "planned": about, "exit_code": int(code)})
    else:
        print_result(result, planned, report)
    if slow:
        variable = f"{result.backend.upper()}_SOCKET_IFNAME"
        hint = f"look at their cables and switch ports, at {variable}, and at what else uses their network or CPUs"
        raise EnvironmentNotReady("slow: " + "\n  ".join(slow), hint)


def print_result(result: NetworkResult, planned: PlannedCommunication | str, report: Report) -> None:
    machines, ranks = result.machines, sum(len(machine.ranks) for machine in result.machines)
    title = f"{count_noun(ranks, 'rank')} on {count_noun(len(machines), 'machine')}, {result.backend}"
    report.line(f"{title}, measured for {result.seconds:.0f} s", style="bold")
    report.data_table("", interfaces(machines), ("interface", "of"))
    what = "sent while as much is received, and round trip"
    print_pairs(f"between machines: {what}", result.between, result.machine_of, result, report)
    # Pairs of other machines would be empty cells of a matrix.
    largest = MOST_COLUMNS if len(machines) == 1 else 0
    print_pairs(f"within a machine: {what}", result.within, result.name_of, result, report, largest)
    if missing := result.pairs - len(result.between) - len(result.within):
        report.line(f"{count_noun(missing, 'pair')} not measured: --seconds gives more time", style="dim")
    rows = [
        (decimal(each.message_bytes), as_ms(each.seconds), as_rate(each.bus_bytes_per_second))
        for each in result.all_reduce
    ]
    report.data_table("all-reduce of all ranks", rows, ("size", "time", "bus bandwidth"))
    report.line(f"planned step: {planned if isinstance(planned, str) else describe(planned)}")


def interfaces(machines: Sequence[NetworkMachine]) -> Iterator[tuple[str, str]]:
    for interface in dict.fromkeys(machine.interface for machine in machines):
        names = [machine.name for machine in machines if machine.interface == interface]
        more = f" and {len(names) - MOST_COLUMNS} more" if len(names) > MOST_COLUMNS else ""
        yield interface, ", ".join(names[:MOST_COLUMNS]) + more


def print_pairs(
    title: str,
    pairs: Sequence[PairResult],
    name: Callable[[int], str],
    result: NetworkResult,
    report: Report,
    most_columns: int = MOST_COLUMNS,
) -> None:
    """Print a matrix where it is small, else the slowest pairs; nothing without pairs."""
    slow = {each.pair.ranks for each in result.slow}
    ranks = sorted({rank for pair in pairs for rank in pair.ranks})
    cells = {
        pair.ranks: f"{as_rate(pair.bytes_per_second)} {as_ms(pair.latency_seconds)}{' SLOW' * (pair.ranks in slow)}"
        for pair in pairs
    }
    if not pairs:
        return
    if len(ranks) <= most_columns:
        rows = [(name(first), *(cells.get((first, second), "") for second in ranks[1:])) for first in ranks[:-1]]
        report.data_table(title, rows, ("", *map(name, ranks[1:])))
        return
    slowest = sorted(pairs, key=lambda pair: (pair.ranks not in slow, pair.bytes_per_second))[:MOST_ROWS]
    of = f"; the slowest of {len(pairs)}" if len(pairs) > len(slowest) else ""
    report.data_table(title + of, [(name(each.first), name(each.second), cells[each.ranks]) for each in slowest], ())


def describe(planned: PlannedCommunication) -> str:
    moved = (
        f"each rank sends {decimal(round(planned.bytes_per_step))}, {as_seconds(planned.seconds)} at this bus bandwidth"
    )
    if planned.step is None or planned.share is None or planned.waited_seconds is None:
        return f"{moved}; its share of a step is not known without --gpu={next(iter(DEVICES))}, or another of --help"
    return (
        f"{moved}, {planned.share:.0%} of a step of {as_seconds(planned.step.total)} (predicted, not "
        f"measured); for {as_seconds(planned.waited_seconds)} of it nothing computes"
    )


def as_seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
