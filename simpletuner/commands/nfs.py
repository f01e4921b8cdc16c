"""`simpletuner nfs check`: can all nodes of a run share its folder?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpletuner.commands.help import SettingsCommand, path_option
from simpletuner.commands.listing import CommandGroup
from simpletuner.commands.options import UNKNOWN_FLAGS, with_settings
from simpletuner.errors import ExitCode, SettingsError, SimpleTunerError
from simpletuner.report import Report
from simpletuner.system.importing import no_collection
from simpletuner.system.numbers import count_noun
from simpletuner.tools.nfs.results import CHECKS, Finding, Status, format_ranks

if TYPE_CHECKING:
    from simpletuner.settings import Settings
    from simpletuner.tools.nfs.check import CheckOutcome
    from simpletuner.tools.nfs.rendezvous import Node

# The settings that say which machines there are, and how much the run will write.
SHOWN = (
    *("model_family", "model_flavour", "model_type", "pretrained_model_name_or_path", "output_dir", "max_train_steps"),
    *("optimizer", "use_ema", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("checkpoint_step_interval", "checkpoints_total_limit"),
)

WORDS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "skip": "-"}
STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "-": "dim"}


def build_nfs() -> typer.Typer:
    app = CommandGroup("Look after the folder that all nodes share.")
    app.command("check", cls=SettingsCommand, context_settings=UNKNOWN_FLAGS)(with_settings(nfs_check, SHOWN))
    return app


def nfs_check(
    flags: Mapping[str, object],
    config: Path | None,
    *,
    path: Annotated[Path | None, path_option("--path", "Folder to check; empty: output_dir.")] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Nodes in all; empty: tasks of srun or mpirun, else num_machines."),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            "--node_rank",
            min=0,
            help="Which node this is, from 0; empty: as srun or mpirun says, else machine_rank.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for the other nodes.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check that all nodes can share a run's folder: start this on every node at about the same time.

    Ends with 0 when all is well or there are warnings, with 3 when a check fails on any node.
    """
    from simpletuner.settings import load
    from simpletuner.system.processes.signals import handle_stop_signals
    from simpletuner.tools.nfs.check import check

    settings, report = load(flags, config, complete=False).settings, Report()
    node = node_of(settings, path, nodes, node_rank, timeout)
    with handle_stop_signals() as stop:
        outcome = check(node, stop, report.say)
    code = ExitCode.ENVIRONMENT if outcome.status is Status.FAIL else ExitCode.OK
    if as_json:
        report.json({**outcome.as_json(), "exit_code": int(code)})
    else:
        show(outcome, report)
    raise typer.Exit(int(code))


def node_of(settings: Settings, path: Path | None, nodes: int | None, rank: int | None, timeout: float) -> Node:
    """Combine the command's options with what srun, mpirun or torchrun says, or else with the settings."""
    from simpletuner.launch.started_tasks import started_number
    from simpletuner.tools.nfs.rendezvous import Node

    launch = settings.launch
    started = started_number(os.environ) if nodes is None and rank is None else None
    number, count = started or (
        launch.machine_rank if rank is None else rank,
        launch.num_machines if nodes is None else nodes,
    )
    if number >= count:
        raise SettingsError(
            f"node rank {number}, but nodes = {count}: ranks go from 0 to {count - 1}",
            "say how many nodes there are with --nodes, and give each its own --node-rank",
        )
    return Node(
        path=settings.training.output_dir if path is None else path,
        rank=number,
        nodes=count,
        timeout_seconds=timeout,
        address=launch.main_process_ip,
        port=launch.main_process_port,
        **written_by(settings),
    )


def written_by(settings: Settings) -> dict[str, Any]:
    """Return a node's `disk_usage`: what the configured run will write, or why that is not known."""
    model = settings.model
    if not model.model_family and not model.pretrained_model_name_or_path:
        return {}
    from simpletuner.checkpoints.disk_usage import estimate_disk_usage
    from simpletuner.models.catalog.architecture import copied_bytes, parameters_of
    from simpletuner.parallel.moments import TrainedWeights, needs_shapes

    counted = parameters_of(model)
    if counted and model.model_type == "full" and not needs_shapes(settings.optimizer.optimizer):
        copied = copied_bytes(Path(model.pretrained_model_name_or_path)) if model.pretrained_model_name_or_path else 0
        count, origin = counted
        return {"disk_usage": estimate_disk_usage(settings, TrainedWeights.of_count(count), origin, copied)}
    if not model.model_family:
        return {}
    try:
        with no_collection():
            from simpletuner.tools.plan.estimate import opened_disk_usage  # torch, to know the shapes of all weights

        return {"disk_usage": opened_disk_usage(settings)}
    except SimpleTunerError as error:
        return {"disk_unknown": error.message}


def show(outcome: CheckOutcome, report: Report) -> None:
    """Print the table: this node's checks, what only other nodes found, and the verdict."""
    node = outcome.node
    report.line(f"{node.path}  as node {node.rank} of {node.nodes}", style="bold")
    report.checklist(map(row, outcome.findings), STYLES)
    known = {(finding.check, finding.seen) for finding in outcome.findings}
    for rank, findings in sorted(outcome.others.items()):
        news = [f for f in findings if f.status in (Status.WARN, Status.FAIL) and (f.check, f.seen) not in known]
        if news:
            report.line(f"node {rank} found", style="bold")
            report.checklist(map(row, news), STYLES)
    report.line(verdict(outcome), style=STYLES[WORDS[outcome.status]])


def row(finding: Finding) -> tuple[str, str, str, tuple[str, ...]]:
    return finding.check, WORDS[finding.status], finding.seen, finding.fix


def verdict(outcome: CheckOutcome) -> str:
    """Summarize the result in one line, with the nodes that have each problem."""
    silent = [f"no report from node {rank}" for rank in outcome.silent if outcome.others]
    failures, warnings = [*problems(outcome, Status.FAIL), *silent], problems(outcome, Status.WARN)
    parts = [f"failed: {', '.join(failures)}"] * bool(failures) + [f"warnings: {', '.join(warnings)}"] * bool(warnings)
    return "; ".join(parts) or f"all is well on {count_noun(outcome.node.nodes, 'node')}"


def problems(outcome: CheckOutcome, status: Status) -> list[str]:
    everyone = {outcome.node.rank: outcome.findings, **outcome.others}
    checks = {
        rank: {finding.check for finding in found if finding.status is status} for rank, found in everyone.items()
    }
    nodes_of = {name: [rank for rank in checks if name in checks[rank]] for name in CHECKS}
    return [f"{name} ({format_ranks(ranks)})" for name, ranks in nodes_of.items() if ranks]
