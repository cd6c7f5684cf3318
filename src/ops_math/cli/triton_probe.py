"""Compiles one Triton kernel, runs it where there is a GPU, and prints what it found: `python -m ops_math.cli.triton_probe`.

A program of its own, since a broken compiler may end the process that asks it.
"""

import json
import sys

import torch
import triton
import triton.language as tl

CROSS_TARGET = ("cuda", 90, 32)


@triton.jit
def _scale_kernel(x_ptr, y_ptr, num_cols, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < num_cols
    x = tl.load(x_ptr + cols, mask=mask)
    tl.store(y_ptr + cols, x * 2.0, mask=mask)


def run_on_gpu() -> str:
    """Compile for the GPU that is here, run, compare with torch."""
    from ops_math.backends.launch import launch

    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    y = torch.full_like(x, float("nan"))
    launch(_scale_kernel, (8,), x, y, x.numel(), BLOCK_N=128)
    if not torch.equal(y, x * 2):
        raise SystemExit("the kernel ran and computed wrong numbers: suspect the driver or the hardware")
    return f"compiled, run and right on {torch.cuda.get_device_name()}"


def cross_compile() -> str:
    """Compile for an H100 without having one; nothing runs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "num_cols": "i32", "BLOCK_N": "constexpr"}
    source = ASTSource(_scale_kernel, signature=signature, constexprs={"BLOCK_N": 128})
    compiled = triton.compile(source, target=GPUTarget(*CROSS_TARGET), options={"enable_fp_fusion": True})
    return f"compiled for sm_90 ({len(compiled.asm['cubin'])} bytes of machine code); no GPU here to run it"


def main() -> None:
    """Print the finding as JSON."""
    found = run_on_gpu() if torch.cuda.is_available() else cross_compile()
    sys.stdout.write(json.dumps({"found": found}) + "\n")


if __name__ == "__main__":
    main()
