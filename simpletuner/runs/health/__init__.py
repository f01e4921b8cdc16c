"""Judgements on a run from its metrics: the best step, and alarms."""
