"""The short way to a compiled kernel: taken when, and only when, the kernel was compiled for just such arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ops_math.backends import launch as module
from ops_math.backends.launch import launch

pytest.importorskip("triton", reason="missing capability: Triton")


class OnTheGpu(torch.Tensor):
    """A tensor that says it is on a GPU, at an address of our choice."""

    address = 4096

    @property
    def device(self):
        return SimpleNamespace(type="cuda", index=0)

    def data_ptr(self):
        return self.address


class Kernel:
    """Counts Triton's own launches, and the direct ones of what it compiled."""

    def __init__(self, names):
        self.arg_names, self.compiled, self.direct = names, 0, []

    def __getitem__(self, grid):
        def call(*args, **options):
            self.compiled += 1
            return SimpleNamespace(run=lambda *a: self.direct.append(a), function="function", packed_metadata="metadata")

        return call


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_COMPILED", {})
    monkeypatch.setattr(module, "STARTED", set())
    monkeypatch.setattr(module.features, "raw_stream", lambda index: f"stream {index}")
    return Kernel(["x_ptr", "y_ptr", "n", "eps", "BLOCK"])


def tensor(address=4096, dtype=torch.float32):
    made = torch.zeros(4, dtype=dtype).as_subclass(OnTheGpu)
    made.address = address
    return made


def start(kernel, x=None, y=None, n=64, eps=1e-6, block=128, grid=(3,), **options):
    launch(kernel, grid, tensor() if x is None else x, y, n, eps, BLOCK=block, **options)


def test_the_second_launch_goes_the_short_way_with_everything_in_its_place(kernel):
    start(kernel)
    assert (kernel.compiled, len(kernel.direct)) == (1, 0)
    x = tensor()
    start(kernel, x=x, grid=(7, 2))
    assert kernel.compiled == 1
    *head, got_x, got_y, n, eps, block = kernel.direct[0]
    assert head == [7, 2, 1, "stream 0", "function", "metadata", None, None, None]
    assert got_x is x
    assert (got_y, n, eps, block) == (None, 64, 1e-6, 128)


DIFFERENT = {
    "another integer": {"n": 65},
    "another float": {"eps": 1e-5},
    "another constant": {"block": 256},
    "another dtype": {"x": tensor(dtype=torch.bfloat16)},
    "an address off 16 bytes": {"x": tensor(4104)},
    "a tensor for None": {"y": tensor()},
    "other warps": {"num_warps": 8},
    "other stages": {"num_stages": 2},
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_a_kernel_may_be_specialised_for_is_compiled_anew(kernel, change):
    start(kernel)
    start(kernel, **DIFFERENT[change])
    assert (kernel.compiled, len(kernel.direct)) == (2, 0)
    start(kernel, **DIFFERENT[change])
    assert (kernel.compiled, len(kernel.direct)) == (2, 1)


def test_another_address_on_16_bytes_is_the_same_kernel(kernel):
    start(kernel)
    start(kernel, x=tensor(8192))
    assert (kernel.compiled, len(kernel.direct)) == (1, 1)


def test_an_empty_grid_starts_nothing(kernel):
    start(kernel, grid=(3, 0))
    assert kernel.compiled == 0


def test_what_is_not_a_plain_argument_always_goes_tritons_way(kernel):
    for _ in range(2):
        launch(kernel, (1,), tensor(), object(), 4, 1.0, BLOCK=4)
    assert (kernel.compiled, len(kernel.direct)) == (2, 0)


class TensorDescriptor:
    """As Triton's: a tensor seen in blocks."""

    def __init__(self, base=None, shape=(4,), strides=(1,), block_shape=(4,), padding="zero"):
        self.base = tensor() if base is None else base
        self.shape, self.strides, self.block_shape, self.padding = list(shape), list(strides), list(block_shape), padding


def describe(kernel, **fields):
    launch(kernel, (1,), tensor(), TensorDescriptor(**fields), 4, 1.0, BLOCK=4)


def test_a_tensor_descriptor_starts_directly_and_is_handed_on_as_it_is(kernel):
    describe(kernel)
    describe(kernel, base=tensor(8192))
    assert (kernel.compiled, len(kernel.direct)) == (1, 1)
    assert kernel.direct[0][10].base.address == 8192


OTHER_FIELDS = {"shape": (8,), "strides": (2,), "block_shape": (2,), "padding": "nan", "base": tensor(dtype=torch.bfloat16)}


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_another_tensor_descriptor_is_compiled_anew(kernel, field):
    describe(kernel)
    describe(kernel, **{field: OTHER_FIELDS[field]})
    assert (kernel.compiled, len(kernel.direct)) == (2, 0)


def test_on_amd_triton_launches(kernel, monkeypatch):
    monkeypatch.setattr(module, "_HIP", True)
    start(kernel)
    start(kernel)
    assert (kernel.compiled, len(kernel.direct)) == (2, 0)


def test_a_watched_launch_is_not_taken_past_its_watcher(kernel, monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    start(kernel)
    start(kernel)
    assert (kernel.compiled, len(kernel.direct)) == (2, 0)


def test_kept_kernels_are_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "_LIMIT", 5)
    for n in range(20):
        start(kernel, n=n)
    assert len(module._COMPILED) <= 5
