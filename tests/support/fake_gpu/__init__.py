"""Training steps on a CUDA device that computes nothing, in one process without a GPU.

Import it before torch, which asks for its CUDA hooks once.
"""

import fake_gpu.device  # noqa: F401
