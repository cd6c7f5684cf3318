"""Holds public operators of installed libraries to their definitions, as `ops_math.testing.verify` holds ours, and writes the facts down.

    PYTHONPATH=src:. python tools/gpu/verify_peers.py --device cuda --out build/peers.jsonl [--only torch,liger] [--dtypes bf16] [--faults]

Each operator runs in a process of its own with a limit, so that one that spoils the CUDA context or hangs costs one row. A row holds
versions, what was tried, margins, and every statement about the operator with the smallest input that shows it; a row of an operator that
is not installed says so. On the CPU PyTorch's own run: `--device cpu --only torch`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ops_math import catalog, settings
from ops_math.testing import verify

ROOT = Path(__file__).parents[2]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # many processes of many threads take ten times as long
DISTRIBUTION = {
    "torch": "torch",
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "cce": "cut-cross-entropy",
    "fa4": "flash-attn-4",
}
LIGER = "liger_kernel.transformers.functional"
TEMPERS = ("confident", "near zero", "common offset", "large vectors")  # one dtype for all: not every library promises another


class Peer(NamedTuple):
    """An operator: `make()` gives a function with the reference's arguments, in the dtypes that it is known to take."""

    make: Callable[[], Callable[..., Any]]
    definition: str
    inputs: Any
    frozen: tuple[int | str, ...] = ()
    tempers: tuple[str, ...] = TEMPERS
    narrow_only: bool = False


def defined(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The definition in the catalogue of a public function of ours, and the yardstick of rounding: our function, which `main` has forced to
    `eager`. It rounds at loads and stores and the operands of products, and its backward reads outputs as they were stored."""
    function, _, option = name.partition(":")
    operator = catalog.public_functions()[function]
    options: dict[str, Any] = {"reduction": option} if option in ("none", "mean") else {"causal": True} if option else {}
    found = getattr(operator.file("reference"), function), operator.public[function]
    return functools.partial(found[0], **options), functools.partial(found[1], **options)


def taken(module: str, name: str, *more: Any, **options: Any) -> Callable[[], Callable[..., Any]]:
    """A function of a library, with some more arguments at the end; only what its first result is, where it has several of one call."""

    def make() -> Callable[..., Any]:
        found = getattr(importlib.import_module(module), name)
        return lambda *args: found(*args, *more, **options)

    return make


def rows(d: Any, rows: int = 64, cols: int = 256) -> Any:
    """A matrix."""
    return (d.normal(rows, cols),)


def pair(d: Any, rows: int = 64, cols: int = 256) -> Any:
    """Two matrices."""
    return d.normal(rows, cols), d.normal(rows, cols)


def norm(d: Any, rows: int = 64, cols: int = 256) -> Any:
    """A matrix and a weight."""
    return d.normal(rows, cols), d.normal(cols, offset=1.0)


def norm_and_bias(d: Any, rows: int = 64, cols: int = 256) -> Any:
    """A matrix, a weight and a bias."""
    return d.normal(rows, cols), d.normal(cols, offset=1.0), d.normal(cols)


def added(d: Any, rows: int = 64, cols: int = 256) -> Any:
    """Two matrices and a weight."""
    return d.normal(rows, cols), d.normal(rows, cols), d.normal(cols, offset=1.0)


def logits(d: Any, tokens: int = 64, classes: int = 512) -> Any:
    """Logits and classes."""
    return d.normal(tokens, classes, scale=2.0), d.ints(classes, tokens)


def confident_logits(d: Any, tokens: int = 64, classes: int = 512) -> Any:
    """The true class has a probability of about 0.9 to 0.999."""
    z, target = d.normal(tokens, classes), d.ints(classes, tokens)
    return z.scatter(-1, target[:, None], d.uniform(tokens, 1) * 4 + 9.0), target


def head(d: Any, tokens: int = 64, hidden: int = 64, classes: int = 512) -> Any:
    """Tokens, a head's weight and classes."""
    return d.normal(tokens, hidden), d.normal(classes, hidden, scale=0.1), d.ints(classes, tokens)


def heads(d: Any, seq: int = 64) -> Any:
    """Queries, keys and values of two sequences."""
    return tuple(d.normal(2, seq, 4, 64) for _ in range(3))


def turned(d: Any, seq: int = 64) -> Any:
    """Queries, keys and rotary tables."""
    angle = d.normal(seq, 32, dtype="fp64")
    cos, sin = (f(angle).to(torch.bfloat16 if d.dtype == "bf16" else torch.float32) for f in (torch.cos, torch.sin))
    return d.normal(2, seq, 4, 64), d.normal(2, seq, 2, 64), cos, sin


def _torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _liger_rope() -> Callable[..., Any]:
    found = importlib.import_module(LIGER).liger_rope

    def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        tables = (torch.cat((t, t), -1).unsqueeze(0) for t in (cos, sin))
        return tuple(o.transpose(1, 2) for o in found(q.transpose(1, 2), k.transpose(1, 2), *tables))

    return rope


def _fa4() -> Callable[..., Any]:
    found = importlib.import_module("flash_attn.cute.interface").flash_attn_func

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = found(q, k, v, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return attention


def _losses(none: Any, mean: Any) -> dict[str, Peer]:
    return {
        "cross_entropy, none": Peer(none, "cross_entropy:none", [logits, confident_logits], tempers=()),
        "cross_entropy, mean": Peer(mean, "cross_entropy:mean", [logits, confident_logits], tempers=()),
    }


def _of_torch(call: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: call


TABLES = (2, 3)
PEERS: dict[str, dict[str, Peer]] = {
    "torch": {
        "rms_norm": Peer(_of_torch(lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6)), "rms_norm", norm),
        "layer_norm": Peer(_of_torch(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5)), "layer_norm", norm_and_bias),
        "softmax": Peer(_of_torch(lambda x: F.softmax(x, -1)), "softmax", rows),
        "gelu": Peer(_of_torch(F.gelu), "gelu", rows),
        **_losses(_of_torch(lambda z, t: F.cross_entropy(z, t, reduction="none")), _of_torch(F.cross_entropy)),
        "scaled_dot_product_attention": Peer(_of_torch(_torch_attention), "attention:causal", heads, tempers=("near zero",)),
    },
    "liger": {
        "rms_norm, casting gemma": Peer(taken(LIGER, "liger_rms_norm", 1e-6, 0.0, "gemma"), "rms_norm", norm),
        "fused_add_rms_norm, casting gemma": Peer(taken(LIGER, "liger_fused_add_rms_norm", 1e-6, 0.0, "gemma"), "add_rms_norm", added),
        "layer_norm": Peer(taken(LIGER, "liger_layer_norm", 1e-5), "layer_norm", norm_and_bias),
        "softmax": Peer(taken(LIGER, "liger_softmax"), "softmax", rows),
        "swiglu": Peer(taken(LIGER, "liger_swiglu"), "swiglu", pair),
        "geglu": Peer(taken(LIGER, "liger_geglu"), "geglu", pair),
        **_losses(taken(LIGER, "liger_cross_entropy", reduction="none"), taken(LIGER, "liger_cross_entropy")),
        "fused_linear_cross_entropy": Peer(taken(LIGER, "liger_fused_linear_cross_entropy"), "linear_cross_entropy", head),
        "rope": Peer(_liger_rope, "rope", turned, TABLES, ("confident",)),
    },
    "quack": {
        "rmsnorm": Peer(taken("quack", "rmsnorm", eps=1e-6), "rms_norm", norm),
        "softmax": Peer(taken("quack", "softmax"), "softmax", rows),
        "cross_entropy, none": Peer(taken("quack", "cross_entropy", reduction="none"), "cross_entropy:none", [logits, confident_logits]),
    },
    "cce": {
        "linear_cross_entropy": Peer(taken("cut_cross_entropy", "linear_cross_entropy"), "linear_cross_entropy", head, narrow_only=True),
    },
    "fa4": {"flash_attn_func": Peer(_fa4, "attention:causal", heads, tempers=("near zero",), narrow_only=True)},
}


def version(library: str) -> str:
    """The installed version, empty where it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION[library])
    except importlib.metadata.PackageNotFoundError:
        return str(torch.__version__) if library == "torch" else ""


def row_of(library: str, name: str, device: str, dtypes: tuple[str, ...], faults: bool) -> dict[str, Any]:
    """The facts about one operator."""
    peer = PEERS[library][name]
    narrow = tuple(d for d in dtypes if d != "fp32")
    settings.force(**dict.fromkeys(catalog.operators(), "eager"))
    definition, yardstick = defined(peer.definition)
    report = verify(
        peer.make(),
        reference=definition,
        yardstick=yardstick,
        inputs=peer.inputs,
        device=device,
        dtypes=narrow if peer.narrow_only else dtypes,
        frozen=peer.frozen,
        tempers=peer.tempers,
        faults=None if faults else (),
        name=f"{library}: {name}",
    )
    plain = report.to_json()
    found = [{k: f[k] for k in ("check", "output", "words", "smallest")} | {"cases": len(f["cases"])} for f in plain["findings"]]
    kept = {k: plain[k] for k in ("ok", "dtypes", "tried", "margins", "refused", "skipped", "alive")}
    return {**kept, "findings": found, "faults_caught": len(plain["caught"])}


def main() -> int:
    """One process for each operator; the exit code says whether all of them could be judged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default=",".join(PEERS), help="libraries")
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one operator")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "peers.jsonl")
    parser.add_argument("--faults", action="store_true", help="plant faults too, which takes several times as long")
    parser.add_argument("--jobs", type=int, default=max(1, min(6, (os.cpu_count() or 1) // 2)), help="operators at a time")
    parser.add_argument("--one", help="LIBRARY/NAME: in this process, printing the row")
    given = parser.parse_args()
    dtypes = tuple(given.dtypes.split(","))
    if given.one:
        library, _, name = given.one.partition("/")
        sys.stdout.write(json.dumps(row_of(library, name, given.device, dtypes, given.faults)) + "\n")
        return 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    head_of = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device,
        "torch": str(torch.__version__),
        "triton": next((importlib.metadata.version(n) for n in ("triton", "pytorch-triton") if _installed(n)), ""),
    }
    judged = True
    wanted = [(library, name) for library in given.only.split(",") for name in PEERS[library]]
    with given.out.open("a") as out, ThreadPoolExecutor(given.jobs) as pool:
        answers = pool.map(lambda one: asked(given, *one), wanted)
        for (library, name), answer in zip(wanted, answers, strict=True):
            row = {**head_of, "library": library, "version": version(library), "operator": name, **answer}
            judged = judged and "not_judged" not in row
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(line(row), flush=True)
    return 0 if judged else 1


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def asked(given: argparse.Namespace, library: str, name: str) -> dict[str, Any]:
    """What the process of one operator answers, or why it does not."""
    if not version(library):
        return {"not_installed": DISTRIBUTION[library]}
    own = ["--one", f"{library}/{name}", "--device", given.device, "--dtypes", given.dtypes, *(["--faults"] if given.faults else [])]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, *own], capture_output=True, text=True, timeout=given.limit, check=False, env=ONE_THREAD
        )
    except subprocess.TimeoutExpired:
        return {"not_judged": f"took more than {given.limit:.0f} s"}
    seconds = {"seconds": round(time.monotonic() - begun, 1)}
    if done.returncode or not done.stdout.strip():
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"not_judged": last[0][:300], **seconds}
    return {**json.loads(done.stdout.splitlines()[-1]), **seconds}


def line(row: dict[str, Any]) -> str:
    """One operator on one line, with its statements below."""
    who = f"{row['library']} {row['version']}: {row['operator']}"
    if "not_installed" in row or "not_judged" in row:
        return f"{who}: " + (f"{row['not_installed']} is not installed" if "not_installed" in row else f"not judged: {row['not_judged']}")
    worst = max((m["share"] for k, m in row["margins"].items() if k != "size"), default=0.0)
    lines = [f"{who}: {'within' if row['ok'] else 'outside'} the budget, largest error {worst:.2f} of its limit ({row['seconds']} s)"]
    lines += [f"    {f['check']}: {f['output']} {f['words']}; smallest: {f['smallest']}" for f in row["findings"]]
    lines += [f"    does not take {text}" for text in row["refused"][:3]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
