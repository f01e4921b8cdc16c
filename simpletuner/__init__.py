"""Fine-tune whole diffusion models on many GPUs and machines."""

__version__ = "0.2.0.dev0"
