"""What was measured: times of implementations on problems, by device, keyed so that a wrong match is impossible.

Two layers. *Shipped* entries come with the library and hold for a device name and a range of sizes. *Measurements* were made on this
very machine by this very software: they hold for one problem exactly, and for problems of its bucket where nothing is closer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from ops_math.settings import Policy
from ops_math.spec import Device

EXACT_BELOW = 64  # sizes below keep their value in a bucket; they are head counts and widths, which change what is fastest
GRAIN = 8  # a size that is no multiple of it is in a bucket of its own: kernels read such rows less well
FARTHEST = 4.0  # a winner may tie with what is a little faster; one that is so far from the fastest was written by hand
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Entry(NamedTuple):
    """Times [us] of implementations at one point. It holds for problems of this operator, phase, dtype and device name whose size
    [B, least traffic] is within `size_low` and `size_high`."""

    op: str
    phase: str
    device: str
    dtype: str
    size_low: int
    size_high: int
    times_us: dict[str, float]
    source: str


class Measurement(NamedTuple):
    """One problem, measured. Keys of `times_us` [us], `host_us` [us] and `noise` (relative) are labels, `triton_gpu:Config(...)`.

    `problem` and `bucket` are the problem in words, exactly and roughly. `source` is a digest of the operator's files. `ties` cannot be
    told from the winner. `refused` says why a candidate was not timed, `checked` what its numbers were held to; `when` is in UTC.
    """

    op: str
    phase: str
    problem: str
    bucket: str
    dtype: str
    policy: str
    source: str
    times_us: dict[str, float]
    noise: dict[str, float]
    host_us: dict[str, float]
    winner: str
    ties: tuple[str, ...]
    refused: dict[str, str]
    checked: str
    when: str

    @property
    def key(self) -> tuple[str, ...]:
        """What it holds for; one file has one measurement a key."""
        return self.op, self.phase, self.dtype, self.policy, self.source, self.problem


class Ceilings(NamedTuple):
    """What a device was measured to reach: copying [GB/s, read and written], products [TFLOP/s], starting one kernel [us]."""

    bandwidth_gbs: float
    bf16_tflops: float
    fp32_tflops: float
    launch_us: float


class Record(NamedTuple):
    """Everything that a choice may read besides its problem: shipped entries, measurements of this machine, its ceilings.

    `exact` and `rough` are keyed by (operator, phase, dtype, policy, problem or bucket). `frozen` is empty, or `predict` or `refuse`:
    what a problem gets that is not in the record. `silent` says in words why measurements of this machine are not used.
    """

    entries: tuple[Entry, ...]
    exact: Mapping[tuple[str, ...], Measurement] = _NOTHING
    rough: Mapping[tuple[str, ...], Measurement] = _NOTHING
    ceilings: Ceilings | None = None
    frozen: str = ""
    silent: str = ""

    def lookup(self, op: str, phase: str, device: str, dtype: str, size: int) -> Entry | None:
        """The first shipped entry that covers the problem."""
        for e in self.entries:
            if e.op == op and e.phase == phase and e.device == device and e.dtype == dtype and e.size_low <= size <= e.size_high:
                return e
        return None

    def measurement(self, op: str, phase: str, dtype: str, policy: Policy, problem: Any) -> tuple[Measurement | None, bool]:
        """The measurement of the problem, or of one like it, and whether it is of this very problem."""
        if not self.exact:
            return None, False
        where = (op, phase, dtype, policy_text(policy))
        found = self.exact.get((*where, str(problem)))
        return (found, True) if found is not None else (self.rough.get((*where, bucket(problem))), False)

    def on(self, device: Device, dtype: str) -> Device:
        """The device with its measured ceilings, where there are any."""
        if self.ceilings is None:
            return device
        products = self.ceilings.fp32_tflops if dtype == "fp32" and device.kind == "cpu" else self.ceilings.bf16_tflops
        return device._replace(
            bandwidth_gbs=self.ceilings.bandwidth_gbs, product_tflops=products or device.product_tflops, launch_us=self.ceilings.launch_us
        )


EMPTY = Record(())


def policy_text(policy: Policy) -> str:
    """The part of a policy that measurements depend on: not what was forced, which reaches no measurement, nor the token block, whose
    number of rows is the problem's."""
    unread = ("forced", "token_block")
    return " ".join(f"{name}={value}" for name, value in zip(policy._fields, policy, strict=True) if name not in unread)


def bucket(problem: Any) -> str:
    """The problem with its sizes rounded down to 1 or 1.5 times a power of two, so that ever new lengths meet few buckets.

    Sizes below 64 stay as they are, `+` marks those that are no multiple of 8, and other numbers count as zero or not.
    """
    names = getattr(problem, "_fields", None)
    if names is None:
        return str(problem)
    return type(problem).__name__ + "(" + ", ".join(f"{n}={_rounded(v)}" for n, v in zip(names, problem, strict=True)) + ")"


def _rounded(value: Any) -> str:
    if isinstance(value, float):
        return "0" if value == 0 else "x"
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) < EXACT_BELOW:
        return repr(value)
    power = 1 << (abs(value).bit_length() - 1)
    low = power * 3 // 2 if abs(value) >= power * 3 // 2 else power
    return f"{'-' if value < 0 else ''}~{low}{'+' if value % GRAIN else ''}"


def label(implementation: str, config: Any) -> str:
    """An implementation and its configuration in one word, as records and reports name it."""
    return implementation if config is None else f"{implementation}:{config}"


def of_measurements(base: Record, measurements: Iterable[Measurement], ceilings: Ceilings | None) -> Record:
    """A record with these measurements over the shipped ones of `base`; of several that fit a bucket, the newest speaks for it."""
    exact: dict[tuple[str, ...], Measurement] = {}
    rough: dict[tuple[str, ...], Measurement] = {}
    for m in sorted(measurements, key=lambda m: (m.when, m.key)):
        exact[m.op, m.phase, m.dtype, m.policy, m.problem] = m
        rough[m.op, m.phase, m.dtype, m.policy, m.bucket] = m
    return base._replace(exact=exact, rough=rough, ceilings=ceilings)


def parse(rows: list[dict[str, Any]]) -> Record:
    """A record from rows as in `measured.json`."""
    return Record(tuple(Entry(**row) for row in rows))


def to_row(measurement: Measurement) -> dict[str, Any]:
    """A measurement as plain data."""
    return {**measurement._asdict(), "ties": list(measurement.ties)}


def from_row(row: Any) -> Measurement:
    """A measurement from plain data.

    Raises:
        ValueError: it is not one, with what is wrong in words.
    """
    if not isinstance(row, dict) or set(row) != set(Measurement._fields):
        raise ValueError("a row has not the fields of a measurement")
    words = ("op", "phase", "problem", "bucket", "dtype", "policy", "source", "winner", "checked", "when")
    if any(not isinstance(row[name], str) or not row[name] for name in words):
        raise ValueError("a field that should hold words does not")
    for name in ("times_us", "noise", "host_us"):
        _check_numbers(row[name], name, above_zero=name == "times_us")
    if not isinstance(row["refused"], dict) or any(not isinstance(why, str) for why in row["refused"].values()):
        raise ValueError("`refused` does not hold reasons")
    if (
        not isinstance(row["ties"], list | tuple)
        or row["winner"] not in row["times_us"]
        or any(not isinstance(t, str) or t not in row["times_us"] for t in row["ties"])
    ):
        raise ValueError("the winner, or what ties with it, was not timed")
    best = min(row["times_us"].values())
    if row["times_us"][row["winner"]] > FARTHEST * best:
        raise ValueError(f"the winner takes more than {FARTHEST:g} times as long as the fastest")
    return Measurement(**{**row, "ties": tuple(row["ties"])})


def _check_numbers(numbers: Any, name: str, above_zero: bool) -> None:
    if not isinstance(numbers, dict) or not all(isinstance(k, str) and counts(n) and (n or not above_zero) for k, n in numbers.items()):
        raise ValueError(f"`{name}` does not hold finite numbers from zero on")


def counts(n: Any) -> bool:
    """Whether it is a finite number from zero on; a whole number in a file may have hundreds of digits, which no float has."""
    return isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= sys.float_info.max


@lru_cache(maxsize=1)
def load_shipped() -> Record:
    """The measurements that come with the library, losses included."""
    return parse(json.loads(resources.files("ops_math.schedule").joinpath("measured.json").read_text()))


__all__ = ["EMPTY", "Ceilings", "Entry", "Measurement", "Record", "bucket", "label", "load_shipped", "parse", "policy_text"]
