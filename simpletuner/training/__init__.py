"""Objectives, optimizers, EMA, one step, validation, the loop."""
