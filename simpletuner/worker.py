"""A rank from joining the others to the exported pipeline. Builds every object of a run and connects them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from simpletuner.checkpoints.export import base_files, check_export
from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.checkpoints.verification import CheckpointDamaged, Checksums, Verification
from simpletuner.errors import EnvironmentNotReady, explain_system_errors
from simpletuner.launch.launcher_connection import connect_to_launcher
from simpletuner.launch.node_info import check_local_ranks, node_info
from simpletuner.launch.rendezvous import Group, verify_same_config
from simpletuner.launch.stall_detection import prefix_in, record_into, write_records
from simpletuner.launch.started_tasks import stop_advice
from simpletuner.launch.store import MessageStore, TorchStore, message_signer
from simpletuner.launch.termination import check_of_machine, watch_preemption
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import silence_libraries
from simpletuner.models.opening.completeness import note_checked
from simpletuner.models.opening.loading import load_family
from simpletuner.models.opening.unused_packages import leave_out_unused
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.gpu import explain_out_of_memory, set_float32_precision
from simpletuner.parallel.mesh import build_mesh
from simpletuner.parallel.model.attention_backend import attention_by
from simpletuner.parallel.parallelize import compiler_explained
from simpletuner.parallel.world import STALL_SECONDS, World, joined_world, report_first_failure
from simpletuner.preparation.plan import Plan, samples_by_shape
from simpletuner.preparation.prepare import fit_to_model, folders_of, plan_data, prepare
from simpletuner.preparation.same_data import verify_same_folders
from simpletuner.report import Report
from simpletuner.runs.data_listing import record_data_of
from simpletuner.runs.facts import Rows, facts_of
from simpletuner.runs.report import open_html_report
from simpletuner.runs.settings_record import SETTINGS, read_settings, record_settings, report_changes
from simpletuner.session import Session
from simpletuner.settings import Loaded
from simpletuner.system.files.lease_folder import shared_folders
from simpletuner.system.importing import no_collection
from simpletuner.system.numbers import count_noun
from simpletuner.system.processes.activity import Activity
from simpletuner.system.processes.run_status import RunState, StatusWriter
from simpletuner.system.processes.signals import StopRequest, handle_stop_signals, stop_announcement
from simpletuner.training.auto import resolve_auto
from simpletuner.training.build import build_trainer, check_engine, open_engine, open_state
from simpletuner.training.metrics.metrics import open_metrics
from simpletuner.training.metrics.sample_losses import open_sample_losses
from simpletuner.training.metrics.speed import EXPORTING
from simpletuner.training.metrics.trackers import open_trackers, send_missed
from simpletuner.training.mirroring.run_mirror import RunMirror
from simpletuner.training.publishing.hub import push_to_hub
from simpletuner.training.publishing.model_card import write_card
from simpletuner.training.publishing.notifier import Notifier, open_notifier
from simpletuner.training.run_folder.other_project import refuse_other_base
from simpletuner.training.run_folder.output_dir import (
    accept_start,
    check_room,
    export,
    export_single_files,
    exported_steps,
    on_first_rank,
    open_output_dir,
    pipelines_of,
    restore_from_bucket,
    unless_refused,
)
from simpletuner.training.run_folder.resuming import (
    check_fits,
    checkpoint_to_resume,
    refuse_other_order,
    resume_point,
    set_later_aside,
    warn_of_changed_base,
)
from simpletuner.training.run_folder.summary import describe_prompts, describe_run, print_datasets, print_result


def run_rank(loaded: Loaded) -> None:
    """Run one rank. Collective with the other ranks of the run."""
    launch, activity, folder = loaded.settings.launch, Activity(), loaded.settings.training.output_dir
    record_into(folder, os.environ)
    with (
        # Left in reverse: an error becomes a sentence, then the launcher and the other ranks get it, and only
        # then are the connections to both closed.
        handle_stop_signals(lambda: activity.unsaved) as stop,
        connect_to_launcher(os.environ, activity, stop, launch.stall_timeout) as launcher,
        watch_preemption("" if launcher.connection else check_of_machine(launch, os.environ), stop),
        joined_world(os.environ, launch.use_cpu, stop, activity) as world,
        recorded_status(stop, activity) as status,
        report_first_failure(world, stop, launcher),
        explain_system_errors(folder),
        ExitStack() as stack,
    ):
        launcher.dump = partial(write_records, prefix_in(folder, os.environ), world.rank)
        messages = MessageStore(TorchStore(world.store), message_signer(launch.run_secret_file))
        infos = verify_same_config(
            messages, Group("rank", world.rank, world.size), node_info(loaded), stop.check, STALL_SECONDS
        )
        check_local_ranks(infos, world.rank, os.environ)
        session = Session(
            loaded, build_mesh(loaded.settings, world), Report(quiet=not world.is_first), stop, stack, status
        )
        stack.enter_context(session.report.phase("starting"))
        activity.show, session.report.status.watch = session.report.status.begin, status.show
        mirror = open_output_dir(session, stack)
        set_float32_precision(loaded.settings.training.allow_tf32)
        training = loaded.settings.training
        stack.enter_context(
            attention_by(
                training.attention_backend, world.device, compute_dtype(loaded.settings), training.attention_kernel
            )
        )
        with (
            open_notifier(session) as notifier,
            mirror.finishing() if mirror is not None else nullcontext(),
            explain_out_of_memory(loaded.settings, world.device),
            unless_refused(session),
        ):
            run(session, notifier, mirror)


@contextmanager
def recorded_status(stop: StopRequest, activity: Activity) -> Iterator[StatusWriter]:
    """Record how the run goes in `status.json`, from the moment at which its folder is known."""
    status = StatusWriter()
    stop.save_seconds = lambda: activity.save_seconds
    stop.when_asked = lambda: status.stopping(stop_announcement(activity.unsaved, activity.save_seconds))
    stop.before_exit = partial(status.end, RunState.STOPPED)
    with status.recording():
        yield status


def run(session: Session, notifier: Notifier, mirror: RunMirror | None) -> None:
    """Train from the newest checkpoint that is not damaged, or from the base model; then export and upload."""
    silence_libraries()
    leave_out_unused(session.settings)
    for warning in session.loaded.warnings:
        session.report.warn(warning)
    if advice := stop_advice(os.environ, session.settings.launch.preemption_grace_seconds):
        session.report.say(advice)
    output = session.settings.training.output_dir
    # First: ranks that see another folder would find other checkpoints in it.
    verify_same_folders([("output_dir", output)], session.world, session.stop.check, "output")
    damaged: dict[Path, str] = {}
    while True:
        try:
            restore_from_bucket(session, mirror, damaged)
            shown = resume(session, checkpoint_to_resume(session, damaged), notifier, mirror)
            break
        except CheckpointDamaged as error:  # known before the engine is built; what was encoded is in the caches
            damaged[error.folder] = error.message
            session = session.restarted()
    export_single_files(session)
    print_result(session.settings, shown, session.report)
    push_to_hub(session)


def resume(session: Session, checkpoint: Checkpoint | None, notifier: Notifier, mirror: RunMirror | None) -> Rows:
    """Plan the data, train the steps that are left, if any, and return what the last table says of the prompts.

    Raises CheckpointDamaged on all ranks.
    """
    settings, world, stop = session.settings, session.world, session.stop.check
    refuse_other_order(checkpoint)
    changes = report_changes(session, checkpoint)
    # Begun here and waited for in `train`: reading the files overlaps with scanning data and base model.
    verification = Verification(checkpoint, world) if checkpoint else None
    plan = plan_data(session, accept=partial(accept_start, session))
    schedule, _ = resume_point(settings, plan, checkpoint)
    done = exported_steps(settings, world)
    if done >= schedule.max_steps:
        before = read_settings(settings.training.output_dir / SETTINGS) or {}
        on_first_rank(session, partial(refuse_other_base, settings, before, has_finished=True))
        # A run that was killed after its export, and before it said so, has left the status of a step before.
        session.status.train(done, schedule.max_steps)
        steps = count_noun(done, "step") + ", with the settings of then" * bool(changes)
        session.report.say(f"finished already, after {steps}; raise max_train_steps or num_train_epochs to go on")
        send_missed(session, done)
    else:
        print_datasets(plan, session.report)
        caches = folders_of(settings, plan)
        with (
            shared_folders(caches, stop, session.report.say),
            ExitStack() as writers,
        ):  # `cache clear` must not remove what this run reads
            verify_same_folders([("the cache", folder) for folder in caches], world, stop, "caches")
            return train(session, plan, checkpoint, verification, writers, notifier, mirror)
    return []


def train(
    session: Session,
    plan: Plan,
    checkpoint: Checkpoint | None,
    verification: Verification | None,
    writers: ExitStack,
    notifier: Notifier,
    mirror: RunMirror | None,
) -> Rows:
    """Encode the data, build the engine, train, export; return what the last table says of the prompts."""
    session.world.activity.begin("reading the base model", watched=False)
    with no_collection():  # the classes of the model are imported here
        family = load_family(session.settings, session.world, session.stop.check, skips_checked=True)
        _ = family.meta_denoiser
    # What can be known to be wrong is found before anything is encoded, which may take hours.
    session.world.activity.begin("proving the pipeline", watched=False)
    plan, sampled = fit_to_model(session, plan, family)
    trained = sorted({shape.target for shape in samples_by_shape(plan)})
    family.prove(trained, session.world.device, sorted({each.shape for each in sampled}))
    verify_same_facts(family.facts(), session.world)
    session.world.activity.begin("reading the base model", watched=False)
    check_export(family, pipelines_of(session.settings))
    wait_for_base_checksums = start_base_checksums(session.world, family, checkpoint)
    check_engine(session, family)
    start = int(checkpoint.state["step"]) if checkpoint is not None else 0
    last = resume_point(session.settings, plan, checkpoint)[0].max_steps
    on_first_rank(session, lambda: check_room(session, plan, family, start, last))
    if checkpoint is not None:
        check_fits(checkpoint, family, session.world, verification)
    prepared = prepare(session, plan, family, writers, sampled)
    if verification is not None:
        session.world.activity.begin("verifying the checkpoint")
        verification.wait()
    session.world.activity.begin("loading weights", watched=False)
    steps = resume_point(session.settings, prepared.plan, checkpoint)[0].max_steps
    resolved = resolve_auto(session, family, prepared.plan, steps)
    with closing(open_engine(resolved.session.settings, session.mesh, family, checkpoint)) as engine:
        state = open_state(session, family, engine, prepared, checkpoint)
        state.base_checksums = wait_for_base_checksums()
        if checkpoint is not None:
            warn_of_changed_base(session.report, checkpoint, state, family.facts())
        # Only now that the checkpoint is read: a start that fails before leaves all of them in their places.
        set_later_aside(session, state.step)
        rows = describe_run(resolved, family, state, prepared.plan)
        session.report.table("simpletuner train", rows)
        listing = record_data_of(session, prepared.plan)
        record_settings(session, state.step, family.facts(), listing.key if listing is not None else "")
        if session.world.is_first:
            note_checked(family)
        facts = facts_of(session.loaded, rows, prepared.plan, listing.digest if listing is not None else "")
        with open_html_report(session, facts, state.schedule.max_steps) as page:
            after_rounds = [page.renew, notifier.send_round] if page is not None else []
            trackers = partial(open_trackers, session)
            with (
                open_metrics(session, state.step, trackers) as metrics,
                open_sample_losses(session, state.step, prepared.plan.samples) as sample_losses,
                compiler_explained(),
            ):
                trainer = build_trainer(session, family, prepared, state, metrics, after_rounds, sample_losses)
                if mirror is not None:
                    mirror.start(state.step, trainer.durations)
                trainer.train()
            with trainer.durations.timed(EXPORTING):
                export(session, family, state, partial(write_card, session.settings, family, facts))
            trainer.durations.write()
    return describe_prompts(sampled, prepared.plan)


def verify_same_facts(facts: Mapping[str, str], world: World) -> None:
    """Collective: raise EnvironmentNotReady where ranks found different facts: they would call the denoiser unequally
    often, and wait for one another's shards."""
    if facts and len(found := set(world.gather_texts(str(sorted(facts.items()))))) > 1:
        raise EnvironmentNotReady(
            f"ranks found different facts about the pipeline: {' and '.join(sorted(found))}",
            "use the same versions of diffusers, transformers and torch, and the same GPUs, on all machines",
        )


def start_base_checksums(
    world: World, family: ModelFamily, checkpoint: Checkpoint | None
) -> Callable[[], Mapping[str, str]]:
    """Return a function that waits for the base model's checksums. A resumed full fine-tune takes those of its
    checkpoint; a LoRA reads its frozen weights again at each start, so it computes them now."""
    if checkpoint is not None and not family.adapter and (known := checkpoint.state.get("base_checksums")):
        return lambda: known
    return Checksums(base_files(family), world).wait
