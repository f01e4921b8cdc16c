from __future__ import annotations

import pytest

from simpletuner.settings.declared.sections import Compile, Lora, Parallel, Settings
from simpletuner.training.auto import Graphs, choose_backend

ENOUGH = 10_000
AUTO = Settings()


@pytest.mark.parametrize(
    ("settings", "graphs", "steps", "missing", "backend", "reason"),
    [
        (AUTO, Graphs(1, 2), ENOUGH, "", "inductor", ""),
        (AUTO, Graphs(20, 2), 7200, "", "inductor", ""),
        (AUTO, Graphs(20, 2), 7199, "", "no", "about 30 min in all, more than 7,199 steps save"),
        (AUTO, Graphs(3 * 512, 2, is_limit=True), ENOUGH, "", "no", "up to 1,536 shapes of inputs"),
        (AUTO, Graphs(1, 2), ENOUGH, "triton", "no", "triton is missing"),
        (Settings(parallel=Parallel(zero_stage=3)), Graphs(1, 2), ENOUGH, "", "no", "zero_stage = 3"),
        (Settings(lora=Lora(base_model_precision="int8")), Graphs(1, 2), ENOUGH, "", "inductor", ""),
    ],
)
def test_auto_compiles_where_the_steps_outweigh_the_compiler(settings, graphs, steps, missing, backend, reason):
    chosen, why = choose_backend(settings, graphs, steps, missing)
    assert chosen == backend and reason in why and bool(why) == bool(reason)


def test_what_is_compiled_is_counted():
    assert str(Graphs(7, 2)) == "7 shapes of inputs: each compiles 2 kinds of blocks once, about 10 min in all"
    assert str(Graphs(1, 1)) == "1 shape of inputs: each compiles 1 kind of blocks once, about 1 min in all"
    assert Compile().dynamo_backend == "auto" and not Compile().is_on
