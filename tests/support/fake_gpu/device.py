"""A CUDA device of fake tensors on a build of torch without CUDA: `device.cpp`, and what torch.cuda answers.

`install` must be called before anything asks torch for CUDA, once per process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import weakref
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")


def library() -> ctypes.CDLL:
    """Compile device.cpp for this torch, unless that was done before, and load it."""
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch_folder = Path(spec.submodule_search_locations[0])
    version = (torch_folder / "version.py").read_bytes()
    digest = hashlib.sha256(SOURCE.read_bytes() + version).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(__file__).parents[3] / ".torch_extensions")
    built = folder / f"fake_gpu-{digest}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        include, libraries = torch_folder / "include", torch_folder / "lib"
        flags = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
        links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
        subprocess.run([os.environ.get("CXX", "c++"), *flags, str(SOURCE), *links, "-o", str(unfinished)], check=True)
        unfinished.replace(built)  # processes that compile at the same time do not see half a file
    loaded = ctypes.CDLL(str(built))
    loaded.take_order.restype = loaded.current_stream_id.restype = ctypes.c_int64
    return loaded


LIBRARY = library()

import torch  # noqa: E402  torch asks for its CUDA hooks once, so the library is loaded before
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

DEVICE = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=85_520_809_984, multi_processor_count=132,
    warp_size=32, gcnArchName="", is_integrated=0, L2_cache_size=50 << 20, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448, shared_memory_per_block=49152, uuid="GPU-0",
)  # fmt: skip


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, device=DEVICE, priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Event:
        event = super().__new__(cls, device=DEVICE, enable_timing=enable_timing)
        event.sleeps = blocking
        return event

    def synchronize(self) -> None:
        RUNTIME.spins += not self.sleeps
        super().synchronize()

    def elapsed_time(self, end_event: Any) -> float:
        return 1000.0


class UseStream:
    """`torch.cuda.stream`."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch._C._accelerator_getStream(0)
        if self.stream is not None:
            torch._C._accelerator_setStream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_setStream(self.before)


class Runtime:
    """What HostBuffer asks of the CUDA runtime; page-locking fails with `code`, if that is not 0."""

    def __init__(self) -> None:
        self.code = self.last_error = 0
        self.spins = 0
        """Waits for an event during which the host takes a whole core."""
        self.blocks: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.locked: Any = weakref.WeakSet()

    def address(self, tensor: torch.Tensor) -> int:
        """Return a number in place of an address, which a fake tensor does not have."""
        storage = tensor.untyped_storage()
        self.blocks[storage._cdata] = weakref.ref(storage)
        return storage._cdata

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        if self.code:
            self.last_error = self.code
        elif (storage := self.blocks[pointer]()) is not None:
            self.locked.add(storage)
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        return 0

    def launch(self) -> None:
        """Raise the last error, as the check behind each launch of a kernel does, and forget it."""
        error, self.last_error = self.last_error, 0
        if error:
            raise torch.AcceleratorError(f"CUDA error: {error}")


RUNTIME = Runtime()


def install(devices: int = 8) -> None:
    """Let torch.cuda answer as on a machine with GPUs, of which this process uses the first."""

    def current_stream(device: Any = None) -> torch.Stream:
        return torch._C._accelerator_getStream(0)

    names: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None, "init": lambda: None,
        "device_count": lambda: devices, "current_device": lambda: 0, "set_device": lambda device: None,
        "get_device_properties": lambda device=None: PROPERTIES, "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (9, 0), "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda device=None: (80 << 30, PROPERTIES.total_memory), "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0, "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0, "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None, "memory_stats": lambda device=None: defaultdict(int),
        "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
        "synchronize": lambda device=None: LIBRARY.synchronize_device(),
        "current_stream": current_stream, "default_stream": current_stream, "stream": UseStream,
        "set_stream": torch._C._accelerator_setStream, "Stream": Stream, "Event": Event, "cudart": lambda: RUNTIME,
        "is_current_stream_capturing": lambda: False, "_get_device_index": lambda *_, **__: 0,
        "_exchange_device": lambda device: 0, "_maybe_exchange_device": lambda device: 0,
    }  # fmt: skip
    for name, answer in names.items():
        setattr(torch.cuda, name, answer)
    version: Any = lambda: (2, 28, 9)  # noqa: E731
    torch.cuda.nccl.version = sys.modules["torch.cuda.nccl"].version = version
    torch.backends.cudnn.version = lambda: 92000
    torch.version.cuda = "13.0"
    FakeTensor.data_ptr = lambda tensor: RUNTIME.address(tensor)
    # Parameters are exchanged where nothing has weak references to them, but FakeTensorMode keeps one of each tensor.
    vars(torch.utils)["weakref"] = SimpleNamespace(getweakrefs=lambda tensor: [])
