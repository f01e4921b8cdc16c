"""The model card, the upload to the hub, and messages to an address."""
