"""A candidate is right before it is fast, and a bad one is a sentence and not the end of training."""

import time

import pytest
import torch

from ops_math.schedule import Limits, NotMeasuredError, ceilings, measure
from ops_math.schedule.accuracy import coarse_oracle, is_narrow, oracle_of, verdict
from ops_math.schedule.timing import Stopwatch, Timing, decide, summary, tied
from ops_math.settings import Policy
from tests.schedule import toy

X = torch.linspace(-1, 1, 64 * 96).reshape(64, 96)
QUICK = Limits(0.2, 5.0)


def measured(candidates, limits=QUICK, **facts):
    return measure(toy.Toy(candidates, **facts), "fwd", [X], limits=limits)


def test_the_fastest_right_candidate_wins_and_all_times_are_kept():
    found = measured({"vendor": toy.slept(0.003), "eager": toy.eager})
    assert found.winner == "eager"
    assert found.times_us["vendor"] > 2900
    assert set(found.times_us) == {"vendor", "eager"}
    assert found.checked == "eager in fp64"
    assert found.refused == {}


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (toy.nan_in_one_place, "result 0 has NaN or an infinity where eager in fp64 has none"),
        (toy.wrong_by_a_percent, "result 0 is wrong: its max error against eager in fp64 is 0.01"),
        (toy.too_narrow, "result 0 has shape [64, 95] where eager in fp64 gives [64, 96]"),
        (toy.raising, "failed: RuntimeError: a bad configuration"),
        (toy.hungry, "needs more memory than there is"),
    ],
)
def test_a_bad_candidate_is_refused_in_words_even_if_it_is_faster(launch, words):
    found = measured({"magic": launch, "eager": toy.slept(0.002)})
    assert found.winner == "eager"
    assert found.refused["magic"].startswith(words)
    assert "magic" not in found.times_us


def test_a_candidate_that_hangs_is_left_behind_and_the_others_are_measured():
    toy.RELEASE.clear()
    start = time.perf_counter()
    found = measured({"magic": toy.hanging, "eager": toy.eager}, Limits(0.2, 0.5))
    toy.RELEASE.set()
    assert time.perf_counter() - start < 10
    assert found.refused == {"magic": "did not finish within 0.5 s"}
    assert found.winner == "eager"


def test_a_candidate_that_fails_after_a_while_drops_out_with_its_count():
    calls = []

    def tiring(problem, config, x):
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("tired")
        return toy.double(x)

    found = measured({"magic": tiring, "eager": toy.slept(0.002)})  # slow enough that the other comes into the last round
    assert found.winner == "eager"
    assert found.refused["magic"] == "failed: RuntimeError: tired, after 2 calls that were well"


def test_where_nothing_right_can_run_the_reasons_are_told():
    with pytest.raises(
        NotMeasuredError, match=r"^nothing could be run that results could be held to: .*eager failed: RuntimeError: a bad configuration"
    ):
        measured({"magic": toy.raising, "eager": toy.raising})


def test_without_an_oracle_in_fp64_a_narrower_one_is_used_and_named():
    def no_doubles(problem, config, x):
        if x.dtype == torch.float64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return toy.double(x)

    found = measured({"magic": toy.wrong_by_a_percent, "vendor": toy.eager, "eager": no_doubles})
    assert found.checked == "vendor in the same dtype"
    assert "magic" in found.refused
    assert found.winner in ("vendor", "eager")


def test_pytorchs_own_is_timed_however_badly_it_is_predicted_and_others_are_not():
    slow = {"PASSES": 1e6}
    found = measured({"magic": toy.eager, "vendor": toy.eager, "eager": toy.eager}, vendor=slow, eager=slow)
    assert "vendor" in found.times_us
    assert "eager" not in found.times_us
    assert found.refused["eager"].startswith("not tried: predicted")


def test_every_configuration_is_tried_and_the_winner_names_its_own():
    def launch(problem, config, x):
        time.sleep(0.004 if config == "slow" else 0.0)
        return toy.double(x)

    found = measured({"magic": launch, "eager": toy.slept(0.002)}, magic={"configs": lambda p, d, phase: ("slow", "quick")})
    assert found.winner == "magic:quick"
    assert set(found.times_us) == {"magic:slow", "magic:quick", "eager"}


def test_a_candidate_below_the_asked_determinism_level_is_not_measured():
    levels = {"determinism": lambda p, config, phase: 0, "configs": lambda p, d, phase: ("atomic",)}
    found = measure(
        toy.Toy({"magic": toy.eager, "eager": toy.eager}, magic=levels), "fwd", [X], limits=QUICK, policy=Policy("default", 1, ())
    )
    assert set(found.times_us) == {"eager"}
    assert found.policy == "precision=default determinism=1"


def test_candidates_run_with_as_many_threads_as_the_step():
    seen = set()

    def counting(problem, config, x):
        seen.add(torch.get_num_threads())
        return toy.double(x)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 2)
        measured({"eager": counting})
    finally:
        torch.set_num_threads(before)
    assert seen == {before + 2}


def test_a_ceiling_counts_bytes_read_and_written_and_both_operations_of_a_product(monkeypatch):
    monkeypatch.setattr(ceilings, "_median_us", lambda run, device: (run(), 1000.0)[1])
    before = torch.get_rng_state()
    found = ceilings.measure_ceilings(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)  # a first meeting may measure in the middle of a training run
    assert found.bandwidth_gbs == pytest.approx(2 * (128 << 20) / 1e-3 / 1e9, rel=1e-3)
    assert found.bf16_tflops == found.fp32_tflops == pytest.approx(2 * 512**3 / 1e-3 / 1e12, rel=1e-3)


def test_inputs_are_left_as_they_were_by_an_operator_that_writes_in_place():
    def doubling(problem, config, x):
        x.mul_(2.0)

    entry = toy.Toy({"eager": toy.eager})
    entry.implementations()[0].module.launch_inplace = doubling
    entry.phases["inplace"] = entry.phases["fwd"]
    x = X.clone()
    found = measure(entry, "inplace", [x], limits=QUICK)
    assert found.winner == "eager"
    assert torch.equal(x, X)


def test_near_times_are_a_tie_and_the_first_listed_wins_unless_there_is_an_incumbent():
    times = {"a": Timing(102.0, 0, 0.005), "b": Timing(100.0, 0, 0.005), "c": Timing(150.0, 0, 0.0)}
    assert decide(times) == ("a", ("b",))
    assert decide(times, incumbent="b") == ("b", ("a",))
    assert decide(times, incumbent="c") == ("a", ("b",))
    assert not tied(times["a"], times["c"])
    assert tied(times["c"], Timing(120.0, 0, 0.3))


def test_noise_is_small_for_steady_samples_and_large_for_wild_ones():
    steady = summary([(100.0 + n % 3, 5.0) for n in range(30)])
    wild = summary([(100.0 * (1 + n % 7), 5.0) for n in range(30)])
    assert steady.us == 101.0
    assert steady.noise < 0.01 < 0.2 < wild.noise
    assert summary([(10.0, 40.0)] * 5).us == 40.0


def test_where_the_host_decides_a_busy_host_changes_no_winner():
    quiet = {"a": [(20.0, 30.0)] * 9, "b": [(44.0, 16.0)] * 9}
    busy = {name: [(us, host * 2.2) for us, host in samples] for name, samples in quiet.items()}
    for samples, scale in ((quiet, 1.0), (busy, 1 / 2.2)):
        timings = {name: summary(taken, scale) for name, taken in samples.items()}
        assert [round(t.us, 6) for t in timings.values()] == [30.0, 44.0]
        assert timings["a"].on_host
        assert not timings["b"].on_host
    assert decide({name: summary(taken) for name, taken in busy.items()})[0] == "b"  # what the correction is for


def test_a_difference_of_the_hosts_part_must_be_larger_than_one_of_the_devices():
    assert tied(Timing(100.0, 100.0, 0.0, True), Timing(115.0, 20.0, 0.0))
    assert not tied(Timing(100.0, 20.0, 0.0), Timing(115.0, 20.0, 0.0))
    assert not summary([(50.0, 50.0)] * 9).on_host  # a CPU, where they are one


def test_the_watch_counts_host_time_in_launches():
    watch = Stopwatch(torch.device("cpu"), 4.0)
    assert watch.host_scale() == 1.0
    watch._launches += [8.0, 9.0, 7.0]
    assert watch.host_scale() == 0.5
    assert Stopwatch(torch.device("cpu")).host_scale() == 1.0


def test_a_limit_lets_rounding_through_and_nothing_larger():
    r = torch.randn(64, 256, dtype=torch.float64)
    y = r.to(torch.bfloat16)
    held = oracle_of([r], [y], "the oracle")
    assert verdict([y], held) is None
    assert verdict([(r * (1 + 2.0**-9)).to(torch.bfloat16)], held) is not None
    assert verdict([torch.where(torch.arange(256) == 3, 0.0, y)], held) is not None
    assert verdict([y, y], held) == "gives 2 results where the oracle gives 1"
    coarse = coarse_oracle([y], "another")
    assert verdict([y * 1.01], coarse) is not None
    assert verdict([y], coarse) is None


def test_the_scale_of_a_large_result_may_lean_as_tensor_cores_do_and_not_more():
    """Over a hundred million elements rounding averages out to nothing, and what cuts instead of rounding stays."""
    r = torch.randn(4096, 1024, dtype=torch.float64)
    right, leaning, wrong = ((r * scale).bfloat16() for scale in (1.0, 1 - 1.3e-4, 1 - 6e-4))
    held = oracle_of([r], [right], "the oracle", narrow=True)
    assert verdict([leaning], held) is None
    assert "gain" in verdict([wrong], held)
    assert "gain" in verdict([leaning], oracle_of([r], [right], "the oracle"))


def test_a_result_that_is_all_rounding_may_be_several_times_as_large_and_not_of_another_size():
    """The gradient of a query that sees one key is zero: what is left of it is whatever rounding left."""
    zero, eager = torch.zeros(64, dtype=torch.float64), torch.full((64,), 1e-3, dtype=torch.bfloat16)
    held = oracle_of([zero], [eager], "the oracle")
    assert verdict([5 * eager], held) is None
    assert "is wrong" in verdict([100 * eager], held)


def test_a_statistic_saved_in_fp32_of_16_bit_numbers_may_be_summed_otherwise_and_not_be_rounded_to_16_bits():
    """cuDNN's and Flash's log-sum-exp of bf16 is off by 1e-5 where plain fp32 sums are off by 1e-6."""
    lse = torch.rand(4, 4, 256, dtype=torch.float64) * 3 + 5
    held = oracle_of([lse], [lse.float()], "the oracle", is_narrow([torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1), None, 3]))
    off = lse * (1 + 1.2e-5 * torch.randn(lse.shape, dtype=torch.float64).clamp(-1, 1))
    assert verdict([off.float()], held) is None
    assert "is wrong" in verdict([lse.bfloat16().float()], held)
    assert "is wrong" in verdict([lse.half().float()], held)
    assert "is wrong" in verdict([off.float()], oracle_of([lse], [lse.float()], "the oracle", is_narrow([torch.zeros(1)])))


def test_an_infinity_or_nan_that_the_oracle_has_too_is_right():
    r = torch.randn(16, 32, dtype=torch.float64)
    r[0, 0], r[1, 1] = -torch.inf, torch.nan
    held = oracle_of([r], [r.float()], "the oracle")
    assert verdict([r.float()], held) is None
    assert verdict([torch.nan_to_num(r.float(), neginf=torch.inf)], held) is not None


def test_a_sum_that_cancels_is_all_rounding_and_an_honest_candidate_of_it_is_timed():
    x = torch.full((64, 256), 0.7) + torch.randn(64, 256) * 1e-9

    def deviations(problem, config, x):
        return (x - x.mean(1, keepdim=True)) * 1e3

    def summed_otherwise(problem, config, x):
        return (x - x.flip(1).cumsum(1)[:, -1:] / x.shape[1]) * 1e3

    def not_scaled(problem, config, x):
        return x - x.mean(1, keepdim=True) + 0.01

    entry = toy.Toy({"magic": summed_otherwise, "wrong": not_scaled, "eager": deviations})
    found = measure(entry, "fwd", [x], limits=QUICK)
    assert set(found.times_us) == {"magic", "eager"}
    assert found.refused["wrong"].startswith("result 0 is wrong")
