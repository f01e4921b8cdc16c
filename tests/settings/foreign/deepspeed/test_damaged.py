"""Five hundred damaged configurations: each is accepted or answered with sentences, none ends in a traceback."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings import load, settings_as_json
from simpletuner.settings.foreign.deepspeed_config import deepspeed_config
from simpletuner.settings.foreign.deepspeed_keys import RULES, flag, text, texts
from simpletuner.settings.foreign.key_table import Keeps, put

SAMPLES = sorted(Path(__file__).with_name("samples").glob("*.json"))
NOWHERE = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2.5, 1e300, -0.0, 10**30, "", "auto", "none", "cpu", "nvme", "true", "5e8"),
    *([], {}, [None], [1, [2]], {"enabled": True}, {"": {}}, {"type": []}, {"stage": {}}, "é\n", [{}], "AdamW"),
)
COUNT = 500
EXAMPLES = {flag: True, text: "a", texts: ["a", "b"]}


def with_every_key() -> dict[str, Any]:
    """Return a configuration that has every key that is kept for DeepSpeed."""
    config: dict[str, Any] = {}
    for path, rule in RULES.items():
        if isinstance(rule, Keeps):
            put(config, path, EXAMPLES.get(rule.read, 4))
    for path in ("communication_data_type", "data_types.grad_accum_dtype"):
        put(config, path, "fp32")
    config["zero_optimization"] |= {"stage": 3}
    return config | {"train_batch_size": 8}


def inner_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container and key in a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from inner_places(value[key])


def damaged(config: Any, chance: random.Random) -> Any:
    """Return a configuration after one to three random accidents."""
    config = copy.deepcopy(config)
    for _ in range(chance.randint(1, 3)):
        places = list(inner_places(config)) or [(config, "zero_optimization")]
        container, key = chance.choice(places)
        other_container, other = chance.choice(places)
        accident = chance.randrange(4)
        if accident == 0:
            container[key] = copy.deepcopy(chance.choice(JUNK))
        elif accident == 1 and isinstance(container, dict) and key in container:
            container[f"{key}"[1:] or "x"] = container.pop(key)
        elif accident == 2 and isinstance(container, dict):
            container[key] = copy.deepcopy(other_container[other]) if other in keys_of(other_container) else None
        elif key in keys_of(container):
            del container[key]
    return config


def keys_of(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def outcome(config: Any) -> str:
    """Return whether a configuration is accepted, and what it becomes can be used and read again; or sentences."""
    flags = {"deepspeed_config": config, "num_processes": 2}
    try:
        loaded = load(flags, complete=False, environment=NOWHERE)
    except SettingsError as error:
        return error.message
    again = load(settings_as_json(loaded), complete=False, environment=NOWHERE)
    assert again.settings == loaded.settings
    if loaded.settings.parallel.zero_stage:
        whole = deepspeed_config(loaded.settings, 2)
        assert load({"deepspeed_config": whole, "num_processes": 2}, complete=False, environment=NOWHERE)
    return "accepted"


def test_no_damage_ends_in_a_traceback():
    chance = random.Random(0)
    configs = [json.loads(path.read_text()) for path in SAMPLES]
    configs += [with_every_key()] * len(configs)
    assert outcome(configs[-1]) == "accepted"
    outcomes = [outcome(damaged(chance.choice(configs), chance)) for _ in range(COUNT)]
    accepted = outcomes.count("accepted")
    assert 50 < accepted < COUNT - 50, "the damage is neither too small nor too large to say something"
    assert all(sentence.strip() for text in outcomes for sentence in text.split("\n"))
