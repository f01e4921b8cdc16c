"""Small samples of the campaigns in `tests/campaigns/`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))

from bucket import BUCKET_KINDS, BucketCampaign
from buckets_here import bucket_server
from combinations import base_flags, drawn, fault_of
from conditions import Conditions
from damage import FAMILIES, SCENES, Damage
from fuzz import Fuzz
from kills import KINDS as RUNS
from kills import Campaign
from learning import learn
from leases import run_trials
from mutants import ROOT, read_mutants
from page_files import page_with_files
from real_mounts import or_skipped
from recipes import train
from settings_files import KINDS
from tables import SUFFIXES, TableFuzz
from video_files import write_films


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lora", "resumes"])
def test_kills_at_random_moments_leave_what_an_undisturbed_run_leaves(kind, sdxl_uncached, starter, tmp_path):
    """Of warm ranks: launchers and ranks that import torch first cost six times as much; `test_ending.py` kills either.

    That each layout of state is what it was after a kill is what `test_state_layouts.py` compares bit for bit, shards
    `test_resuming.py` after kills at seven moments, and clips `test_videos.py`.
    """
    victims = {"stop": 0.7, "group": 0.3} if kind == "resumes" else {"group": 1.0}
    campaign = Campaign(starter, sdxl_uncached, tmp_path, RUNS[kind], seed=4, steps=4, victims=victims)
    campaign.run(kills := max(2, RUNS[kind].least))
    assert campaign.problems == [] and campaign.killed.total() == kills


@pytest.mark.long
def test_runs_on_poor_machines_say_what_is_missing_and_go_on_where_they_are(sdxl_uncached, starter, tmpfs, tmp_path):
    """In float32: a CPU without instructions for bf16 (AVX2) takes seven times as long for a convolution in it."""
    tmpfs("size=1m")  # skips where nothing can be mounted
    kind = replace(RUNS["one"], flags=(*RUNS["one"].flags, "--mixed_precision=no"))
    trial = Conditions(Campaign(starter, sdxl_uncached, tmp_path, kind, steps=2))
    for condition in ("full disk", "no inodes", "no shared memory", "locked home"):
        trial.run(condition, seed=1)
    assert trial.problems == [] and trial.answers.total() == 4


@pytest.mark.long
def test_runs_that_a_bucket_alone_remembers_lose_nothing_by_kills(sdxl_uncached, starter, tmp_path):
    with bucket_server(tmp_path) as (proxy, config):
        base = (f"--config={config}", *sdxl_uncached)
        campaign = BucketCampaign(starter, base, tmp_path, BUCKET_KINDS["one"], seed=4, steps=4, proxy=proxy)
        campaign.run(2)
    assert campaign.problems == [] and campaign.killed.total() == 2


@pytest.mark.parametrize(("ground", "numbers"), [("disk", range(2)), ("bindfs", range(5, 7))])
def test_of_two_writers_on_two_machines_one_writes_and_the_other_is_told(ground, numbers, tmp_path):
    with or_skipped():
        kinds, problems = run_trials(ground, numbers, seed=5, folder=tmp_path)
    assert problems == []
    assert [*kinds] == (["refused", "stopped"] if ground == "disk" else ["clocks", "cut"])


# The files of `int8` are those of `lora`, and of `pairs` those of `pairs by auto`; clips are damaged in `clips`.
SHOWN_BY_OTHERS = ("int8", "pairs", "first frames by auto", "sound")


@pytest.mark.long
@pytest.mark.parametrize("scene", [each for each in SCENES if each not in SHOWN_BY_OTHERS])
def test_damaged_files_are_answered_rightly_or_by_a_sentence(scene, starter, shapes, pipelines, tmp_path):
    damage, undisturbed = Damage(starter, tmp_path), 2 if scene == "whole" else 1
    if scene == "clips":
        damage.prepare(scene, pipelines("wan"), write_films(tmp_path / "films", videos=6, folders=6), undisturbed)
    else:
        damage.prepare(scene, pipelines(FAMILIES.get(scene, "sdxl")), shapes, undisturbed)
    damage.run(range(3))
    assert damage.problems == [] and damage.answers.total() == 3


def test_damaged_files_of_the_page_are_answered_in_sentences_and_what_was_typed_is_kept(tmp_path):
    with page_with_files(tmp_path) as files:
        assert [row["problems"] for row in files.run(range(8))] == [[]] * 8


def test_mutants_change_a_text_that_stands_in_its_file_once_and_name_tests_that_are_there():
    mutants = read_mutants()
    assert len({each.name for each in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.applied(ROOT) != (ROOT / "simpletuner" / mutant.file).read_text(), mutant.name
        named = [word for word in mutant.tests.split() if word.startswith("tests/")]
        assert named and all((ROOT / word).is_file() for word in named), mutant.name


def test_mutated_settings_files_are_answered_in_sentences_with_a_place_and_exported_unchanged():
    fuzz = Fuzz(seed=13)
    fuzz.run(range(100))
    assert fuzz.problems == []
    assert {kind for kind, _ in fuzz.codes} == set(KINDS)
    assert sum(count for (_, code), count in fuzz.codes.items() if code == 0) > 15  # files of the original end with 2


def test_damaged_tables_give_samples_with_captions_or_a_sentence():
    fuzz = TableFuzz(seed=14)
    fuzz.run(range(60))
    assert fuzz.problems == []
    assert {kind for kind, code in fuzz.codes if code == 0} == set(SUFFIXES)
    assert sum(count for (_, code), count in fuzz.codes.items() if code == 4) > 10


def test_a_pipeline_without_a_class_learns_its_captions(tmp_path):
    learned = learn("HunyuanVideoPipeline", tmp_path / "base", steps=50)
    assert learned.last_loss < 0.7 * learned.first_loss
    assert learned.own < 0.8 * learned.other and learned.own < 0.8 * learned.before


@pytest.mark.long
def test_a_recipe_trains_in_miniature_with_all_of_its_values(tmp_path):
    assert train("sd15-subject", tmp_path) == []


def test_a_combination_of_settings_trains_the_same_in_halves(pipelines, few_shapes, starter, tmp_path):
    (family, *flags), world = drawn(17, seed=5)
    base = tmp_path / family
    base.symlink_to(pipelines(family))  # caches are made beside it
    assert fault_of(starter, tmp_path, [*base_flags(base, few_shapes), *flags], world) == ("", "trained")
