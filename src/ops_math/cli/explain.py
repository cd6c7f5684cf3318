"""`ops-math explain`: which candidates a problem has, what each was predicted and measured to take, and why the winner runs.

Nothing is computed: the call is made on tensors without data, so a problem of any size can be put to a device that is not here.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from ops_math import backends, catalog, checks, features, schedule
from ops_math.schedule.agree import this_device
from ops_math.spec import DTYPE_OF, Device, product
from ops_math.testing.capture import watch

T = torch.Tensor
Maker = Callable[["Sizes"], tuple[Any, ...]]


class Sizes:
    """The numbers of `--shape`, and tensors of them without data."""

    def __init__(self, numbers: tuple[int, ...], dtype: torch.dtype) -> None:
        self.n, self.dtype = numbers, dtype

    def tensor(self, *shape: int) -> T:
        """A floating tensor that learns."""
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def constant(self, *shape: int) -> T:
        """A floating tensor that does not."""
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def ints(self, *shape: int) -> T:
        """Classes or positions."""
        return torch.empty(shape, dtype=torch.int64, device="meta")


def _attention(s: Sizes) -> tuple[Any, ...]:
    batch, seq, heads, kv_heads, width = s.n
    return s.tensor(batch, seq, heads, width), s.tensor(batch, seq, kv_heads, width), s.tensor(batch, seq, kv_heads, width)


def _packed(s: Sizes) -> tuple[Any, ...]:
    batch, seq, heads, kv_heads, width = s.n
    return s.tensor(batch, seq, (heads + 2 * kv_heads) * width), {"num_heads": heads, "num_kv_heads": kv_heads}


def _rope(s: Sizes) -> tuple[Any, ...]:
    batch, seq, heads, kv_heads, width = s.n
    tables = s.constant(seq, width // 2), s.constant(seq, width // 2)
    return s.tensor(batch, seq, heads, width), s.tensor(batch, seq, kv_heads, width), *tables


def _rope_packed(s: Sizes) -> tuple[Any, ...]:
    qkv, heads = _packed(s)
    return qkv, *_rope(s)[2:], heads


# What `--shape` names for each function, and the arguments that it makes of it; keyword arguments come last, as a dictionary.
CALLS: dict[str, tuple[str, Maker]] = {
    "rms_norm": ("ROWSxCOLS", lambda s: (s.tensor(*s.n), s.tensor(s.n[1]))),
    "add_rms_norm": ("ROWSxCOLS", lambda s: (s.tensor(*s.n), s.tensor(*s.n), s.tensor(s.n[1]))),
    "layer_norm": ("ROWSxCOLS", lambda s: (s.tensor(*s.n), s.tensor(s.n[1]), s.tensor(s.n[1]))),
    "add_layer_norm": ("ROWSxCOLS", lambda s: (s.tensor(*s.n), s.tensor(*s.n), s.tensor(s.n[1]), s.tensor(s.n[1]))),
    "softmax": ("ROWSxCOLS", lambda s: (s.tensor(*s.n),)),
    "swiglu": ("ROWSxCOLS", lambda s: (s.tensor(*s.n), s.tensor(*s.n))),
    "geglu": ("ROWSxCOLS", lambda s: (s.tensor(*s.n), s.tensor(*s.n))),
    "swiglu_packed": ("ROWSxCOLS", lambda s: (s.tensor(*s.n),)),
    "geglu_packed": ("ROWSxCOLS", lambda s: (s.tensor(*s.n),)),
    "gelu": ("ROWSxCOLS", lambda s: (s.tensor(*s.n),)),
    "cross_entropy": ("ROWSxCLASSES", lambda s: (s.tensor(*s.n), s.ints(s.n[0]))),
    "linear_cross_entropy": ("ROWSxHIDDENxCLASSES", lambda s: (s.tensor(s.n[0], s.n[1]), s.tensor(s.n[2], s.n[1]), s.ints(s.n[0]))),
    "attention": ("BATCHxSEQxHEADSxKV_HEADSxWIDTH", _attention),
    "attention_qkv": ("BATCHxSEQxHEADSxKV_HEADSxWIDTH", _packed),
    "rope": ("BATCHxSEQxHEADSxKV_HEADSxWIDTH", _rope),
    "rope_qkv": ("BATCHxSEQxHEADSxKV_HEADSxWIDTH", _rope_packed),
    "linear": ("ROWSxINPUTSxOUTPUTS", lambda s: (s.tensor(s.n[0], s.n[1]), s.tensor(s.n[2], s.n[1]))),
    "dropout": ("ROWSxCOLS", lambda s: (s.tensor(*s.n), 0.1)),
}


USUAL = {
    "ROWSxCOLS": "16384x4096", "ROWSxCLASSES": "8192x128256", "ROWSxHIDDENxCLASSES": "8192x4096x128256",
    "BATCHxSEQxHEADSxKV_HEADSxWIDTH": "1x16384x32x8x128", "ROWSxINPUTSxOUTPUTS": "16384x4096x4096",
}  # fmt: skip  # what is explained where no shape is named


MOST = 2**56  # elements, so that bytes of tensors that are several times as large count in 64 bits


def sizes_of(function: str, shape: str) -> tuple[int, ...]:
    """The numbers of a shape such as `16384x4096`."""
    wanted = CALLS[function][0]
    parts = shape.lower().split("x")
    if len(parts) != wanted.count("x") + 1 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        checks.fail("explain", "--shape", f"{wanted} for {function}", repr(shape), "Write it like 16384x4096.")
    sizes = tuple(int(part) for part in parts)
    if product(sizes) > MOST:
        checks.fail("explain", "--shape", "of at most 2^56 elements, which is more than any memory has", repr(shape), "Name a smaller one.")
    return sizes


def keywords_of(given: list[str]) -> dict[str, Any]:
    """`causal=true eps=1e-5` as keyword arguments."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals:
            checks.fail("explain", "--with", "KEYWORD=VALUE", repr(one), "Write it like causal=true.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
        found[name] = tuple(found[name]) if isinstance(found[name], list) else found[name]
    return found


def problems_of(function: str, shape: str, dtype: str, keywords: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """Operator, phase and problem of every dispatcher call that the function's forward and backward make."""
    checks.one_of("explain", "operator", function, tuple(CALLS))
    checks.one_of("explain", "--dtype", dtype, tuple(DTYPE_OF))
    public = catalog.public_functions()[function].public[function]
    args = CALLS[function][1](Sizes(sizes_of(function, shape), DTYPE_OF[dtype]))
    if isinstance(args[-1], dict):
        args, keywords = args[:-1], {**args[-1], **keywords}

    def both() -> None:
        try:
            out = public(*args, **keywords)
        except TypeError as error:
            checks.fail("explain", "--with", f"a keyword of {function}", str(error), "See its page in the documentation.")
        outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        torch.autograd.grad(
            outs, [a for a in args if isinstance(a, T) and a.requires_grad], [torch.empty_like(o) for o in outs], allow_unused=True
        )

    operators = catalog.operators()
    found: dict[tuple[str, str, Any], tuple[Any, str, Any]] = {}
    for call in watch(both).calls:
        operator = operators[call.operator]
        problem = operator.phases[call.phase].problem_of(*call.args)
        found[call.operator, call.phase, problem] = operator, call.phase, problem
    return list(found.values())


def device_named(name: str | None) -> Device:
    """The device that is asked about: this machine's, its CPU, or one by name."""
    if name is None:
        return this_device()
    if name == "cpu":
        return backends.device_of(torch.device("cpu"))
    checks.one_of("explain", "--device", name, ("cpu", *backends.NAMED))
    return backends.NAMED[name]


def show(found: schedule.Explanation) -> None:
    """Print one problem's candidates."""
    console = Console()
    console.print(f"{found.op} {found.phase}", style="bold")
    console.print(found.problem, highlight=False)
    least = f"{found.bytes / 1e6:.1f} MB, {found.flops / 1e9:.2f} GFLOP: at least {found.floor_us:.1f} us on {found.device.name}"
    console.print(f"{least} ({found.device.bandwidth_gbs:.0f} GB/s, {found.device.product_tflops:g} TFLOP/s)", highlight=False)
    table = Table("", "candidate", "predicted", "measured", "host", "configs", "why")
    for row in found.rows:
        measured = "" if row.measured_us is None else f"{row.measured_us:.1f} us" + ("" if row.noise is None else f" ±{row.noise:.0%}")
        table.add_row(
            "→" if row.runs else "",
            row.implementation,
            "" if row.predicted_us is None else f"{row.predicted_us:.1f} us",
            measured,
            "" if row.host_us is None else f"{row.host_us:.1f} us",
            str(row.configs) if row.configs else "",
            row.words,
        )
    console.print(table)
    winner = next(row for row in found.rows if row.runs)
    console.print(f"runs {winner.implementation} {winner.config}".rstrip(), highlight=False, markup=False)
    if found.measured:
        console.print(f"measured {found.measured}", highlight=False)
    for name, why in found.refused:
        console.print(f"not timed: {name}: {why}", highlight=False, markup=False)
    console.print()


def explain(
    function: Annotated[str, typer.Argument(metavar="OP", help="A public function: rms_norm, attention, ...")],
    shape: Annotated[
        str | None,
        typer.Option(
            help="Its sizes: 16384x4096; for attention BATCHxSEQxHEADSxKV_HEADSxWIDTH.", show_default="a large one, which is said"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, or a GPU that need not be here: " + ", ".join(backends.NAMED) + ".", show_default="this machine's"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "bf16",
    keywords: Annotated[list[str] | None, typer.Option("--with", help="A keyword argument: causal=true. May be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the candidates of an operator's problem, predicted and measured, and why the winner runs."""
    on = device_named(device)
    checks.one_of("explain", "operator", function, tuple(CALLS))
    shape = USUAL[CALLS[function][0]] if shape is None else shape
    posed = problems_of(function, shape, dtype, keywords_of(keywords or []))
    with contextlib.nullcontext() if on.kind == "cpu" else features.assumed(on.kind):
        found = [schedule.explain(operator, phase, problem, on) for operator, phase, problem in posed]
    if as_json:
        plain = [{**e._asdict(), "device": e.device._asdict(), "rows": [row._asdict() for row in e.rows]} for e in found]
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
        return
    for one in found:
        show(one)
