"""Imported first by the server that forks cases: what else it imports would print what torchao says of itself."""

from simpletuner.run_log import silence_torchao

silence_torchao()
