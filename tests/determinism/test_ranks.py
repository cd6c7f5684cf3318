"""Level 3: as many tensor-parallel ranks as one likes give the bits of one device, or the call is refused in words."""

from __future__ import annotations

import re

import pytest
import torch

import ops_math as om
from ops_math import backends, catalog, settings
from ops_math.schedule.choose import choose, order_of_sums
from ops_math.schedule.collect import Collector
from ops_math.schedule.levels import chosen_for
from ops_math.schedule.record import EMPTY
from tests.determinism import ranks
from tests.determinism.calls import differing

BLOCK = 16
HONOURED = [*ranks.BY_HEADS, *ranks.BY_ROWS]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cut", HONOURED, ids=lambda c: c.name)
def test_ranks_that_hold_heads_or_rows_give_the_bits_of_one_device(cut):
    with om.determinism(3, token_block=BLOCK):
        one, *more = [ranks.at(cut, degree) for degree in ranks.DEGREES]
    assert one["outputs"]
    assert one["gradients"]
    for found in more:
        assert differing(one["outputs"], found["outputs"]) == []
        assert differing(one["gradients"], found["gradients"]) == []


def test_what_is_refused_on_a_cpu_differs_there_so_that_the_tests_can_fail():
    changed = []
    for cut in ranks.BY_COLUMNS:
        one, two, four = (ranks.at(cut, degree) for degree in ranks.DEGREES)
        changed += [cut.name for found in (two, four) for part in ("outputs", "gradients") if differing(one[part], found[part])]
    assert changed


def test_an_order_of_sums_that_follows_the_number_of_heads_is_caught():
    """Planted: as a kernel that splits its sums by what there is for it to do."""
    eager = next(i for i in catalog.operators()["attention"].implementations() if i.name == "eager")
    honest = eager.launcher("fwd")

    def by_heads(p, config, *tensors):
        out, *rest = honest(p, config, *tensors)
        return out * (1 + 1e-7 * p.heads), *rest

    eager.replaced["fwd"] = by_heads
    catalog.operators()["attention"].forget()
    try:
        with om.determinism(3):
            one, two = (ranks.at(ranks.BY_HEADS[0], degree) for degree in (1, 2))
    finally:
        eager.replaced.clear()
        catalog.operators()["attention"].forget()
    assert differing(one["outputs"], two["outputs"]) == [0]


def test_under_sequence_parallelism_a_norms_weight_gradient_has_the_bits_of_one_device_where_a_rank_holds_a_token_block():
    """Blocks are added one after the other. Of two ranks with two blocks each the second adds its own first, which is another order."""
    another_order = []
    for cut in ranks.BY_ROWS[:4]:
        with om.determinism(3, token_block=BLOCK):
            one, two, four = (ranks.at(cut, degree)["of whole tensors"] for degree in ranks.DEGREES)
        assert differing(one, four) == [], cut.name
        another_order += differing(one, two)
    assert another_order


@pytest.mark.parametrize("cut", ranks.BY_COLUMNS, ids=lambda c: c.name)
def test_on_a_cpu_what_is_cut_by_columns_is_refused_with_the_reason(cut):
    with om.determinism(3), pytest.raises(om.UnsupportedError) as error:
        ranks.at(cut, 2)
    why = (
        "offers no determinism level 3 for this problem (PyTorch works on the last columns of a row with other instructions, so a shard of"
    )
    assert why in str(error.value)
    assert "Ask for a lower level than 3, with determinism() around this call" in str(error.value)


def test_what_no_cut_keeps_is_refused_in_words_before_the_backward():
    x, w, t, q = torch.randn(4, 8), torch.randn(16, 8), torch.zeros(4, dtype=torch.long), torch.randn(1, 4, 2, 8)
    bias = torch.zeros(8, requires_grad=True)
    mlp = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    refusals = [
        (lambda: om.gelu(x, bias), r"^gelu at determinism level 3: the sum for the bias is split among programs by the number of columns"),
        (lambda: om.linear_cross_entropy(x, w, t), r"its matrix products are a vendor library's, which promises level 1"),
        (lambda: om.attention(q, q, q, dropout_p=0.1, rng=om.Rng(1)), r"a mask is drawn by the number of the head on its own rank"),
        (lambda: om.cross_entropy(x, t), r"a mean over the batch's own tokens follows the batch: pass num_tokens="),
        (lambda: om.residual_mlp(x, None, mlp), r"^a block at determinism level 3: it does not know the tensor-parallel degree"),
        (lambda: ranks.stepped(1), r"^adamw \(step\): .*a shard of a parameter may end in other instructions"),
    ]  # fmt: skip
    for call, words in refusals:
        with om.determinism(3), pytest.raises(om.UnsupportedError) as error:
            call()
        assert re.search(words, str(error.value)), str(error.value)


def test_stochastic_rounding_offers_no_level_3_on_any_device():
    from ops_math.ops.adamw.levels import LEVELS
    from ops_math.ops.adamw.problem import AdamWProblem

    problem = AdamWProblem(100, 2, "bf16", "bf16", "bf16")
    assert LEVELS.offer(problem, "triton_gpu", None, "step").level == 3
    rounded = LEVELS.offer(problem._replace(stochastic=True), "triton_gpu", None, "step")
    assert rounded == (2, "stochastic rounding draws by an element's place in its shard")


def bf16(*shape):
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def total(y):
    sum(t.float().sum() for t in (y if isinstance(y, tuple) else (y,))).backward()


# At the sizes of models, of which a rank of four has a quarter.
AS_IN_MODELS = {
    "swiglu": lambda d: total(om.swiglu(bf16(16, 11008 // d), bf16(16, 11008 // d))),
    "swiglu_packed": lambda d: total(om.swiglu_packed(bf16(16, 2 * 11008 // d))),
    "gelu": lambda d: total(om.gelu(bf16(16, 4096 // d))),
    "gelu with a constant bias": lambda d: total(om.gelu(bf16(16, 4096 // d), torch.zeros(4096 // d))),
    "attention, 8 heads on one": lambda d: total(om.attention(*(bf16(1, 64, h // d, 64) for h in (32, 4, 4)), causal=True)),
    "attention, wide": lambda d: total(om.attention(*(bf16(1, 64, 16 // d, 128) for _ in range(3)))),
    "rope": lambda d: total(om.rope(bf16(2, 64, 32 // d, 64), bf16(2, 64, 8 // d, 64), torch.randn(64, 32), torch.randn(64, 32))),
    "softmax of scores": lambda d: total(om.softmax(bf16(2, 16 // d, 32, 1000))),
    "linear, by outputs": lambda d: total(om.linear(bf16(8, 1024), bf16(1024 // d, 1024), parts=(4, 4 // d))),
    "linear, by inputs": lambda d: total(om.linear(bf16(8, 1024 // d), bf16(1024, 1024 // d), parts=(4 // d, 4), wide=True)),
}  # fmt: skip


@pytest.mark.parametrize("device", ["a100", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("name", AS_IN_MODELS)
def test_what_is_chosen_for_a_gpu_at_level_3_does_not_follow_the_degree(name, device):
    """Nor may its order of sums: a tile that followed the number of heads or columns would sum in another one."""
    pytest.importorskip("triton", reason="missing capability: Triton")
    policy, facts = settings.policy()._replace(determinism=3), backends.NAMED[device]
    orders: dict[tuple[str, str], set[str]] = {}
    for degree in ranks.DEGREES:
        with Collector(1 << 30) as met:
            AS_IN_MODELS[name](degree)
        for one in met.met.values():
            operator = catalog.operators()[one.op]
            stands_for = chosen_for(operator.levels(), one.problem, 3, policy.token_block)
            storage, cost = operator.file("problem").storage(stands_for), operator.cost(stands_for, one.phase)
            found = choose(operator.implementations(), stands_for, cost, storage, one.phase, facts, policy, EMPTY, one.problem)
            elementwise = one.op in ("glu", "gelu", "rope")  # no sums at all
            order = found.implementation.name if elementwise else order_of_sums(found.implementation, stands_for, found.config, one.phase)
            orders.setdefault((one.op, one.phase), set()).add(order)
    assert {phase for _, phase in orders} == {"fwd", "bwd"}
    assert [key for key, seen in orders.items() if len(seen) != 1] == [], orders
