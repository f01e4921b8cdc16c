"""Trackers: the same metrics, images and settings in each, one run over all starts, and never the end of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ranks
from conftest import SMALL, Trained
from flags import last_wins
from PIL import Image

from simpletuner.settings.values.parsed import normalize_trackers
from simpletuner.training.metrics.tracker_process import Follower, WandbRun, state_file


def records_of(folder: Path) -> list:
    """Return the records that wandb has written in offline mode, run by run in the order of their start."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    records = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            records.append(Record.FromString(data))
        store._fp.close()
    return records


def histories(records: list) -> list[dict]:
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in row} for row in rows]


# Nothing listens there.
UNREACHABLE = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40, "WANDB_INIT_TIMEOUT": "3"}
OFFLINE = {"WANDB_MODE": "offline"}


@pytest.fixture
def train(starter):
    """Run `simpletuner train` with environment variables, and expect it to succeed."""

    def run(output: Path, variables: dict[str, str], *flags: str) -> Trained:
        arguments = ["train", *last_wins((f"--output_dir={output}", *SMALL, *flags))]
        started = starter.start(ranks.command_line_with, 1, variables, arguments)
        assert started.wait() == [0], started.said
        return Trained(output, started.said)

    return run


def read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_wandb_and_tensorboard_get_the_same_metrics_and_what_was_missed_later(sdxl_flags, train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output, logs = tmp_path / "run", tmp_path / "logs"
    trackers = (f"--logging_dir={logs}", "--tracker_run_name=mine", "--tracker_project_name=shapes")
    validation = ("--validation_prompt=a red circle", "--validation_num_inference_steps=1", "--eval_split=0.2")
    flags = (*sdxl_flags, *trackers, *validation, "--report_to=wandb,tensorboard", "--train_batch_size=4")
    flags = (*flags, "--notify_url=http://127.0.0.1:9/whoever-knows-this-may-post")
    run = train(output, UNREACHABLE, *flags, "--max_train_steps=2")
    assert run.said.count("warning: wandb does not take the metrics of this run: no answer") == 1, run.said
    assert "wandb has not received all of this run" in run.said
    assert run.said.count("warning: wandb") == 1 and json.loads((state_file(output, "wandb")).read_text())["sent"] == {}

    # the next start goes on in the same run, and sends what was missed
    assert "`wandb sync " in train(output, OFFLINE, *flags, "--max_train_steps=3").said
    records, state = records_of(logs), json.loads((state_file(output, "wandb")).read_text())
    [begun] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (begun.run_id, begun.display_name, begun.project) == (state["id"], "mine", "shapes")
    settings = {each.key: json.loads(each.value_json) for each in begun.config.update if each.key}
    assert settings["max_train_steps"] == 3 and settings["model_family"] == "sdxl"
    assert settings["notify_url"] == "{env:SIMPLETUNER_NOTIFY_URL}"
    assert not [path for folder in (logs, output) for path in folder.rglob("*") if b"may-post" in read(path)]
    rows = histories(records)
    assert [row["train/step"] for row in rows if "train/loss" in row] == [1, 2, 3]
    assert [row["eval/step"] for row in rows if "eval/eval_loss" in row] == [0, 2, 3]
    assert [row["validation/step"] for row in rows if "validation/step" in row] == [0, 2, 3]

    events = EventAccumulator(str(logs / "mine")).Reload()
    written = {row["step"]: row for row in train(output, OFFLINE, *flags, "--max_train_steps=3").rows if "loss" in row}
    assert {event.step: event.value for event in events.Scalars("train/loss")} == pytest.approx(
        {step: row["loss"] for step, row in written.items()}
    )
    names = {name for row in rows for name in row if name.startswith(("train/", "eval/"))}
    assert names == {name for name in events.Tags()["scalars"] if name.startswith(("train/", "eval/"))}
    assert events.Tags()["images"] == ["validation"] and "settings/text_summary" in events.Tags()["tensors"]
    assert len(histories(records_of(logs))) == len(rows), "a run that has finished sends nothing twice"


@pytest.mark.parametrize("library", ["trackio", "swanlab"])
def test_other_trackers_get_what_wandb_gets_over_all_starts(library, sdxl_flags, train, tmp_path):
    """Skipped where they are not installed: they want older versions of packages that constraints.txt has."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    output, written = tmp_path / "run", tmp_path / "written"
    here = {"TRACKIO_DIR": str(written), "SWANLAB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    validation = ("--validation_prompt=a red circle", "--validation_num_inference_steps=1", "--eval_split=0.2")
    flags = (*sdxl_flags, *validation, f"--report_to={library}", "--train_batch_size=4", f"--logging_dir={written}")
    begun = train(output, here, *flags, "--max_train_steps=2")
    first = json.loads(state_file(output, library).read_text())
    again = train(output, here, *flags, "--max_train_steps=3")
    last = json.loads(state_file(output, library).read_text())
    assert f"{library}: " in begun.said and "warning: " + library not in begun.said + again.said
    assert first["id"] == last["id"] and first["sent"] == dict.fromkeys(("train", "eval", "validation"), 2)
    assert last["sent"] == dict.fromkeys(first["sent"], 3)
    assert len([*written.rglob("media/**/*.png")]) == 3, "steps 0, 2 and 3"


def test_wandb_gets_validation_clips_as_videos(tmp_path):
    """The library's run is stood in for: it would need the process, and a run on clips, for one call."""
    import wandb
    from video_files import write_video

    class Logged(WandbRun):
        rows: ClassVar[list[dict[str, Any]]] = []

        def __init__(self) -> None:
            self.library, self.run = wandb, self

        def log(self, group: str, step: int, values: Mapping[str, Any]) -> None:
            self.rows.append({**values, "step": step})

    folder = tmp_path / "validation"
    (folder / "step-000002").mkdir(parents=True)
    write_video(folder / "step-000002" / "trained-00.mp4", frames=5)
    Image.new("RGB", (8, 8)).save(folder / "grid-000002.png")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "loss": 0.5}) + "\n")
    Follower(tmp_path, Logged(), tmp_path / "wandb.json").poll()
    [sent] = [row for row in Logged.rows if "validation" in row]
    assert isinstance(sent["validation/trained-00"], wandb.Video) and sent["step"] == 2


def test_trackers_are_named_in_any_spelling_and_others_are_refused():
    assert normalize_trackers(" WandB , tensorboard,wandb") == "wandb,tensorboard"
    assert normalize_trackers("") == normalize_trackers("None") == "none"
    for text, said in {
        "mlflow": "mlflow is not supported",
        "wandb,none": "use none, or",
        "wandbb": "use none, or",
    }.items():
        with pytest.raises(ValueError, match=said):
            normalize_trackers(text)
