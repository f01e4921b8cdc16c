"""What happens around training, without torch: starting ranks, checks, maintenance."""
