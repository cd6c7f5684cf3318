"""The kernel of `om.FigureTable` on one GPU: every configuration on large and on small tensors, against a reading sum of as many bytes.

Usage: PYTHONPATH=src python3 tools/gpu/figures_sweep.py

Time is kernel time from the profiler. `share` is the time of reading the tensor once at the rate of `copy_` over ours. Every configuration
is first held to the host's fingerprint.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from ops_math.ops.figures import eager, triton_gpu
from ops_math.ops.figures.problem import HASH_AT

REPEATS = 20
SHAPES = {
    torch.float32: ((16384, 8192), (2048, 2048), (256, 1024)),
    torch.bfloat16: ((16384, 16384), (16384, 2048), (2048, 8192), (2048, 512)),
}


TOGETHER = 48  # tensors of the last shape but one, as the gradients of a model: they are looked at by one kernel, through a table


def kernel_us(call: object, word: str) -> float:
    """Kernel time of a call [us], of kernels with the word in their name."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in found.key_averages() if word in event.key.lower()) / REPEATS


def main() -> None:
    """A row for each tensor, configuration, and whether with a sketch."""
    device = torch.device("cuda")
    print(torch.cuda.get_device_name())
    for dtype, shapes in SHAPES.items():
        for shape in shapes:
            x = torch.randn(shape, device=device, dtype=dtype).flatten()
            host = eager.Rows()
            host.add([x.cpu()], False)
            bits = host.fetch()[0, HASH_AT:].view(torch.int64)
            many = [x.clone() for _ in range(TOGETHER if shape == shapes[-2] else 0)]
            other = torch.empty_like(x)
            copy = kernel_us(lambda x=x, other=other: other.copy_(x), "")
            for config in triton_gpu.CONFIGS:
                for sketch in (True, False):
                    rows = triton_gpu.Rows(device, config)
                    time = kernel_us(lambda x=x, rows=rows, sketch=sketch: rows.add([x], sketch), "_chunk_kernel")
                    right = torch.equal(rows.fetch()[0, HASH_AT:].view(torch.int64), bits)
                    told = f"{x.nbytes / time / 1e3:7.0f} GB/s, share {copy / 2 / time:.2f}, {'right' if right else 'WRONG'}"
                    print(
                        f"{str(dtype)[6:]:9} {list(shape)!s:15} {tuple(config)!s:11} sketch {sketch!s:5} {time:9.1f} us {told}", flush=True
                    )
                if many:
                    rows = triton_gpu.Rows(device, config)
                    time = kernel_us(lambda many=many, rows=rows: rows.add(many, True), "_chunk_kernel")
                    told = f"{x.nbytes * len(many) / time / 1e3:7.0f} GB/s, share {copy / 2 * len(many) / time:.2f}"
                    print(
                        f"{str(dtype)[6:]:9} {list(shape)!s:15} {tuple(config)!s:11} {len(many)} at once {time:10.1f} us {told}", flush=True
                    )


if __name__ == "__main__":
    main()
