from __future__ import annotations

import logging_ranks


def test_a_step_is_logged_without_waiting_for_ranks_that_are_late(run_on, tmp_path):
    """The mean over the ranks is taken while the next step begins. A rank that waited for it would never go on here."""
    found = run_on(logging_ranks.log_beside_a_late_rank, 2, str(tmp_path))
    assert [(row["step"], row["loss"], row["grad_norm"]) for row in found["rows"]] == [
        *((1, 1.5, 0.5), (2, 2.5, 0.5), (3, 3.5, 0.5))
    ]
    seconds = [row["seconds"] for row in found["rows"]]
    assert sum(seconds) <= found["took"], "what one step has waited is no part of another"
    assert found["stops"] is True, "one rank is enough"
    assert seconds[2] > logging_ranks.LATE / 2, "the third waited for the mean of the first"
