"""The fastest attention that is installed, at a model's shape and with its dropout, forward and backward."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ops_math import catalog, settings
from ops_math.cli.bench import rivals
from ops_math.cli.bench.clock import Clock, Timed, race
from ops_math.ops.attention.op import attention
from ops_math.rng import Rng
from ops_math.schedule.trial import in_words
from ops_nn.models import PRESETS, BertConfig

SECONDS = 0.2
BACKENDS = {
    "cuda": {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"},
    "cpu": {"flash": "FLASH_ATTENTION", "math": "MATH"},
}


class Shape(NamedTuple):
    """A model's attention: sizes, chance of dropping a probability, how many layers do it."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    width: int
    causal: bool
    dropout_p: float
    dtype: torch.dtype
    layers: int


class Fastest(NamedTuple):
    """Time [us] of all layers forward and backward, who was fastest at each, and why others did not run."""

    us: float
    fwd: str
    bwd: str
    absent: dict[str, str]


def shape_of(name: str, setup: Any) -> Shape:
    """The attention of a preset."""
    config = PRESETS[name].config
    dtype = torch.bfloat16 if setup.autocast else setup.dtype
    if isinstance(config, BertConfig):
        width, heads = config.hidden_size // config.num_heads, config.num_heads
        return Shape(setup.batch, setup.seq, heads, heads, width, False, config.attention_dropout, dtype, config.num_layers)
    return Shape(setup.batch, setup.seq, config.num_heads, config.num_kv_heads, config.head_dim, True, 0.0, dtype, config.num_layers)


Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ways(s: Shape, device: torch.device) -> tuple[dict[str, Way], dict[str, str]]:
    """Functions of q, k, v [B, S, H, D], and why a rival is not among them."""
    found: dict[str, Way] = {f"torch:{name}": _sdpa(getattr(SDPBackend, value), s) for name, value in BACKENDS[device.type].items()}
    rng = Rng(0, device) if s.dropout_p else None
    found["ops_math"] = lambda q, k, v: attention(q, k, v, causal=s.causal, dropout_p=s.dropout_p)
    other = "triton_gpu" if device.type == "cpu" else "eager"  # on a GPU that one makes whole matrices of scores
    for one in catalog.operators()["attention"].implementations():
        if one.name != other and not (one.name == "vendor" and s.dropout_p):
            found[f"ops_math:{one.name}"] = _forced(one.name, s, rng)
    absent: dict[str, str] = {}
    if s.dropout_p:
        return found, {"fa4": "it has no dropout"}
    try:
        theirs = rivals.fa4().fn
        found["fa4"] = lambda q, k, v: theirs(q, k, v, causal=s.causal)
    except rivals.AbsentError as error:
        absent["fa4"] = str(error)
    return found, absent


def _sdpa(backend: SDPBackend, s: Shape) -> Way:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = s.heads != s.kv_heads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=s.dropout_p, is_causal=s.causal, enable_gqa=grouped)

    return run


def _forced(name: str, s: Shape, rng: Rng | None) -> Way:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with settings.force(attention=name):
            found: torch.Tensor = attention(q, k, v, causal=s.causal, dropout_p=s.dropout_p, rng=rng)
        return found

    return run


class _Ready:
    """A way on operands of its own, forward and backward."""

    def __init__(self, way: Way, name: str, s: Shape, device: torch.device) -> None:
        sizes = ((s.batch, s.seq, heads, s.width) for heads in (s.heads, s.kv_heads, s.kv_heads))
        self.leaves = [torch.randn(size, device=device).to(s.dtype).requires_grad_() for size in sizes]
        self.forward = functools.partial(way, *self.leaves)
        self.fed = torch.randn_like(self.forward())
        self.forced = name.partition(":")[2] if name.startswith("ops_math:") else ""

    def backward(self, out: torch.Tensor, keep: bool = False) -> Any:
        """Gradients of q, k, v; `keep` what is needed to do it again."""
        if not self.forced:
            return torch.autograd.grad(out, self.leaves, self.fed, retain_graph=keep)
        with settings.force(attention=self.forced):
            return torch.autograd.grad(out, self.leaves, self.fed, retain_graph=keep)

    def phase(self, phase: str) -> Timed:
        """What is timed."""
        return Timed(lambda _: self.forward()) if phase == "fwd" else Timed(self.backward, self.forward)


def layer(s: Shape, device: torch.device, best: Fastest) -> Callable[[], None]:
    """One layer's forward and backward, each by who was fastest at it."""
    posed, _ = ways(s, device)
    forward, backward = (_Ready(posed[name], name, s, device) for name in (best.fwd, best.bwd))
    kept = backward.forward()

    def run() -> None:
        forward.forward()
        backward.backward(kept, keep=True)

    return run


def fastest(s: Shape, device: torch.device, clock: Clock) -> Fastest:
    """Time every way in turns; forward and backward may be of different ones, since all save the same."""
    posed, absent = ways(s, device)
    ready: dict[str, _Ready] = {}
    for name, way in posed.items():
        try:
            one = _Ready(way, name, s, device)
            one.backward(one.forward())
        except Exception as error:  # noqa: BLE001 (a way may be unable to run this shape for any reason; it is named)
            absent[name] = in_words(error)
            continue
        ready[name] = one
    best: dict[str, tuple[float, str]] = {}
    for phase in ("fwd", "bwd"):
        samples = race({name: one.phase(phase) for name, one in ready.items()}, clock, SECONDS)
        best[phase] = min((statistics.median(sample.us for sample in taken), name) for name, taken in samples.items())
    return Fastest(s.layers * (best["fwd"][0] + best["bwd"][0]), best["fwd"][1], best["bwd"][1], absent)
