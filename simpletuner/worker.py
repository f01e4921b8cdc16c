"""A rank from joining the others to the exported pipeline. Builds every object of a run and connects them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from simpletuner.checkpoints.export import base_files, check_export
from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.checkpoints.verification import CheckpointDamaged, Checksums, Verification
from simpletuner.errors import EnvironmentNotReady, explain_system_errors
from simpletuner.launch.launcher_connection import LauncherConnection, check_of_machine, connect_to_launcher
from simpletuner.launch.node_info import check_local_ranks, node_info
from simpletuner.launch.rendezvous import Group, verify_same_config
from simpletuner.launch.stall_detection import prefix_in, record_into, write_records
from simpletuner.launch.started_tasks import stop_advice
from simpletuner.launch.store import MessageStore, TorchStore, message_signer
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import silence_libraries
from simpletuner.models.opening.completeness import note_checked
from simpletuner.models.opening.loading import leave_out_unused, load_family
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.gpu import explain_out_of_memory, set_float32_precision
from simpletuner.parallel.mesh import build_mesh
from simpletuner.parallel.model.attention_backend import attention_by
from simpletuner.parallel.parallelize import compiler_explained
from simpletuner.parallel.world import STALL_SECONDS, World, joined_world, report_first_failure
from simpletuner.preparation.plan import Plan, samples_by_shape
from simpletuner.preparation.prepare import Prepared, fit_to_model, folders_of, plan_data, prepare
from simpletuner.preparation.same_data import verify_same_folders
from simpletuner.preparation.sampled_prompts import SampledPrompt
from simpletuner.report import Report
from simpletuner.runs.data_listing import record_data_of
from simpletuner.runs.facts import Rows, RunFacts, run_facts
from simpletuner.runs.settings_record import SETTINGS, read_settings, record_settings, report_changes
from simpletuner.session import Session
from simpletuner.settings import Loaded
from simpletuner.settings.declared.sections import Launch
from simpletuner.system.files.lease_folder import shared_folders
from simpletuner.system.importing import no_collection
from simpletuner.system.numbers import count_noun
from simpletuner.system.processes.run_status import Activity, RunState, StatusWriter
from simpletuner.system.processes.signals import StopRequest, handle_stop_signals, stop_announcement
from simpletuner.training.auto import Resolved, resolve_auto
from simpletuner.training.build import build_trainer, check_engine, open_engine, open_sample_losses, open_state
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.hooks import RunHook
from simpletuner.training.metrics.metrics import Tracker, open_metrics
from simpletuner.training.metrics.speed import EXPORTING
from simpletuner.training.run_folder.other_project import commit_of_run, refuse_other_base
from simpletuner.training.run_folder.output_dir import (
    accept_start,
    check_room,
    export,
    export_single_files,
    exported_steps,
    has_stopped_early,
    on_first_rank,
    open_output_dir,
    pipelines_of,
    restore_from_bucket,
    unless_refused,
)
from simpletuner.training.run_folder.resuming import (
    ResumePoint,
    check_fits,
    checkpoint_to_resume,
    refuse_other_order,
    resume_point,
    set_later_aside,
    warn_of_changed_base,
)
from simpletuner.training.run_folder.run_tables import describe_prompts, describe_run, print_datasets, print_result


def run_rank(loaded: Loaded) -> None:
    """Run one rank. Collective with the other ranks of the run."""
    launch, activity, folder = loaded.settings.launch, Activity(), loaded.settings.training.output_dir
    record_into(folder, os.environ)
    with (
        # Left in reverse: an error becomes a sentence, then the launcher and the other ranks get it, and only
        # then are the connections to both closed.
        handle_stop_signals(lambda: activity.unsaved) as stop,
        connect_to_launcher(os.environ, activity, stop, launch.stall_timeout) as launcher,
        preemption_watch(launch, launcher, stop),
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
        hooks = open_output_dir(session, stack)
        training = loaded.settings.training
        set_float32_precision(training.allow_tf32)
        dtype, backend = compute_dtype(loaded.settings), training.attention_backend
        stack.enter_context(attention_by(backend, world.device, dtype, training.attention_kernel))
        for hook in reversed(hooks):
            stack.enter_context(hook)
        with explain_out_of_memory(loaded.settings, world.device), unless_refused(session):
            run(session, hooks)


def preemption_watch(launch: Launch, launcher: LauncherConnection, stop: StopRequest) -> AbstractContextManager[None]:
    """Watch for notices of preemption, where there is a check and no launcher that makes it."""
    check = "" if launcher.connection else check_of_machine(launch, os.environ)
    if not check:
        return nullcontext()
    from simpletuner.launch.preemption import watch_preemption

    return watch_preemption(check, stop)


@contextmanager
def recorded_status(stop: StopRequest, activity: Activity) -> Iterator[StatusWriter]:
    """Record how the run goes in `status.json`, from the moment at which its folder is known."""
    status = StatusWriter()
    stop.save_seconds = lambda: activity.save_seconds
    stop.when_asked = lambda: status.stopping(stop_announcement(activity.unsaved, activity.save_seconds))
    stop.before_exit = partial(status.end, RunState.STOPPED)
    with status.recording():
        yield status


def run(session: Session, hooks: Sequence[RunHook]) -> None:
    """Train from the newest checkpoint that is not damaged, or from the base model; then export."""
    silence_libraries()
    with no_collection():  # the libraries of the others are imported here
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
            restore_from_bucket(session, hooks, damaged)
            checkpoint = checkpoint_to_resume(session, damaged)
            shown = resume(session, hooks, checkpoint)
            break
        except CheckpointDamaged as error:  # known before the engine is built; encodings are in the caches
            damaged[error.folder] = error.message
            session = session.restarted()
    export_single_files(session)
    print_result(session.settings, shown, session.report)


def resume(session: Session, hooks: Sequence[RunHook], checkpoint: Checkpoint | None) -> Rows:
    """Plan the data, train the steps that are left, if any, and return the last table's rows on prompts.

    Raises CheckpointDamaged on all ranks.
    """
    settings, world = session.settings, session.world
    refuse_other_order(checkpoint)
    changes = report_changes(session, checkpoint)
    # Begun here, awaited in `prepare_data`: reading the files overlaps with scanning data and base model.
    verification = Verification(checkpoint, world) if checkpoint else None
    plan = plan_data(session, accept=partial(accept_start, session))
    planned = Run(session, hooks, plan, checkpoint, verification)
    done = exported_steps(settings, world)
    has_ended = done >= planned.max_steps
    if not has_ended and not has_stopped_early(settings, world, done):
        print_datasets(plan, session.report)
        return train(planned)
    before = read_settings(settings.training.output_dir / SETTINGS) or {}
    on_first_rank(session, partial(refuse_other_base, settings, before, has_finished=True))
    # A run that was killed after its export, and before it said so, has left the status of a step before.
    session.status.train(done, planned.max_steps if has_ended else done)
    steps = count_noun(done, "step") + ", with the settings of then" * bool(changes)
    more = (
        "raise max_train_steps or num_train_epochs" if has_ended else "raise early_stopping_patience, or set it to 0,"
    )
    session.report.say(f"finished already, after {steps}; {more} to go on")
    for hook in hooks:
        hook.skipped(done)
    return []


@dataclass(frozen=True)
class Run:
    """A run with its data: what the stages of a start take, and hand on."""

    session: Session
    hooks: Sequence[RunHook]
    """Empty on ranks above 0."""
    plan: Plan
    checkpoint: Checkpoint | None
    verification: Verification | None
    """Reads the checkpoint's files meanwhile."""

    @cached_property
    def point(self) -> ResumePoint:
        return resume_point(self.session.settings, self.plan, self.checkpoint)

    @property
    def max_steps(self) -> int:
        return self.point[0].max_steps

    def planned(self, plan: Plan) -> Run:
        """The same run with what became of its data: where it starts is counted again if that has changed."""
        return self if plan is self.plan else replace(self, plan=plan)


def train(run: Run) -> Rows:
    """Encode the data, build the engine, train, export; return what the last table says of the prompts."""
    session, caches = run.session, folders_of(run.session.settings, run.plan)
    world, stop = session.world, session.stop.check
    # `cache clear` must not remove what this run reads.
    with shared_folders(caches, stop, session.report.say), ExitStack() as writers:
        verify_same_folders([("the cache", folder) for folder in caches], world, stop, "caches")
        world.activity.begin("reading the base model", watched=False)
        with no_collection():  # the classes of the model are imported here
            commit = commit_of_run(session.settings, run.checkpoint) if world.is_first else ""
            family = load_family(session.settings, world, stop, skips_checked=True, commit=commit)
            _ = family.meta_denoiser
        run, sampled = prove_family(run, family)
        wait_for_base_checksums = start_base_checksums(world, family, run.checkpoint)
        check_start(run, family)
        run = make_class_images(run, family)
        prepared = prepare(session, run.plan, family, writers, sampled)
        if run.verification is not None:
            world.activity.begin("verifying the checkpoint")
            run.verification.wait()
        run = run.planned(prepared.plan)
        world.activity.begin("loading weights", watched=False)
        resolved = resolve_auto(session, family, run.plan, run.max_steps)
        with closing(open_engine(resolved.session.settings, session.mesh, family, run.checkpoint)) as engine:
            state = open_state(session, family, engine, run.plan, run.checkpoint, run.point)
            state.base_checksums = wait_for_base_checksums()
            facts = record_start(run, resolved, family, state)
            take_steps(run, family, prepared, state, facts)
        return describe_prompts(sampled, run.plan)


def prove_family(run: Run, family: ModelFamily) -> tuple[Run, list[SampledPrompt]]:
    """Call the pipeline as validation will, and return the run with that, and the prompts it samples.

    What can be known to be wrong is found before anything is encoded, which may take hours.
    """
    session = run.session
    session.world.activity.begin("proving the pipeline", watched=False)
    plan, sampled = fit_to_model(session, run.plan, family)
    family.prove(sorted(samples_by_shape(plan)), session.world.device, sorted({each.shape for each in sampled}))
    verify_same_facts(family.facts(), session.world)
    session.world.activity.begin("reading the base model", watched=False)
    check_export(family, pipelines_of(session.settings))
    return run.planned(plan), sampled


def check_start(run: Run, family: ModelFamily) -> None:
    """Raise for an impossible engine, a disk that is too small, or another model's checkpoint. Collective."""
    session, checkpoint = run.session, run.checkpoint
    check_engine(session, family)
    start = int(checkpoint.state["step"]) if checkpoint is not None else 0
    on_first_rank(session, lambda: check_room(session, run.plan, family, start, run.max_steps))
    if checkpoint is not None:
        check_fits(checkpoint, family, session.world, run.verification)


def make_class_images(run: Run, family: ModelFamily) -> Run:
    """Return the run with the images that its base model makes, once they are made. Collective."""
    if not any(dataset.prior_images for dataset in run.plan.datasets):
        return run
    from simpletuner.training.validation.class_images import with_class_images

    return run.planned(with_class_images(run.session, run.plan, family))


def record_start(run: Run, resolved: Resolved, family: ModelFamily, state: TrainingState) -> RunFacts:
    """Print and write down what is about to run, and return it. Later checkpoints are set aside."""
    session = run.session
    if run.checkpoint is not None:
        warn_of_changed_base(session.report, run.checkpoint, state, family.facts())
    # Only now that the checkpoint is read: a start that fails before leaves all of them in their places.
    set_later_aside(session, state.step)
    rows = describe_run(resolved, family, state, run.plan)
    session.report.table("simpletuner train", rows)
    listing = record_data_of(session, run.plan)
    key = listing.key if listing is not None else ""
    record_settings(session, state.step, family.facts(), family.images_of_sample, key)
    if session.world.is_first:
        note_checked(family)
    return run_facts(session.loaded, rows, run.plan, listing.digest if listing is not None else "")


def take_steps(run: Run, family: ModelFamily, prepared: Prepared, state: TrainingState, facts: RunFacts) -> None:
    """Train, and export what was trained. Collective."""
    session, hooks = run.session, run.hooks

    def open_trackers(step: int) -> list[Tracker]:
        return [tracker for hook in hooks for tracker in hook.trackers(step)]

    with ExitStack() as stack:
        for hook in hooks:
            hook.opened(facts, state.schedule.max_steps, stack)
        with (
            open_metrics(session, state.step, open_trackers) as metrics,
            open_sample_losses(session, state.step, prepared.plan) as sample_losses,
            compiler_explained(),
        ):
            trainer = build_trainer(session, family, prepared, state, metrics, hooks, sample_losses)
            for hook in hooks:
                hook.started(state.step, trainer.durations)
            trainer.train()
        with trainer.durations.timed(EXPORTING):
            from simpletuner.training.publishing.model_card import write_card  # which nothing needs before

            export(session, family, state, trainer.step, partial(write_card, session.settings, family, facts))
        trainer.durations.write()


def verify_same_facts(facts: Mapping[str, str], world: World) -> None:
    """Collective: raise EnvironmentNotReady where ranks found different facts: they would call the denoiser
    unequally often, and wait for one another's shards."""
    if facts and len(found := set(world.gather_texts(str(sorted(facts.items()))))) > 1:
        raise EnvironmentNotReady(
            f"ranks found different facts about the pipeline: {' and '.join(sorted(found))}",
            "use the same versions of diffusers, transformers and torch, and the same GPUs, on all machines",
        )


def start_base_checksums(
    world: World, family: ModelFamily, checkpoint: Checkpoint | None
) -> Callable[[], Mapping[str, str]]:
    """Return a function that waits for the base model's checksums. A resumed full fine-tune takes those of
    its checkpoint; a LoRA reads its frozen weights again at each start, so it computes them now."""
    if checkpoint is not None and not family.adapter and (known := checkpoint.state.get("base_checksums")):
        return lambda: known
    return Checksums(base_files(family), world).wait
