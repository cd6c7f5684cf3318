"""What `ops-math doctor` looks at. Each check takes plain facts and returns lines, so that a test can hand it any machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

PYTHON_RANGE = ((3, 11), (3, 13))
TORCH_RANGE = ((2, 11), (2, 14))
TRITON_RANGE = ((3, 6), (3, 9))
LEAST_ARCHITECTURE = 80
LEAST_FREE_BYTES = 2**30
PROBE_SECONDS = 120

# Variables that change what is computed, or in which order, without a line of code being changed.
NUMBER_VARIABLES: dict[str, str] = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "turns TF32 on or off in cuBLAS, whatever the program asks for",
    "NVIDIA_TF32_OVERRIDE": "turns TF32 off in all NVIDIA libraries, whatever the program asks for",
    "CUBLAS_WORKSPACE_CONFIG": "decides which cuBLAS algorithms can run, and whether they repeat",
    "CUBLASLT_WORKSPACE_SIZE": "decides which cuBLASLt algorithms can run",
    "CUBLAS_EMULATE_SINGLE_PRECISION": "computes fp32 products from bf16 parts",
    "TORCH_BLAS_PREFER_CUBLASLT": "changes the library behind matrix products",
    "TORCH_BLAS_PREFER_HIPBLASLT": "changes the library behind matrix products",
    "ROCBLAS_DEFAULT_ATOMICS_MODE": "allows atomics in rocBLAS, whose sums then do not repeat",
    "TORCH_ROCM_FA_PREFER_CK": "changes the attention behind scaled_dot_product_attention",
    "TRITON_INTERPRET": "runs Triton kernels in Python on the CPU",
    "TRITON_DEFAULT_FP_FUSION": "decides whether Triton contracts a*b+c into one rounding",
    "TRITON_FORCE_DISABLE_FP_FUSION": "forbids Triton to contract a*b+c into one rounding",
    "TRITON_F32_DEFAULT": "changes how Triton multiplies fp32 matrices (ieee, tf32, tf32x3)",
    "TRITON_OVERRIDE_ARCH": "compiles Triton kernels for another architecture",
    "TRITON_KERNEL_OVERRIDE": "replaces compiled Triton kernels by files from a folder",
    "DISABLE_PTXAS_OPT": "switches the optimiser of the NVIDIA assembler off",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "lets timing decide which kernels torch.compile takes",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "lets timing decide which matrix products torch.compile takes",
    "TORCHINDUCTOR_USE_FAST_MATH": "lets torch.compile use approximate functions",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "makes torch.compile round where eager rounds",
    "TORCHINDUCTOR_EMULATE_DIVISION_ROUNDING": "makes torch.compile divide as eager divides",
    "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG": "lets the C++ compiler reorder sums",
    "TORCHINDUCTOR_CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG": "lets the C++ compiler contract a*b+c",
    "ATEN_CPU_CAPABILITY": "changes the vector width, and so the order of sums on the CPU",
    "ONEDNN_DEFAULT_FPMATH_MODE": "lets oneDNN compute fp32 in a shorter format",
    "DNNL_DEFAULT_FPMATH_MODE": "lets oneDNN compute fp32 in a shorter format",
    "MKL_CBWR": "pins the code path of MKL, and so the order of its sums",
    "OMP_NUM_THREADS": "changes how sums are cut among threads on the CPU",
    "MKL_NUM_THREADS": "changes how sums are cut among threads on the CPU",
    "NCCL_ALGO": "changes the order of sums across GPUs",
    "NCCL_PROTO": "changes the order of sums across GPUs",
    "PYTORCH_TUNABLEOP_ENABLED": "lets timing decide which matrix products PyTorch takes",
    "PYTORCH_MIOPEN_SUGGEST_NHWC": "changes the layout of convolutions",
    "OPS_MATH_ENABLED": "0 puts everything back to plain PyTorch",
    "OPS_MATH_PRECISION": "decides how our kernels multiply fp32 matrices",
    "OPS_MATH_DETERMINISM": "sets the least determinism level",
    "OPS_MATH_FORCE": "forces implementations, whatever the scheduler thinks",
}

# Distribution, and what it serves.
OPTIONAL_KERNELS: dict[str, str] = {
    "flash-attn": "attention",
    "liger-kernel": "norms, rotary, SwiGLU, losses",
    "quack-kernels": "norms, softmax, losses",
    "transformer-engine": "norms, attention, FP8 products",
    "cut-cross-entropy": "linear cross-entropy",
    "nvidia-cutlass-dsl": "PyTorch's own CuTe norm on sm_90 and sm_100 (with apache-tvm-ffi)",
}


class Line(NamedTuple):
    """One finding: `status` is ok, warning or failure; `do` says what to do unless it is ok."""

    name: str
    status: str
    found: str
    do: str = ""


class Gpu(NamedTuple):
    """What torch and the driver say of one GPU. `arch` is 90 for sm_90, or gfx942."""

    name: str
    arch: str
    memory_bytes: int


def version_of(text: str) -> tuple[int, int]:
    """Major and minor of a version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def python_line(version: tuple[int, int], executable: str) -> Line:
    """Whether this Python is one that the project is tested on."""
    found = f"{_dotted(version)} ({executable})"
    if version < PYTHON_RANGE[0]:
        return Line("Python", "failure", found, "Use Python 3.11, 3.12 or 3.13.")
    if version > PYTHON_RANGE[1]:
        return Line("Python", "warning", found, "Not tested on this one: prefer Python 3.11, 3.12 or 3.13.")
    return Line("Python", "ok", found)


def torch_line(version: str) -> Line:
    """Whether this torch is one that the project is tested on."""
    if version_of(version) < TORCH_RANGE[0]:
        return Line("torch", "failure", version, "Install torch 2.11 to 2.14, for example: pip install 'torch>=2.11,<2.15'")
    if version_of(version) > TORCH_RANGE[1]:
        return Line("torch", "warning", version, "Newer than what was tested (2.11 to 2.14): run the tests before you trust it.")
    return Line("torch", "ok", version)


def triton_line(installed: str | None, wanted_by_torch: str | None, has_gpu: bool) -> Line:
    """Whether the installed Triton is the one that torch was built against, or at least one that the kernels compile with."""
    if installed is None:
        if has_gpu:
            return Line("Triton", "failure", "not installed", "The GPU kernels need it: pip install 'ops-math[triton]'")
        return Line("Triton", "warning", "not installed", "Fine on a CPU; to compile kernels here: pip install 'ops-math[triton]'")
    if not TRITON_RANGE[0] <= version_of(installed) <= TRITON_RANGE[1]:
        return Line("Triton", "failure", installed, "The kernels are tested with Triton 3.6 to 3.9: install one of these.")
    if wanted_by_torch is None:
        return Line("Triton", "ok", f"{installed} (this build of torch asks for none)")
    if version_of(installed) != version_of(wanted_by_torch):
        return Line(
            "Triton", "warning", f"{installed}, and torch was built for {wanted_by_torch}", f"pip install triton=={wanted_by_torch}"
        )
    return Line("Triton", "ok", f"{installed}, as torch asks for")


def triton_wanted(requirements: Iterable[str]) -> str | None:
    """The version of Triton that torch's own metadata pins, or None where the build does not need one."""
    for requirement in requirements:
        found = re.match(r"(?:pytorch-)?triton(?:-rocm)?\s*==\s*([\d.]+)", requirement)
        if found and "extra ==" not in requirement:
            return found[1]
    return None


def driver_line(driver: str | None, torch_built_for: str | None, torch_sees_gpu: bool) -> Line:
    """Whether a GPU driver is there and torch can use it."""
    if torch_sees_gpu:
        return Line("driver", "ok", f"{driver or 'present'} (torch is built for {torch_built_for})")
    if driver is None:
        return Line("driver", "ok", "none: the operators run on the CPU")
    if torch_built_for is None:
        return Line("driver", "warning", f"{driver}, and torch is a CPU build", "Install a CUDA or ROCm build of torch to use the GPU.")
    do = "Update the driver, or install a torch built for an older one; CUDA_VISIBLE_DEVICES must not be empty."
    return Line("driver", "failure", f"{driver}, and torch (built for {torch_built_for}) sees no GPU", do)


def gpu_lines(gpus: Iterable[Gpu]) -> list[Line]:
    """Each GPU with its architecture and memory."""
    lines = []
    for number, gpu in enumerate(gpus):
        shown = f"sm_{gpu.arch}" if gpu.arch.isdigit() else gpu.arch
        found = f"{gpu.name}, {shown}, {gpu.memory_bytes / 2**30:.0f} GiB"
        if gpu.arch.isdigit() and int(gpu.arch) < LEAST_ARCHITECTURE:
            lines.append(Line(f"GPU {number}", "warning", found, "The Triton kernels need sm_80 or newer: PyTorch's own will run."))
        else:
            lines.append(Line(f"GPU {number}", "ok", found))
    return lines


def compiler_line(name: str, command: str | None, purpose: str, has_gpu: bool, source: str, *flags: str) -> Line:
    """Whether a compiler is there and compiles `source`."""
    status = "failure" if has_gpu else "warning"
    path = command and shutil.which(command)
    if not path:
        return Line(name, status, "not found", f"{purpose} needs one: install gcc and g++ (Debian: apt-get install build-essential).")
    suffix = ".cpp" if "++" in name else ".c"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"probe{suffix}"
        file.write_text(source)
        arguments = [path, *flags, "-c", str(file), "-o", f"{file}.o"]
        result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[0]
        do = f"{purpose} needs a working one, and Python's headers (Debian: apt-get install python3-dev)."
        return Line(name, status, f"{path} fails: {reason}", do)
    return Line(name, "ok", path)


def kernel_line(probe: Callable[[], subprocess.CompletedProcess[str]], interpreted: bool) -> Line:
    """Whether a Triton kernel compiles, and runs where there is a GPU. `probe` runs `triton_probe` in a process of its own."""
    if interpreted:
        found = "TRITON_INTERPRET=1: kernels run in Python"
        return Line("Triton kernel", "warning", found, "Unset TRITON_INTERPRET unless you are debugging a kernel.")
    do = "Run `python -m ops_math.cli.triton_probe` and read the traceback; a broken cache is emptied with `rm -r ~/.triton/cache`."
    try:
        result = probe()
    except subprocess.TimeoutExpired:
        return Line("Triton kernel", "failure", f"not compiled within {PROBE_SECONDS} s", do)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [f"the process ended with {result.returncode} and no message"])[-1]
        return Line("Triton kernel", "failure", last, do)
    return Line("Triton kernel", "ok", json.loads(result.stdout)["found"])


def run_probe() -> subprocess.CompletedProcess[str]:
    """Compile and, where there is a GPU, run one kernel; a crash of the compiler ends that process and not this one."""
    command = [sys.executable, "-m", "ops_math.cli.triton_probe"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)


def folder_line(name: str, folder: Path, variable: str) -> Line:
    """Whether a cache folder, or the nearest folder above it that exists, can be written to and has room."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    do = f"Make it writable, or name another folder with {variable}."
    try:
        with tempfile.NamedTemporaryFile(dir=nearest):
            free = shutil.disk_usage(nearest).free
    except OSError as error:
        return Line(name, "failure", f"{folder}: {error.strerror}", do)
    if free < LEAST_FREE_BYTES:
        return Line(name, "warning", f"{folder}: {free / 2**20:.0f} MiB free", "Compiled kernels may not fit: free some space.")
    return Line(name, "ok", str(folder))


def environment_lines(variables: Mapping[str, str]) -> list[Line]:
    """Each variable that is set and changes numbers."""
    if not variables:
        return [Line("environment", "ok", "no variable that changes numbers is set")]
    do = "Meant? Then write it down with your results. Otherwise unset it."
    return [Line("environment", "warning", f"{name}={value}: {NUMBER_VARIABLES[name]}", do) for name, value in sorted(variables.items())]


def optional_kernel_lines(version_installed: Callable[[str], str | None]) -> list[Line]:
    """Third-party kernels; none is needed."""
    found = {name: version_installed(name) for name in OPTIONAL_KERNELS}
    return [Line(name, "ok", f"{version or 'not installed'} (optional: {OPTIONAL_KERNELS[name]})") for name, version in found.items()]


def compiler_lines(environment: Mapping[str, str], has_gpu: bool) -> list[Line]:
    """The C compiler, with which Triton builds its launcher, and the C++ compiler, with which torch.compile builds CPU kernels."""
    c = environment.get("CC") or next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), None)
    cxx = environment.get("CXX") or next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    headers = "-I" + sysconfig.get_path("include")
    c_program = "#include <Python.h>\nint main(void) { return 0; }\n"
    cxx_program = "#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n"
    return [
        compiler_line("C compiler", c, "Triton's launcher", has_gpu, c_program, headers),
        compiler_line("C++ compiler", cxx, "torch.compile on the CPU", False, cxx_program, "-std=c++17"),
    ]


def folder_lines(environment: Mapping[str, str], own_cache: Path, user: str) -> list[Line]:
    """The three caches: ours, Triton's, and Inductor's."""
    home = Path(environment.get("TRITON_HOME") or os.path.expanduser("~"))
    triton = Path(environment.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    inductor = Path(environment.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"torchinductor_{user}")
    return [
        folder_line("cache", own_cache, "OPS_MATH_CACHE"),
        folder_line("Triton's cache", triton, "TRITON_CACHE_DIR"),
        folder_line("Inductor's cache", inductor, "TORCHINDUCTOR_CACHE_DIR"),
    ]
