"""Private API of torch, each with its reason. Seen in torch 2.9.1, 2.13.0 and 2.15.0."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

# The budget has no public name; importing its module does not import the compiler.
from torch._functorch import config as functorch_config

# The only tensors with a device, a dtype and a shape but no memory: `plan` runs whole training steps on them.
# On the meta device all operators are of one device, so CUDA's autocast and kernels could not be followed.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# Sees every operator below autograd; FlopCounterMode and torch's memory tracker are such modes.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

# The tensors among an operator's arguments, which a dispatch mode gets as lists and dicts; and among what a
# pipeline's encode_prompt returns.
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.hooks import RemovableHandle

META = torch.device("meta")

# Within a count on fake tensors, real numbers for a pipeline that reads them.
outside_modes = _disable_current_modes

# The operators below torch's functional collectives, which are private too: torch.compile traces them.
functional_collectives = torch.ops._c10d_functional

# One launch for a list of tensors in place of one per tensor, as in torch's own optimizers.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sign_ = torch._foreach_sign_


def before_other_hooks(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook that is called, once a gradient is accumulated, before those that use it up.

    The public function puts it behind them: DeepSpeed's have reduced the gradient and removed it by then.
    """
    others = {**(parameter._post_accumulate_grad_hooks or {})}
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks = parameter._post_accumulate_grad_hooks
    own = {name: each for name, each in hooks.items() if name not in others}
    hooks.clear()  # the same object, which autograd holds; it goes through it by insertion
    hooks.update({**own, **others})
    return handle


# The only product of int8 tensors that torch has, (M, K) and (K, N) to int32.
int8_matmul = torch._int_mm


def register_flash3(operators: Any) -> Any:
    """Let torch's FlashAttention 3 call these operators, and return the handle that takes it back.

    torch's own function looks for the namespace `flash_attn_3`; kernels of the hub have their own.
    """
    from torch.nn.attention import _fa3

    _fa3._FA3_CUDA_FWD, _fa3._FA3_CUDA_BWD = operators.fwd, operators.bwd
    torch._C._set_sdp_use_fa3(True)
    return _fa3._FA3Handle(_fa3._fa3_register_kernels())


def set_activation_memory_budget(share: float) -> None:
    """Set the share of activations that graphs compiled from now on keep; 1.0 is torch's default."""
    functorch_config.activation_memory_budget = share


def set_recompile_limit(variants: int) -> None:
    """Set the variants of one block's code after which torch gives up, here and in all frames together."""
    from torch._dynamo import config  # imports the compiler: 0.6 s that no other run needs

    config.recompile_limit = config.accumulated_recompile_limit = variants


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the compiler raises at a first call or a recompilation."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def chosen_attention_kernel(query: Tensor) -> int:
    # torch only tells whether a backend can be used at all.
    chosen: object = torch._fused_sdp_choice(query, query, query)
    return chosen


def equal_gradient_layouts(
    operator: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
    dispatch_key: str = "AutogradCUDA",
) -> torch.library.Library:
    """Give an attention's backward its output's gradient in the layout of the output, as long as what this
    returns lives.

    torch (2.11, aten/native/cudnn/MHA.cpp) looks up the graph that cuDNN has compiled by the strides of
    query, key and value, but compiles it for those of the gradient, too. In FLUX the gradient is a slice of
    rows of 15,360 values in the single blocks and rows of 3,072 in the double ones: the first step on an H100
    ended with an illegal memory access, and dense rows followed by a slice would give wrong gradients without
    an error. By its bytes a copy takes 20 us per sample of FLUX.
    """

    def backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, *more: Any, **named: Any):
        strides = zip(gradient.shape, gradient.stride(), output.stride(), strict=True)
        if any(size > 1 and one != other for size, one, other in strides):
            gradient = torch.empty_like(output).copy_(gradient)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(gradient, query, key, value, output, *more, **named)

    library = torch.library.Library("aten", "IMPL")
    library.impl(operator, backward, dispatch_key)
    return library


# Below a TorchFunctionMode, such as CUDA's casts, each question about a tensor would go through it.
outside_function_modes = torch._C.DisableTorchFunction


def new_fake(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """Return a fake tensor without an operator of its mode, which would take ten times as long."""
    with torch._C._DisableTorchDispatch():
        elements = torch.empty_strided(shape, stride, dtype=dtype, device=META)
    return FakeTensor(mode, elements, device)


def view_of_fake(
    tensor: FakeTensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int
) -> FakeTensor:
    """Return a fake tensor in the storage of another one, to which autograd sees no relation."""
    with torch._C._DisableTorchDispatch():
        elements = torch.empty(0, dtype=dtype, device=META).set_(tensor.untyped_storage(), offset, shape, stride)
    return FakeTensor(tensor.fake_mode, elements, tensor.fake_device)


def device_of(tensor: FakeTensor) -> torch.device:
    # Within a kernel of its mode, a fake tensor answers meta.
    return META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def trace_operators(function: Any, given: Iterable[Tensor]) -> object:
    """Return a graph of the operators of a function of tensors, none of which writes into a tensor.

    torch.fx.symbolic_trace gives a function proxies for tensors, which pipelines do not take; torch.export
    wants a module. Raises RuntimeError where the function reads a value.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy

    return make_fx(torch.func.functionalize(function))(*given)


def written_by(operator: object, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes into, by its schema."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | dict(kwargs)
    for each in schema.arguments:
        if each.alias_info is not None and each.alias_info.is_write:
            yield from (leaf for leaf in tree_iter(given.get(each.name)) if isinstance(leaf, Tensor))


def run_backward(loss: Tensor) -> None:
    """Do as `loss.backward()`, but within a TorchFunctionMode, which then sees the recomputation, too."""
    engine: object = torch.autograd.graph._engine_run_backward
    engine((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def abort_communicators() -> None:
    # destroy_process_group waits for what was begun.
    dist.distributed_c10d._abort_process_group()


def set_cpu_timeout(timeout: timedelta) -> None:
    # init_process_group has one timeout for all.
    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


def flight_records() -> bytes:
    """Return the flight recorder's last collectives, pickled; empty where there is none. There is no public
    way to ask for them."""
    compiled: Any = torch._C
    # NCCL has a recorder of its own, which builds without CUDA lack.
    name = "_dump_nccl_trace" if torch.cuda.is_initialized() else "_dump_fr_trace"
    dump = getattr(compiled._distributed_c10d, name, None)
    return dump() if dump is not None and dist.is_initialized() else b""


def operator_build_folder(name: str) -> str:
    """Folder in which torch compiles a C++ extension, where a killed compilation leaves its lock file."""
    from torch.utils import cpp_extension  # 0.1 s

    return cpp_extension._get_build_directory(name, verbose=False)


COMPILER, KERNELS = "torch._dynamo", "torch._inductor"
# Names where a tensor comes from; a fake one of a real one is given such a name.
SOURCE = f"{COMPILER}.source"
ALONE = [f"{COMPILER}.config", f"{COMPILER}._trace_wrapped_higher_order_op"]
"""Modules of it that do without the others. Recomputation reads the first, transformers imports the second."""


class ModuleStub(ModuleType):
    """Stand-in for a module of the compiler, with what is asked of it where nothing is compiled. Asked for
    more, it loads the compiler, which takes its place."""

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(answers)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # inspect asks all modules for such
            raise AttributeError(f"module {self.__name__} has no {name}")
        load_compiler()
        return getattr(import_module(self.__name__), name)


class UnnamedSource:
    """Stand-in for where a tensor comes from, which only a compiler asks for."""

    def __init__(self, *_: object) -> None: ...


class LoadsCompiler:
    """Finder that loads the compiler in place of its stand-in before another module of it is imported, and
    before torch._inductor, whose modules import one another in an order that only works after it."""

    def find_spec(self, name: str, path: object = None, _: object = None) -> ModuleSpec | None:
        if name in ALONE:
            return PathFinder.find_spec(name, [f"{folder}/_dynamo" for folder in torch.__path__])
        if name != KERNELS and not name.startswith(f"{COMPILER}."):
            return None
        load_compiler()
        loaded = sys.modules.get(name)
        if loaded is None:
            return PathFinder.find_spec(name, sys.modules[name.rpartition(".")[0]].__path__)
        # importlib takes the spec of a module that is there by now, and would run its code again by that.
        spec = loaded.__spec__ = ModuleSpec(name, cast(Any, AlreadyLoaded(loaded)))
        return spec


class AlreadyLoaded:
    """Loader of a module that was imported while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def load_compiler() -> None:
    if not isinstance(sys.modules.get(COMPILER), ModuleStub):
        return
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, LoadsCompiler)]
    for name in (COMPILER, SOURCE):
        del sys.modules[name]
    compiler = import_module(COMPILER)
    for name in ALONE:  # one that was imported before is no attribute of it yet
        setattr(compiler, name.rpartition(".")[2], import_module(name))


def leave_out_compiler() -> None:
    """Keep torch, diffusers and transformers from importing torch._dynamo, and sympy with it, in a process that
    compiles nothing: 0.7 of 3.5 CPU s before the first step, and torch's decorators return what they decorate."""
    if COMPILER in sys.modules or KERNELS in sys.modules:
        return

    def same(decorated: object = None, *_: Any, **__: object) -> Any:
        return same if decorated is None else decorated

    answers: dict[str, object] = dict.fromkeys(
        ("allow_in_graph", "assume_constant_result", "disable", "graph_break"), same
    )
    # distributed_c10d.py asks for the first of each new group, DDP for the second, diffusers for the last.
    answers["trace_rules"] = ModuleStub(f"{COMPILER}.trace_rules", {"clear_lru_cache": same})
    answers["utils"] = ModuleStub(f"{COMPILER}.utils", {"get_optimize_ddp_mode": lambda: "ddp_optimizer"})
    answers["eval_frame"] = ModuleStub(f"{COMPILER}.eval_frame", {"OptimizedModule": type("OptimizedModule", (), {})})
    names = ("ConstantSource", "AttrSource", "RandomValueSource")
    answers["source"] = sys.modules[SOURCE] = ModuleStub(SOURCE, dict.fromkeys(names, UnnamedSource))
    answers |= {"__spec__": find_spec(COMPILER), "__path__": []}
    sys.modules[COMPILER] = torch._dynamo = ModuleStub(COMPILER, answers)
    sys.meta_path.insert(0, LoadsCompiler())
    import_module(ALONE[0])
