"""Kill runs whose only memory is a bucket: after each kill the folder is removed, and the next start has another one.

    .venv/bin/python tests/campaigns/bucket.py --count=200 --results=bucket.jsonl     # about an hour on 2 busy cores

What is whole in the bucket must match its checksums after every kill, the newest checkpoint there must never be an
earlier one than before, and at the end the bucket must hold what that of an undisturbed run holds. In every third run
the bucket refuses some requests, too. `tests/end_to_end/test_campaigns.py` runs a sample.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from buckets_here import bucket_server  # noqa: E402
from conftest import Starter  # noqa: E402
from kills import (  # noqa: E402
    HELD_OUT,
    KEPT,
    ON_DEMAND,
    SAVED_EACH,
    VALIDATION,
    Campaign,
    Kind,
    contents,
    doing,
    fixtures,
    run_campaigns,
)
from s3_server import BUCKET, Fault, Proxy  # noqa: E402

from simpletuner.checkpoints.layout import load_checkpoint, parse_step  # noqa: E402
from simpletuner.data.config.places import mirror_place  # noqa: E402
from simpletuner.data.storage.object_storage import ObjectStorage, open_bucket  # noqa: E402
from simpletuner.system.files.checksums import file_checksum  # noqa: E402

BUCKET_KINDS = {
    "one": Kind(("--use_ema", *HELD_OUT, *ON_DEMAND), ranks=1),
    "lora": Kind(("--model_type=lora", "--lora_rank=4", *HELD_OUT, *VALIDATION), ranks=1),
    "fsdp2": Kind(("--fsdp_enable", "--use_ema", *HELD_OUT)),
}
OF_ITS_OWN = ("log.txt", "settings.json", "settings_history.jsonl", "status.json")
"""Files that differ with each start, or name the folder in the bucket."""


@dataclass
class BucketCampaign(Campaign):
    """Kills of runs that each start in an empty folder."""

    proxy: Proxy = field(default_factory=lambda: Proxy(""))
    prefix: str = ""
    whole: tuple[int, ...] = ()
    """Steps of the checkpoints that were whole in the bucket of the present run after its last kill."""

    def command(self, output: Path) -> tuple[str, ...]:
        return (*super().command(output), f"--mirror_output={self.address}")

    @property
    def address(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}"

    def kill_run(
        self, number: int, kills: int, longest: dict[str, float], wanted: dict[str, str], draw: random.Random
    ) -> list[tuple[str, str]]:
        killed = list[tuple[str, str]]()
        self.prefix, self.whole = f"{self.folder.name}/run{number}", ()
        for start in range(kills):
            output = self.folder / f"run{number}-{start}"
            refused = Fault("checkpoints/", 503, "SlowDown", times=draw.randint(1, 6))
            self.proxy.faults = [refused] if number % 3 == 2 else []
            if self.kill_ranks(output, draw.uniform(0.05, longest["group"]), "group"):
                killed.append(("group", doing(output)))
            self.proxy.faults = []
            self.look(f"run {number}, kill {start}")
            shutil.rmtree(output, ignore_errors=True)
        output = self.folder / f"run{number}-last"
        self.finish(output)
        self.compare(wanted, self.fetched(), output)
        shutil.rmtree(output, ignore_errors=True)
        return killed

    def undisturbed(self) -> dict[str, str]:
        self.prefix = f"{self.folder.name}/undisturbed"
        output = self.folder / "undisturbed"
        self.finish(output)
        assert not self.problems, self.problems
        shutil.rmtree(output)
        return self.fetched()

    def look(self, when: str) -> None:
        """Note what is whole in the bucket and is not, and a checkpoint that was there before."""
        folder, steps = self.copied(), list[int]()
        for state in sorted(folder.glob("checkpoints/checkpoint-*/state.json")):
            checkpoint = load_checkpoint(state.parent)
            steps.append(checkpoint.step)
            for name, value in checkpoint.state["checksums"].items():
                if file_checksum(state.parent / name) != value:
                    self.problems.append(f"{when}: {state.parent.name}/{name} differs from its checksum")
        newest, before = (max(each, default=-1) for each in (steps, self.whole))
        if newest < before:
            self.problems.append(f"{when}: the newest checkpoint is of step {newest}, and was of {before}")
        self.whole = tuple(steps)

    def compare(self, wanted: dict[str, str], found: dict[str, str], output: Path) -> None:
        """Note every file that differs, and any checkpoint that is not one of the newest.

        The bucket keeps those that were whole after the last kill, and gets those that the last start saves. A start
        uploads its newest checkpoint first: one that is killed then takes the others along.
        """
        ours, theirs = checkpoints_in(wanted), checkpoints_in(found)
        saved = range(SAVED_EACH, self.steps + 1, SAVED_EACH)
        steps = sorted({*self.whole, *(step for step in saved if step > max(self.whole, default=0))})[-KEPT:]
        if sorted(parse_step(Path(name)) for name in theirs) != steps:
            self.problems.append(f"{output.name}: checkpoints {sorted(theirs)}, not those of steps {steps}")
        both = ours & theirs
        kept = [{name: each[name] for name in each if checkpoints_in([name]) <= both} for each in (wanted, found)]
        super().compare(*kept, output)

    def fetched(self) -> dict[str, str]:
        """Return what stands for the content of the bucket."""
        return {name: value for name, value in contents(self.copied()).items() if name not in OF_ITS_OWN}

    def copied(self) -> Path:
        """Copy what the bucket has of a run into a folder."""
        folder, storage = self.folder / "copied", self.storage()
        shutil.rmtree(folder, ignore_errors=True)
        for name in storage.all_sizes():
            if not name.startswith("."):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(storage.read(name, 1 << 30))
        return folder

    def storage(self) -> ObjectStorage:
        return open_bucket(mirror_place(self.address))


def checkpoints_in(names: Iterable[str]) -> set[str]:
    """Return the folders of checkpoints that files are in."""
    found = (name.split("/") for name in names)
    return {parts[1] for parts in found if parts[0] == "checkpoints" and len(parts) > 2}


def main() -> None:
    with tempfile.TemporaryDirectory() as name, bucket_server(Path(name)) as (proxy, config):
        made: list[str] = []

        def campaign_of(starter: Starter, kind: str, folder: Path, seed: int) -> Campaign:
            if not made:
                made.extend(fixtures(folder.parent, starter))
            base = (f"--config={config}", *made)
            return BucketCampaign(starter, base, folder, BUCKET_KINDS[kind], seed, 16, proxy=proxy)

        run_campaigns(__doc__, BUCKET_KINDS, 200, campaign_of)


if __name__ == "__main__":
    main()
