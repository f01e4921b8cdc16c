"""What a run makes known of itself: a model card, an upload to the hub, and messages to an address."""
