"""Feature detection: the only file that asks whether a function beyond PyTorch's public, stable API exists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

_ASSUMED: set[str] = set()


@contextmanager
def assumed(device_kind: str) -> Iterator[None]:
    """Within it every aten function that exists counts as having a kernel for this kind of device: a CPU build can then be asked
    what a GPU build supports."""
    added = {device_kind} - _ASSUMED
    _ASSUMED.update(added)
    try:
        yield
    finally:
        _ASSUMED.difference_update(added)


@lru_cache(maxsize=128)
def aten(name: str, overload: str = "default") -> Any:
    """`torch.ops.aten.NAME.OVERLOAD`, or None where this PyTorch does not have it."""
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, overload, None) if packet is not None else None


def has_kernel(name: str, device_kind: str, overload: str = "default") -> bool:
    """Whether the aten function has a kernel of its own for `cpu` or `cuda`."""
    if device_kind in _ASSUMED:
        return aten(name, overload) is not None
    return _has_kernel(name, device_kind, overload)


@lru_cache(maxsize=128)
def _has_kernel(name: str, device_kind: str, overload: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA", "hip": "CUDA"}.get(device_kind)
    if aten(name, overload) is None or key is None:
        return False
    full = f"aten::{name}" + ("" if overload == "default" else f".{overload}")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, key))


def tag_compile_cache(name: str, folder: Path) -> None:
    """Append a digest of the sources in `folder` to the key of PyTorch's compile caches, where it has one."""
    config = getattr(torch.compiler, "config", None)
    if config is None or not hasattr(config, "cache_key_tag"):
        return
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    config.cache_key_tag = f"{config.cache_key_tag}{name}-{digest.hexdigest()};"


def copies_together(device: torch.device) -> bool:
    """Whether many tensors can be cast in one launch. Not while tracing, where the compiler does it better."""
    return device.type == "cuda" and hasattr(torch, "_foreach_copy_") and not torch.compiler.is_compiling()


@lru_cache(maxsize=64)
def widens(name: str, device: torch.device) -> bool:
    """Whether `mm` or `addmm` of 16-bit operands can give fp32, and `addmm` add to fp32, on a device. It is tried once on a small
    product: the function exists before it can do so (addmm), and on devices that refuse it (ROCm)."""
    if device.type != "cuda" or not has_kernel(name, "cuda", "dtype_out"):
        return False
    a, out = torch.zeros(16, 16, dtype=torch.bfloat16, device=device), torch.zeros(16, 16, device=device)
    operands = (out, a, a) if name == "addmm" else (a, a)
    try:
        aten(name, "dtype_out")(*operands, torch.float32, out=out)
    except RuntimeError:
        return False
    return True


@lru_cache(maxsize=1)
def fast_bf16_products() -> bool:
    """Whether this CPU multiplies bf16 matrices by instructions made for it, several times faster than fp32 ones."""
    answers = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(bool(ask()) for ask in answers if ask is not None)


def packs_saved_tensors(pack: Callable[[Any], Any]) -> bool:
    """Whether `pack` is what autograd hands the tensors to that it saves now: of nested hooks only the innermost are called. Where this
    PyTorch does not tell, the answer is yes."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return True
    hooks = top(True)
    return hooks is not None and hooks[0] == pack


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph (`retain_graph` or `create_graph`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def destination(leaf: torch.Tensor) -> str:
    """Where the running backward puts the leaf's gradient: `grad`; `result`, as `torch.autograd.grad` does; or `nowhere`."""
    try:
        executed = torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return "result"
    return "grad" if executed else "nowhere"


def _stream_handle(device_index: int) -> int:
    return int(torch.cuda.current_stream(device_index).cuda_stream)


# The handle of a device's current CUDA stream: by PyTorch's own short cut (0.3 us), or the public way (5 us) where that is gone.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)


def _short_empty(kind: str) -> Any:
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, f"_empty_strided_{kind}", None)


def short_empty(kind: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] | None:
    """`torch.empty_strided` on the current device of a kind as the code that Inductor writes calls it, past the dispatcher (0.4 us where
    that takes 0.9); None where this PyTorch does not have it. It is never filled under deterministic algorithms."""
    return _short_empty(kind) if kind in ("cpu", "cuda") else None


def _comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check


@lru_cache(maxsize=1)
def _compares() -> bool:
    """Whether TensorGuards exists, and tells apart all that we ask it to."""
    x = torch.zeros(2, 3)
    shapes = torch.zeros(3, 2), torch.zeros(3, 2).t(), x._neg_view()
    others = (*shapes, x.double(), x.to("meta"), torch.nn.Parameter(x), x.clone().requires_grad_(), None)
    try:
        check, like, second = _comparison([x, torch.zeros(4)]), torch.ones(2, 3), torch.ones(4)
        same, differs = check(like, second), not any(check(other, second) for other in others)
        with torch.utils._python_dispatch.TorchDispatchMode():
            watched = not check(like, second)
        with torch.autocast("cpu", torch.bfloat16):
            cast = not check(like, second)
    except (AttributeError, TypeError, ValueError, RuntimeError, SystemError):
        return False
    return bool(same and differs and watched and cast)


def tensor_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function that tells whether as many tensors are like these: the same type, dtype, device, sizes, strides, `requires_grad` and
    dispatch keys, with all that modes, tracers, transforms and autocast of the thread add to those. The same tensor twice is like nothing.
    It holds no tensor, and does not look at memory or grad mode. A nested tensor of strided layout ends the process: ask first. None where
    this PyTorch has no such function.

    It is what `torch.compile` compares a call with (0.1 us a tensor).
    """
    return _comparison(tensors) if _compares() else None


def _below_views() -> Any:
    guard, keys = getattr(torch._C, "_ExcludeDispatchKeyGuard", None), getattr(torch._C, "DispatchKeySet", None)
    views = getattr(getattr(torch._C, "DispatchKey", None), "ADInplaceOrView", None)
    if guard is None or keys is None or views is None:
        return None
    below = keys(views)
    return lambda: guard(below)


_BELOW_VIEWS = _below_views()


def on_its_own(t: torch.Tensor) -> torch.Tensor:
    """The tensor, and where it is a view of one that nobody else holds, its memory as a tensor of its own: autograd refuses to write into a
    result that is a view made in an `autograd.Function`. Where this PyTorch cannot, the view."""
    if _BELOW_VIEWS is None or not t._is_view():
        return t
    with _BELOW_VIEWS():
        return t.view(t.shape)


# The index of the current CUDA device: PyTorch's own short cut, or the public function, which first checks that CUDA is up.
current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


# Whether autocast is on for any kind of device; where this PyTorch does not tell, it may be.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_transforms: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


_forward_ad: Any = torch.autograd.forward_ad


def transform(tensors: Sequence[torch.Tensor | None]) -> str:
    """The transform that is on and would have to know a derivative or a batch of a call on these tensors: `torch.func` (grad, jvp and what
    is built on them), `forward-mode AD` where one of them has a tangent, or `vmap`. Empty for none."""
    if torch.compiler.is_compiling():
        return ""
    if _transforms():
        interpreter, kinds = torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.TransformType
        key = None if interpreter is None else interpreter.key()
        if key in (kinds.Grad, kinds.Jvp):
            return "torch.func"
        if key == kinds.Vmap:
            return "vmap"
    if getattr(_forward_ad, "_current_level", -1) >= 0:
        if any(t is not None and _forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            return "forward-mode AD"
    return ""


# The state of a `torch.jit.trace` that is under way in this thread, or None; where this PyTorch does not tell, there is none.
traced_by_jit: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: None)


def _products() -> Callable[[], Any]:
    ask = getattr(torch._C, "_get_fp32_precision_getter", None)
    return torch.get_float32_matmul_precision if ask is None else lambda: (ask("cuda", "matmul"), ask("mkldnn", "matmul"))


# How PyTorch multiplies fp32 matrices, by GPUs and by CPUs: something to compare. `torch.get_float32_matmul_precision` raises once one of
# PyTorch's newer settings was made, as in `torch.backends.cuda.matmul.fp32_precision = "tf32"`; where these exist, the older set them too.
products: Callable[[], Any] = _products()


def _gpu_products() -> Callable[[], str]:
    ask = getattr(torch._C, "_get_fp32_precision_getter", None)
    return torch.get_float32_matmul_precision if ask is None else partial(ask, "cuda", "matmul")


# Of `products` what GPUs do, which is all that a plan depends on: it holds no product of PyTorch's (0.1 us, without a frame of Python).
gpu_products: Callable[[], str] = _gpu_products()
_OLDER_PRODUCTS: dict[Any, str] = {
    **{name: name for name in ("highest", "high", "medium")},
    ("none", "none"): "highest",
    ("ieee", "ieee"): "highest",
    ("tf32", "tf32"): "high",
    ("tf32", "bf16"): "medium",
}


def exact_products() -> bool:
    """Whether a GPU is to multiply fp32 matrices in fp32, and not in TF32."""
    return gpu_products() not in ("tf32", "high", "medium")


def set_products(value: Any) -> None:
    """Set what `products` gave in another process: the older way where it can say it, since not all of PyTorch asks the newer."""
    older = _OLDER_PRODUCTS.get(value)
    if older is not None:
        torch.set_float32_matmul_precision(older)
        return
    for backend, precision in zip(("cuda", "mkldnn"), value, strict=True):
        torch._C._set_fp32_precision_setter(backend, "matmul", precision)


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a kind of device; on `meta`, which has none, it never is."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def seen_as_constant(function: Any) -> Any:
    """`torch.compiler.assume_constant_result` without importing Dynamo, which takes seconds: the mark that it sets. Where another PyTorch
    reads another mark, Dynamo looks into the function itself."""
    function._dynamo_marked_constant = True
    return function


def _quiet() -> Callable[[], bool]:
    needed = ("DispatchKey", "DispatchKeySet", "_dispatch_tls_local_include_set", "_len_torch_function_stack")
    if not all(hasattr(torch._C, name) for name in needed) or not hasattr(torch.autograd, "_profiler_enabled"):
        return lambda: False
    if not hasattr(torch._C.DispatchKeySet, "raw_repr"):
        return lambda: False
    keys = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in ("BackendSelect", "ADInplaceOrView"))
    usual = sum(keys)  # of different bits
    local, modes, profiled = torch._C._dispatch_tls_local_include_set, torch._C._len_torch_function_stack, torch.autograd._profiler_enabled
    return lambda: not profiled() and not modes() and local().raw_repr() == usual


# Whether PyTorch's dispatcher would do nothing for a call on ordinary tensors but find the kernel of their device: no mode, tracer,
# transform or profiler is on in this thread. Where this PyTorch does not tell, the answer is no. (An ExecutionTraceObserver that runs
# without a profiler cannot be seen.)
quiet: Callable[[], bool] = _quiet()


# Of what `quiet` asks for, the two that `tensor_check` does not see by itself: how many function modes are on in this thread, and whether a
# profiler is. Where this PyTorch does not tell, they are.
function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)


# The tensor inside of what a transform that has ended left behind; any other as it is.
unwrapped: Any = getattr(getattr(torch._C, "_functorch", None), "unwrap_if_dead", None)


def no_tangents() -> bool:
    """Whether no level of forward-mode AD is on, so that no tensor has a tangent."""
    return bool(getattr(_forward_ad, "_current_level", 0) < 0)


def bound_apply(function: Any) -> Callable[..., Any]:
    """`function.apply` for tensors that are no transform's, while none is on: without what PyTorch's own method does for those."""
    base = getattr(getattr(torch._C, "_FunctionBase", None), "apply", None)
    found: Callable[..., Any] = function.apply if base is None else torch._C._FunctionBase.__dict__["apply"].__get__(None, function)
    return found


def _apply_by_method(function: Any, args: tuple[Any, ...]) -> Any:
    return function.apply(*args)


def _short_apply() -> Callable[[Any, tuple[Any, ...]], Any]:
    base = getattr(getattr(torch._C, "_FunctionBase", None), "apply", None)
    transforms = getattr(torch._C, "_are_functorch_transforms_active", None)
    if base is None or unwrapped is None or transforms is None:
        return _apply_by_method
    bind = torch._C._FunctionBase.__dict__["apply"].__get__
    tensor, unwrap = torch.Tensor, unwrapped

    def short(function: Any, args: tuple[Any, ...]) -> Any:
        if transforms():
            return function.apply(*args)
        return bind(None, function)(*[unwrap(a) if type(a) is tensor else a for a in args])

    return short


# `function.apply(*args)` of an `autograd.Function` without `setup_context`, without the generator and the closure of PyTorch's own method.
apply_function: Callable[[Any, tuple[Any, ...]], Any] = _short_apply()
