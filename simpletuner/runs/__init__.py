"""The content of a run's folder: state, listing, log, metrics, report, comparison, facts. No torch, no server."""
