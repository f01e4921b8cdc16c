"""The base class of families with its parts: objectives, VAE, text encoding, LoRA."""
