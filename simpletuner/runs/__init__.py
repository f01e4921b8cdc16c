"""The content of a run's folder: state, listing, log, metrics, report, facts. No torch, no server."""
