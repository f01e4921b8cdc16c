"""Small samples of the campaigns in `tests/campaigns/`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from conftest import base

sys.path.insert(0, str(Path(__file__).parent / "campaigns"))

from damage import Damage
from fuzz import Fuzz
from kills import Campaign
from settings_files import KINDS
from tables import SUFFIXES, TableFuzz


@pytest.mark.long
def test_eight_kills_at_random_moments_leave_what_an_undisturbed_run_leaves(starter, sdxl, shapes, tmp_path):
    campaign = Campaign(starter, base("sdxl", sdxl, shapes), tmp_path, random.Random(90))
    campaign.run(8)
    assert campaign.problems == []
    assert sum(campaign.killed.values()) == 8 and len(campaign.killed) > 1


@pytest.mark.long
def test_thirty_damaged_files_are_answered_rightly_or_by_a_sentence(starter, sdxl, shapes, tmp_path):
    damage = Damage(starter, tmp_path, random.Random(12))
    damage.run(30, sdxl, shapes)
    assert damage.problems == []
    assert sum(damage.answers.values()) == 30


def test_mutated_settings_files_are_answered_in_sentences_with_a_place_and_exported_unchanged():
    fuzz = Fuzz(seed=13)
    fuzz.run(range(200))
    assert fuzz.problems == []
    assert {kind for kind, _ in fuzz.codes} == set(KINDS)
    assert sum(count for (_, code), count in fuzz.codes.items() if code == 0) > 40


def test_damaged_tables_give_samples_with_captions_or_a_sentence():
    fuzz = TableFuzz(seed=14)
    fuzz.run(range(60))
    assert fuzz.problems == []
    assert {kind for kind, code in fuzz.codes if code == 0} == set(SUFFIXES)
    assert sum(count for (_, code), count in fuzz.codes.items() if code == 4) > 10
