"""The fingerprint is its definition, bit for bit, and sees what it must; the other figures are what plain torch makes of the values."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch

import ops_math as om
from ops_math.ops.figures import eager, op, plain, reference
from ops_math.ops.figures.problem import CHUNK_BYTES, HASH_AT, LENGTH, SAMPLES_AT, SKETCH_AT, SLAB_BYTES, WIDTHS, mixed

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool)
CHUNK = CHUNK_BYTES // 4  # float32
SLAB = SLAB_BYTES // 4


def row(t: torch.Tensor, sketch: bool = True) -> torch.Tensor:
    table = om.FigureTable()
    assert table.add(t, sketch) == 0
    return table.fetch()[0]


def mark(t: torch.Tensor) -> tuple[int, int]:
    return tuple(row(t, False)[HASH_AT:].view(torch.int64).tolist())


def defined(t: torch.Tensor) -> tuple[int, int]:
    t = t.contiguous().reshape(-1)
    return reference.fingerprint(bytes(t.view(torch.uint8).tolist()) if t.numel() else b"")


def drawn(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 40
    return x > 0 if dtype == torch.bool else x.abs().to(dtype) if str(dtype).startswith("torch.uint") else x.to(dtype)


@pytest.mark.parametrize("dtype", FLOATING + WHOLE, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 4099])
def test_the_fingerprint_is_its_definition_in_every_dtype(dtype, count):
    assert mark(drawn(count, dtype)) == defined(drawn(count, dtype))


@pytest.mark.parametrize(
    "count", [2 * WIDTHS[1], 2 * WIDTHS[0], SLAB - 1, SLAB, SLAB + 1, CHUNK - 1, CHUNK, 2 * CHUNK, 3 * CHUNK + SLAB + 3]
)
def test_the_fingerprint_is_its_definition_at_every_border(count):
    assert mark(drawn(count)) == defined(drawn(count))


def test_the_fingerprint_stays_what_it_is():
    """Traces of one format are compared over years: these numbers change only with the format."""
    assert mark(torch.arange(5, dtype=torch.int32)) == (5528083529858866040, -5368378978803545700)
    assert mark(torch.zeros(3)) == tuple(torch.tensor([12]).mul(torch.tensor([mixed(-2) | 1, mixed(-3) | 1])).tolist())


def test_every_bit_of_a_tensor_changes_both_halves():
    x = drawn(3 * SLAB + 5)
    plain = mark(x)
    bits = x.view(torch.int32)
    places = [0, 1, 2041, 2042, 2047, 2048, SLAB - 1, SLAB, 2 * SLAB + 17, x.numel() - 2, x.numel() - 1]
    for place, bit in itertools.product(places, range(32)):
        bits[place] ^= -(2**31) if bit == 31 else 1 << bit
        changed = mark(x)
        assert changed[0] != plain[0]
        assert changed[1] != plain[1]
        bits[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert mark(x) == plain


@pytest.mark.parametrize("dtype", FLOATING + WHOLE, ids=str)
def test_the_last_element_of_an_odd_size_counts(dtype):
    x = drawn(4099, dtype)
    y = x.clone()
    y.view(torch.uint8)[-1] ^= 1
    assert mark(y) != mark(x)
    assert mark(x[:-1]) != mark(x)


def test_two_values_that_are_exchanged_are_seen_wherever_they_stand():
    x = drawn(2 * CHUNK + 11)
    seen = {mark(x)}
    pairs = [(5, 5 + far) for far in (1, 2, 2 * WIDTHS[1], 2 * WIDTHS[0], 4 * WIDTHS[0] * WIDTHS[1] % CHUNK, SLAB, CHUNK)]
    pairs += [(0, x.numel() - 1), (CHUNK - 1, CHUNK)]
    for a, b in pairs:
        y = x.clone()
        y[[a, b]] = y[[b, a]]
        seen.add(mark(y))
    assert len(seen) == 1 + len(pairs)


def test_blocks_and_chunks_that_are_exchanged_are_seen():
    x = drawn(4 * CHUNK)
    seen = {mark(x)} | {mark(x.view(-1, width).flip(0).reshape(-1)) for width in (2 * WIDTHS[0], SLAB, CHUNK)}
    seen |= {mark(x.roll(n)) for n in (1, 2 * WIDTHS[1], 2 * WIDTHS[0], SLAB, CHUNK)}
    assert len(seen) == 9


def test_changes_at_four_corners_of_any_rectangle_of_powers_of_two_are_seen():
    """Low entropy: four equal changes that cancel in rows and columns, as a moved mask makes them."""
    plain = torch.zeros(CHUNK // 2, dtype=torch.int64)
    seen, tried = {mark(plain)}, 0
    for a, b in itertools.combinations([2**n for n in range(16)], 2):
        y = plain.clone()
        y[0], y[a], y[b], y[a + b] = 1, -1, -1, 1
        seen.add(mark(y))
        tried += 1
    assert len(seen) == 1 + tried


def test_two_signs_that_flip_do_not_cancel():
    x = drawn(2 * SLAB).abs()
    seen = {mark(x)}
    places = [3, 5, 2043, 2049, SLAB + 1]
    for place in places:
        y = x.clone()
        y[1], y[place] = -y[1], -y[place]
        seen.add(mark(y))
    assert len(seen) == 1 + len(places)


def test_the_sign_of_zero_and_what_nan_carries_count():
    zeros, negative = torch.zeros(9), torch.zeros(9)
    negative[4] = -0.0
    assert mark(zeros) != mark(negative)
    nans = [struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (0x7FC00000,)]
    one, other = torch.full((9,), nans[0]), torch.full((9,), nans[0])
    other.view(torch.int32)[4] = 0x7FC00001
    assert torch.isnan(other).all()
    assert mark(one) != mark(other)


def test_the_count_of_bytes_is_part_of_it():
    assert len({mark(torch.zeros(n)) for n in (0, 1, 2, 3, SLAB, CHUNK, CHUNK + 1)}) == 7
    assert mark(torch.tensor(2.5)) == mark(torch.tensor([2.5]))


def test_strides_and_where_memory_begins_do_not_count():
    x = drawn(90 * 77).view(90, 77)
    assert torch.equal(row(x.t().contiguous().t()), row(x))
    assert torch.equal(row(x[:, ::2]), row(x[:, ::2].clone()))
    assert torch.equal(row(x[:1, :5].expand(40, 5)), row(x[:1, :5].repeat(40, 1)))
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        base = drawn(9001, dtype)
        for offset in (1, 3, 8):
            assert torch.equal(row(base[offset:]), row(base[offset:].clone()))
    z = torch.complex(drawn(50), drawn(51)[:50])
    assert mark(z.conj()) == mark(z.conj().resolve_conj())
    assert mark(z.conj()) != mark(z)
    assert mark(torch._neg_view(x)) == mark(-x)


def test_a_table_that_is_filled_twice_has_the_same_bits():
    tensors = [drawn(n, d) for n, d in ((5, torch.bfloat16), (CHUNK + 3, torch.float32), (0, torch.float32), (99, torch.int8))] * 20
    tables = [om.FigureTable(), om.FigureTable()]
    numbers = [tables[0].add(t) for t in tensors]
    assert tables[1].add_all(tensors) == numbers == list(range(80))
    one, two = (table.fetch().view(torch.int64) for table in tables)
    assert torch.equal(one, two)
    assert torch.equal(tables[0].fetch().view(torch.int64), one), "a fetch leaves the table as it is"
    assert torch.equal(one[:4], one[4:8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("size", [4 * eager.ROOMS[0], 4 * eager.ROOMS[1], eager.SMALL_BYTES, SLAB_BYTES, CHUNK_BYTES, eager.SPAN_BYTES])
def test_every_figure_is_right_on_both_sides_of_where_tensors_go_another_way(dtype, size):
    for count in (size // dtype.itemsize + n for n in (-1, 0, 1)):
        x = drawn(count, dtype)
        found, expected = row(x), plain.sizes(x)
        assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
        assert torch.equal(found[1:4], expected[1:])
        assert torch.equal(found[SAMPLES_AT:HASH_AT], plain.samples(x))
        signs = torch.zeros(64, dtype=torch.float64)
        for place in (0, count // 2, count - 1):
            one = torch.zeros(count, dtype=dtype)
            one[place] = x[place]
            signs += row(one)[SKETCH_AT:SAMPLES_AT]
            x[place] = 0
        assert (found - row(x))[SKETCH_AT:SAMPLES_AT].sub(signs).abs().max().item() <= 3e-7 * found[0].sqrt().item()


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int64, torch.bool, torch.complex64], ids=str)
def test_every_so_many_th_element_has_the_figures_of_those_elements_alone(dtype):
    real = torch.float32 if dtype.is_complex else dtype
    tensors = [drawn(n, real) for n in (0, 1, 7, 5000)] + [drawn(6000, real).view(60, 100), drawn(6000, real).view(60, 100).t()]
    tensors = [torch.complex(t, t) if dtype.is_complex else t for t in tensors]
    steps = [3, 251, 1, 7, 99, 99]
    table, expected = om.FigureTable(), om.FigureTable()
    assert table.add_all(tensors, steps=steps) == list(range(6))
    for t, step in zip(tensors, steps, strict=True):
        expected.add(t.reshape(-1)[::step].clone())
    assert torch.equal(table.fetch().view(torch.int64), expected.fetch().view(torch.int64))


def test_a_small_tensor_has_the_same_figures_whoever_waits_with_it():
    tensors = [drawn(n, d) for n, d in ((5, torch.float32), (256, torch.float32), (257, torch.float32), (2048, torch.float32))]
    tensors += [drawn(n, torch.bfloat16) for n in (1, 256, 4096)] + [drawn(1024, torch.float64), drawn(900, torch.int64)]
    broken = drawn(300)
    broken[7], broken[8] = math.nan, -math.inf
    alone = torch.stack([row(t) for t in [*tensors, broken]])
    for turn in range(3):
        table = om.FigureTable()
        table.add_all([*tensors[turn:], *tensors[:turn]] * (3 * eager.KEPT // 9) + [broken])
        assert torch.equal(table.fetch()[: len(tensors)].roll(turn, 0).view(torch.int64), alone[:-1].view(torch.int64))
        assert torch.equal(table.fetch()[-1].view(torch.int64), alone[-1].view(torch.int64))


def test_a_tensor_may_be_written_to_once_it_was_added():
    for count in (3, 300, 3000, SLAB, 2 * CHUNK):
        x = drawn(count)
        expected = row(x)
        table = om.FigureTable()
        table.add(x)
        x.fill_(7.0)
        assert torch.equal(table.fetch()[0].view(torch.int64), expected.view(torch.int64))


@pytest.mark.parametrize("count", [300, SLAB + 5, 2 * CHUNK])
def test_autocast_changes_no_bit_of_a_figure(count):
    x = drawn(count)
    with torch.autocast("cpu", torch.bfloat16):
        found = row(x)
    assert torch.equal(found.view(torch.int64), row(x).view(torch.int64))


@pytest.mark.parametrize("count", [300, SLAB + 5, 2 * CHUNK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_a_table_that_is_begun_in_inference_mode_goes_on_outside(count, dtype):
    table = om.FigureTable()
    with torch.inference_mode():
        table.add(drawn(count, dtype))
    table.add(drawn(count, dtype))
    with torch.inference_mode():
        table.add(drawn(count, dtype))
    one, two, three = table.fetch().view(torch.int64)
    assert torch.equal(one, two)
    assert torch.equal(one, three)


def test_nothing_that_is_added_is_recorded_for_a_backward():
    x = drawn(3 * SLAB).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        table = om.FigureTable()
        table.add_all([x, x[:50], x[::2]])
        table.add(x * 1.0)
    assert not saved
    assert not table.fetch().requires_grad


@pytest.mark.parametrize("dtype", [*FLOATING, *WHOLE, torch.complex64], ids=str)
def test_sizes_and_samples_are_those_of_the_values(dtype):
    x = torch.complex(drawn(999), drawn(998).repeat(2)[:999]) if dtype.is_complex else drawn(2 * CHUNK + 5, dtype)
    found, expected = row(x), plain.sizes(x)
    assert found.shape == (LENGTH,)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert torch.equal(found[1:4], expected[1:])
    assert expected[2:].tolist() == [0.0, 0.0]
    assert torch.equal(found[SAMPLES_AT:HASH_AT], plain.samples(x))


@pytest.mark.parametrize("scale", [1e-25, 1e-35, 1.0, 1e22, 1e37])
def test_squares_beyond_the_range_of_float32_are_not_lost(scale):
    x = drawn(5000).clamp(-9, 9) * scale
    assert row(x)[0].item() == pytest.approx(x.double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", FLOATING[:4], ids=str)
def test_what_is_not_finite_is_counted_chunk_by_chunk_and_left_out(dtype):
    x = drawn(2 * CHUNK_BYTES // dtype.itemsize + 9, dtype)
    places = {7: math.nan, 8: math.inf, CHUNK_BYTES // dtype.itemsize + 1: -math.inf, x.numel() - 1: math.nan, x.numel() - 2: math.nan}
    for place, value in places.items():
        x[place] = value
    found, expected = row(x), plain.sizes(x)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert torch.equal(found[1:4], expected[1:])
    assert found[2:4].tolist() == [3.0, 2.0]
    assert found[SKETCH_AT:SAMPLES_AT].isfinite().all()


@pytest.mark.parametrize("count", [1, 64, 65, SLAB, CHUNK + 5, 3 * CHUNK])
def test_the_sketch_is_linear_and_keeps_every_element_once(count):
    """With the signs of single elements: a sketch of one element is that element in one of 64 places."""
    sketch = row(drawn(count))[SKETCH_AT:SAMPLES_AT]
    total = torch.zeros(64, dtype=torch.float64)
    parts = torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(1))
    for part in range(5):
        total += row(torch.where(parts == part, drawn(count), 0.0))[SKETCH_AT:SAMPLES_AT]
    assert (total - sketch).abs().max().item() < 1e-6 * drawn(count).norm().item()
    single = torch.zeros(count)
    single[count - 1] = 3.0
    alone = row(single)[SKETCH_AT:SAMPLES_AT]
    assert alone.abs().sum().item() == alone.abs().max().item() == 3.0
    assert row(drawn(count), False)[SKETCH_AT:SAMPLES_AT].count_nonzero() == 0


def test_the_sketch_knows_distances_to_a_third_and_its_own_rounding_is_below_that_of_float32():
    for seed in range(8):
        make = torch.Generator().manual_seed(seed)
        x, noise = torch.randn(2 * CHUNK + 700, generator=make), torch.randn(2 * CHUNK + 700, generator=make)
        y = x + 1e-6 * noise
        true = ((y.double() - x.double()).norm() / x.double().norm()).item()
        found = ((row(y) - row(x))[SKETCH_AT:SAMPLES_AT].norm() / x.double().norm()).item()
        assert true / 1.6 < found < 1.6 * true
        exact = (row(x.double())[0] - row(x)[0]).abs() / row(x)[0]
        assert exact < 2e-7


REFUSED = {
    "sparse": torch.eye(3).to_sparse(),
    "without values": torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_without_values_to_read_are_refused_in_words(name):
    t = REFUSED[name]
    words = rf"^FigureTable\.add: tensor must be a strided tensor with values; got a {t.layout} tensor on {t.device}\. Pass "
    with pytest.raises(om.ArgumentError, match=words):
        om.FigureTable().add(t)


def test_a_device_without_triton_is_copied_from_and_named(monkeypatch):
    class Elsewhere:
        type = "xpu"

    table = om.FigureTable()
    assert isinstance(table._part(Elsewhere()), eager.Rows)
    assert table.copied_from == {"xpu"}
    monkeypatch.setattr(op, "has_triton", lambda: False)
    table._part(torch.device("cuda:0"))
    assert table.copied_from == {"xpu", "cuda"}
