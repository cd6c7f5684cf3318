"""Do the operators keep their determinism levels on this device, and what do the levels cost?

    PYTHONPATH=src:. python tools/gpu/determinism.py [--repeats 1000] [--seconds 100] [--only price,step,cuts,company,ranks,repeats]

Level 1: every call over and over while another stream keeps the device busy; bits are compared on the device. Level 2: batches cut in many
ways, among them pieces of 1, 15, 16 and 17 rows, for which Triton compiles kernels of their own; token blocks; documents in other company.
Level 3: heads and shards of weights on 1, 2 and 4 ranks, one after the other. The price: levels 0, 1 and 2 interleaved. One line
of JSON each; a line with `"kept": false` is a broken promise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import ops_math as om
from ops_math import backends, catalog
from ops_math.schedule.accuracy import as_results
from ops_math.testing import Draw, run
from ops_math.testing.capture import watch
from ops_nn.adopt import adopt
from ops_nn.models import build
from tests.determinism import ranks as cuts
from tests.determinism.calls import SAMPLES, Sample, differing, drawn, heads, in_pieces, joined, normal, outcome, params, rows

PARTS = ("price", "step", "cuts", "company", "ranks", "repeats")
CUTS = ([1] * 33, [33], [1, 32], [16, 17], [15, 2, 16])
BLOCK = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def long_heads(width: int, *counts: int) -> Callable[[torch.Generator, int], list[torch.Tensor]]:
    """[n, 512, heads, width] each."""
    return lambda g, n: [normal(g, n, 512, h, width) for h in counts]


def attend(first: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention."""
    return om.attention(q, k, v, causal=True)


# Widths as models have them, beside the odd ones of the tests.
AS_MODELS = (
    Sample("rms_norm 4096", rows(4096), params(4096), lambda _, x, w: om.rms_norm(x, w), 1),
    Sample("rms_norm 20000", rows(20000), params(20000), lambda _, x, w: om.rms_norm(x, w), 1),
    Sample("layer_norm 1024", rows(1024), params(1024, 1024), lambda _, x, w, b: om.layer_norm(x, w, b), 1),
    Sample("softmax 30000", rows(30000), params(), lambda _, x: om.softmax(x), 1),
    Sample("swiglu 8192", rows(8192, 2), params(), lambda _, a, b: om.swiglu(a, b), 1),
    Sample("gelu 4096", rows(4096), params(4096), lambda _, x, b: om.gelu(x, b), 1),
    Sample(
        "cross_entropy 128256",
        lambda g, n: [normal(g, n, 128256), torch.randint(0, 128256, (n,), generator=g)],
        params(),
        lambda _, z, t: om.cross_entropy(z, t, reduction="none"),
        1,
    ),
    Sample("linear", rows(1024), lambda g: [normal(g, 1536, 1024) / 32, normal(g, 1536)], lambda _, x, w, b: om.linear(x, w, b), 1),
    Sample("linear odd", rows(333), lambda g: [normal(g, 257, 333) / 18, normal(g, 257)], lambda _, x, w, b: om.linear(x, w, b), 1),
    Sample("attention 64", long_heads(64, 8, 2, 2), params(), attend, 512),
    Sample("attention 128", long_heads(128, 4, 4, 4), params(), attend, 512),
    Sample("attention 24", heads(6, 2, 2), params(), attend, 21),
)


def say(**fields: Any) -> None:
    """One line."""
    print(json.dumps(fields), flush=True)


class Load:
    """Products of other sizes on a stream of their own, so that kernels meet a device that is not theirs alone."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream() if DEVICE == "cuda" else None
        self.a = torch.randn(2048, 2048, device=DEVICE) if self.stream else None

    def push(self) -> None:
        """Start some more."""
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                for _ in range(4):
                    self.a = torch.tanh(self.a @ self.a)


def level_one(sample: Sample, dtype: torch.dtype, repeats: int, until: float) -> bool:
    """The same bits every time."""
    load = Load()
    with om.determinism(1):
        given = drawn(sample, 33, DEVICE, dtype)
        first = [t for part in outcome(sample, *given, 0) for t in part]
        wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        done = 0
        while done < repeats and (done < 20 or time.perf_counter() < until):
            if done % 10 == 0:
                load.push()
            again = [t for part in outcome(sample, *given, 0) for t in part]
            for a, b in zip(first, again, strict=True):
                wrong += (a.view(torch.uint8) != b.view(torch.uint8)).any()
            done += 1
    kept = int(wrong) == 0
    say(level=1, call=sample.name, dtype=str(dtype), repeats=done, kept=kept)
    return kept


def level_two(sample: Sample, dtype: torch.dtype) -> bool:
    """Cuts of the batch, and token blocks."""
    fine = True
    with om.determinism(2, token_block=BLOCK):
        given = drawn(sample, 33, DEVICE, dtype)
        whole = outcome(sample, *given, 0)
        for cuts in CUTS:
            parts = joined(in_pieces(sample, cuts, *given))
            wrong = differing(whole.outputs, parts.outputs), differing(whole.inputs, parts.inputs)
            if wrong != ([], []):
                fine = False
                say(level=2, call=sample.name, dtype=str(dtype), cuts=cuts[:4], outputs=wrong[0], input_gradients=wrong[1], kept=False)
        if whole.shared and dtype == torch.float32 and sample.token_rows == 1:
            given = drawn(sample, 3 * BLOCK + 7, DEVICE, dtype)
            whole = outcome(sample, *given, 0)
            wrong_sums = differing(whole.shared, joined(in_pieces(sample, [BLOCK] * 3 + [7], *given)).shared)
            if wrong_sums:
                fine = False
                say(level=2, call=sample.name, dtype=str(dtype), parameter_gradients=wrong_sums, kept=False)
    if fine:
        say(level=2, call=sample.name, dtype=str(dtype), kept=True)
    return fine


def company(dtype: torch.dtype) -> bool:
    """Packed documents, alone and with others."""
    lengths = [5, 700, 1, 130, 64]
    g = torch.Generator().manual_seed(2)
    tensors = [normal(g, sum(lengths), h, 64).to(DEVICE, dtype) for h in (8, 2, 2)]

    def packed(chosen: list[int]) -> dict[int, list[torch.Tensor]]:
        sizes = [lengths[i] for i in chosen]
        ends = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
        leaves = [torch.cat([t.split(lengths)[i] for i in chosen]).requires_grad_() for t in tensors]
        out = om.attention(*leaves, causal=True, cu_seqlens_q=ends)
        out.float().square().sum().backward()
        return {i: [t.split(sizes)[n] for t in (out.detach(), *(leaf.grad for leaf in leaves))] for n, i in enumerate(chosen)}

    with om.determinism(2):
        together = packed([0, 1, 2, 3, 4])
        fine = all(not differing(found, together[i]) for chosen in ([1], [3, 1], [4, 0, 2], [2]) for i, found in packed(chosen).items())
    say(level=2, call="attention of packed documents", dtype=str(dtype), kept=fine)
    return fine


def in_pairs(parts: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours first, then their sums."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def level_three(dtype: torch.dtype) -> bool:
    """Shards of heads, of a weight's outputs and of its inputs, and all cuts of `tests.determinism.ranks`."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (normal(g, 2, 256, h, 64).to(DEVICE, dtype) for h in (16, 4, 4))
    x, w = normal(g, 37, 1024).to(DEVICE, dtype), (normal(g, 1024, 1024) / 32).to(DEVICE, dtype)
    gate, up = (normal(g, 37, 4096).to(DEVICE, dtype) for _ in range(2))
    fine = {}
    with om.determinism(3):
        for degree in (2, 4):
            ranks = range(degree)
            heads_apart = torch.cat([om.attention(*(t.chunk(degree, 2)[r].contiguous() for t in (q, k, v)), causal=True) for r in ranks], 2)
            fine[f"attention heads on {degree}"] = torch.equal(om.attention(q, k, v, causal=True), heads_apart)
            outputs = torch.cat([om.linear(x, part, parts=(4, 4 // degree)) for part in w.chunk(degree)], 1)
            fine[f"linear outputs on {degree}"] = torch.equal(om.linear(x, w, parts=(4, 4)), outputs)
            shards = zip(x.chunk(degree, 1), w.chunk(degree, 1), strict=True)
            sums = in_pairs([om.linear(a.contiguous(), b.contiguous(), parts=(4 // degree, 4), wide=True) for a, b in shards])
            fine[f"linear inputs on {degree}"] = torch.equal(om.linear(x, w, parts=(4, 4), wide=True), sums)
            if DEVICE == "cuda":  # on a CPU its level is 2
                units = [om.swiglu(a.contiguous(), b.contiguous()) for a, b in zip(gate.chunk(degree, 1), up.chunk(degree, 1), strict=True)]
                fine[f"swiglu columns on {degree}"] = torch.equal(om.swiglu(gate, up), torch.cat(units, 1))
    fine |= cuts_of_ranks(dtype)
    for name, kept in fine.items():
        say(level=3, call=name, dtype=str(dtype), kept=kept)
    return all(fine.values())


def cuts_of_ranks(dtype: torch.dtype) -> dict[str, bool]:
    """Whether two and four ranks that hold heads, rows or columns have the outputs and gradients of one."""
    fine = {}
    with om.determinism(3, token_block=16):
        for cut in (*cuts.BY_HEADS, *cuts.BY_ROWS, *(cuts.BY_COLUMNS if DEVICE == "cuda" else ())):
            one, *more = [cuts.at(cut, degree, DEVICE, dtype) for degree in cuts.DEGREES]
            for degree, found in zip(cuts.DEGREES[1:], more, strict=True):
                same = [differing(one[part], found[part]) for part in ("outputs", "gradients")]
                fine[f"{cut.name} on {degree}"] = same == [[], []]
        if DEVICE == "cuda":
            one, *more = [cuts.stepped(degree, DEVICE) for degree in cuts.DEGREES]
            fine["adamw on shards"] = all(differing(one, found) == [] for found in more)
    return fine


def signatures() -> bool:
    """Every configuration of one signature gives the same bits: level 1 lets a calibration exchange them."""
    fine = True
    for name, operator in catalog.operators().items():
        kernels = next(i for i in operator.implementations() if i.name == "triton_gpu")
        for case in operator.file("problem").CASES[:4]:
            seen = watch(lambda: run(operator.public[case.fn], case.make(Draw(1, "bf16", DEVICE)), case.frozen))  # noqa: B023
            for call in (c for c in seen.calls if c.operator == name):
                phase = operator.phases[call.phase]
                problem, device = phase.problem_of(*call.args), backends.device_of(torch.device(DEVICE))
                if kernels.optional("supports", lambda *_: None)(problem, device, call.phase):
                    continue
                by_order: dict[str, list[torch.Tensor]] = {}
                for config in kernels.module.configs(problem, device, call.phase):
                    order = kernels.signature(problem, config, call.phase)
                    if order is None or call.phase == "inplace":
                        continue
                    made = as_results(kernels.launcher(call.phase)(problem, config, *call.args[: phase.num_tensors]), call.args)
                    first = by_order.setdefault(order, list(made))
                    if differing(first, list(made)):
                        fine = False
                        say(signature=order, call=name, case=case.name, phase=call.phase, config=str(config), kept=False)
    say(signatures="configurations that may be exchanged", kept=fine)
    return fine


def clocked(call: Callable[[], Any]) -> float:
    """Time of one call [us]: of the device, or of the host on a CPU."""
    if DEVICE != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def price(sample: Sample, size: int, dtype: torch.dtype) -> None:
    """Forward and backward at levels 0, 1 and 2, in turns, the median of each, host time included where the device waits for it."""
    batch, shared, grads = drawn(sample, size, DEVICE, dtype)
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in (*batch, *shared)]
    learning = [t for t in leaves if t.requires_grad]

    def call() -> None:
        made = sample.run(0, *leaves)
        torch.autograd.grad(list(made) if isinstance(made, tuple) else [made], learning, grads)

    times: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for turn in range(3 + (12 if DEVICE == "cuda" else 2)):
        for level, found in times.items():
            with om.determinism(level):
                took = clocked(call)
            if turn >= 3:
                found.append(took)
    middle = {level: statistics.median(found) for level, found in times.items()}
    say(price=sample.name, rows=size * sample.token_rows, dtype=str(dtype), us={k: round(v, 1) for k, v in middle.items()},
        times_level_0={k: round(v / middle[0], 3) for k, v in middle.items()})  # fmt: skip


def step_price(name: str, batch: int, seq: int, dtype: torch.dtype, turns: int = 6) -> None:
    """Forward and backward of a whole model at levels 0, 1 and 2, in turns. At level 2 the head and its loss are two operators, since
    `linear_cross_entropy` calls the vendor's products; the loss is divided by a count that does not follow the batch."""
    model = build(name, device=DEVICE, dtype=dtype)
    adopt(model, pack=True)
    ids = torch.randint(0, model.config.vocab_size, (batch, seq), device=DEVICE)
    labels, count = torch.roll(ids, -1, 1), torch.tensor(float(ids.numel()), device=DEVICE)

    def call(level: int) -> None:
        hidden, weight = model.model(ids), model.lm_head.weight
        if level < 2:
            loss = om.linear_cross_entropy(hidden, weight, labels, num_tokens=count)
        else:
            loss = om.cross_entropy(om.linear(hidden, weight), labels, num_tokens=count)
        loss.backward()
        model.zero_grad(set_to_none=True)

    times: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for turn in range(2 + turns):
        for level, found in times.items():
            with om.determinism(level):
                took = clocked(lambda level=level: call(level))
            if turn >= 2:
                found.append(took)
    middle = {level: statistics.median(found) for level, found in times.items()}
    say(price=f"{name}, forward and backward", rows=ids.numel(), dtype=str(dtype), ms={k: round(v / 1e3, 2) for k, v in middle.items()},
        times_level_0={k: round(v / middle[0], 3) for k, v in middle.items()})  # fmt: skip


def main() -> None:
    """All of it; the exit code is 1 where a promise was broken."""
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=1000 if DEVICE == "cuda" else 20)
    options.add_argument("--seconds", type=float, default=100.0, help="for the whole")
    options.add_argument("--only", default=",".join(PARTS), help="separated by commas")
    asked = options.parse_args()
    parts = asked.only.split(",")
    start = time.perf_counter()
    say(device=torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu", torch=torch.__version__, ops_math=om.__version__)
    samples = (*SAMPLES, *AS_MODELS) if DEVICE == "cuda" else SAMPLES
    dtypes = (torch.bfloat16, torch.float32) if DEVICE == "cuda" else (torch.float32,)
    fine = []
    for sample in (AS_MODELS if DEVICE == "cuda" else SAMPLES[:2]) if "price" in parts else ():
        few = 1024 if "128256" in sample.name else 8192
        price(sample, 8 if sample.token_rows > 1 else few if DEVICE == "cuda" else 64, dtypes[0])
    if "step" in parts:
        step_price(*(("llama-1b", 8, 2048, dtypes[0]) if DEVICE == "cuda" else ("llama-tiny", 2, 16, dtypes[0], 1)))
    if "cuts" in parts:
        fine += [level_two(sample, dtype) for sample in samples for dtype in dtypes]
        fine += [signatures()] if DEVICE == "cuda" else []
    if "company" in parts:
        fine += [company(dtype) for dtype in dtypes]
    if "ranks" in parts:
        fine += [level_three(dtype) for dtype in dtypes]
    left = max(asked.seconds - (time.perf_counter() - start), 10.0)
    for number, sample in enumerate(samples if "repeats" in parts else ()):
        until = start + asked.seconds - left + left * (number + 1) / len(samples)
        fine.append(level_one(sample, dtypes[0], asked.repeats, until))
    say(kept=all(fine), seconds=round(time.perf_counter() - start, 1))
    sys.exit(not all(fine))


if __name__ == "__main__":
    main()
