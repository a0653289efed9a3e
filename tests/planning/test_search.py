"""Candidates, their order, and what follows from their prices in closed form."""

from dataclasses import replace

import pytest
from tests.planning.pricers import FIXED_S, PER_SAMPLE_BYTES, PER_SAMPLE_S, WEIGHTS, found, line
from tests.planning.records import planned

from kway.devices.simulated import simulated
from kway.errors import NotMeasuredError, UsageError
from kway.planned import one_device
from kway.planning.candidates import candidates, device_sets, layouts
from kway.planning.price import Price, Scaling
from kway.planning.scaling import amdahl_bound
from kway.report.plan_plots import curves
from kway.report.plans import lines_of


def named(rows):
    return [(row["strategy"], row["devices"], row["device_set"][0]) for row in rows]


def test_every_number_of_gpus_and_of_cores_is_a_device_set():
    assert device_sets(simulated(gpus=2, cores=3)) == [
        ["cuda:0"], ["cuda:0", "cuda:1"], ["cpu"], ["cpu"] * 2, ["cpu"] * 3,
    ]  # fmt: skip


def test_one_device_has_one_layout_and_threads_stand_alone():
    assert layouts(1) == [{}]
    assert {"data": 4} in layouts(4)
    assert {"threads": 4} in layouts(4)
    assert not any("threads" in layout and len(layout) > 1 for layout in layouts(4))


def test_there_is_one_candidate_for_each_strategy_device_set_and_step_kind():
    every, left = candidates(
        device_sets(simulated(cores=2)), lambda device: ("eager", "compiled"), lambda ranks, gpu: 1, "math", 8
    )
    keys = [(each.strategy, each.device_set, each.step_kind) for each in every]
    assert len(keys) == len(set(keys)) == 5
    assert [(each.strategy, each.step_kind) for each in left] == [("threads=2", "compiled")]
    assert "not made for several threads" in left[0].why


def test_a_strategy_that_fits_no_device_set_is_refused():
    with pytest.raises(UsageError, match="it needs 3"):
        found(strategies=["data=3"])
    with pytest.raises(UsageError, match="unknown strategy"):
        found(strategies=["dat"])


def test_two_devices_win_where_compute_is_worth_it_and_the_terms_add_up():
    rows = found(256).rows
    assert [row["devices"] for row in rows] == [2, 2, 1]
    best, one = rows[0], rows[-1]
    assert best["step_s"] == pytest.approx(FIXED_S + 128 * PER_SAMPLE_S + 5e-4)
    assert one["step_s"] == pytest.approx(FIXED_S + 256 * PER_SAMPLE_S)
    assert all(sum(row["terms"].values()) == pytest.approx(row["step_s"]) for row in rows)
    assert best["reason"].startswith(
        "fastest: 1.86 times as fast as one device (cpu:1): compute falls by 12.8 ms, "
    )
    assert best["reason"].endswith("all-reduce adds 500.0 us")


def test_one_device_wins_small_batches_and_the_loser_says_from_where_on_it_wins():
    result = found(256, line(all_reduce_s=0.05))
    assert result.rows[0]["devices"] == 1
    loser = result.rows[1]
    # 256 samples: 26.6 ms; two devices: 13.8 + 50. Equal where half of the samples take 50 ms: at 1,000.
    assert loser["break_even"]["batch_size"] == 1002
    # As fast where c times 12.8 ms are saved: c = 50 / 12.8.
    assert loser["break_even"]["flop_per_sample"] == pytest.approx(1e6 * 50 / 12.8, rel=1e-6)
    assert "2.40 times slower than one device (cpu:1): all-reduce adds 50 ms" not in loser["reason"]
    assert "compute falls by 12.8 ms, all-reduce adds 50 ms" in loser["reason"]
    assert loser["reason"].endswith("from batch 1,100 on, 2 win")


def test_a_break_even_below_the_own_batch_is_found_too():
    # Saved: half of the samples; added: 0.5 ms, which are five samples' time.
    best = found(256).rows[0]
    assert best["break_even"]["batch_size"] == 12
    never = found(256, line(all_reduce_s=1e9))
    assert never.rows[1]["break_even"]["batch_size"] is None


def one_share(candidate, batch):
    """Price what was timed, half of 4 samples and all, and nothing else."""
    if batch != 4:
        raise NotMeasuredError("a step over other samples", "only one share was timed")
    return replace(line()(candidate, batch), fixed=None)


def test_of_one_share_nothing_is_said_of_other_batches():
    result = found(4, one_share)
    loser = next(row for row in result.rows if row["devices"] == 2)
    assert loser["break_even"] == {"batch_size": None, "flop_per_sample": None, "known": False}
    assert loser["reason"].endswith("; from which batch on 2 win is not known")
    assert (result.serial_fraction, result.amdahl_bound) == (None, None)
    told = lines_of(planned(result))
    assert "serial     not known: one device was not timed with fewer samples" in told
    with pytest.raises(UsageError, match=r"are missing.*what would help"):
        found(4, one_share, room=1)


def test_the_serial_fraction_is_what_no_sample_makes_shorter():
    result = found(256)
    assert result.serial_fraction == pytest.approx(FIXED_S / (FIXED_S + 256 * PER_SAMPLE_S))
    assert result.amdahl_bound == pytest.approx(1 / result.serial_fraction)
    assert amdahl_bound(0.0) is None
    assert not any("by a line" in each for each in lines_of(planned(result)))
    # Of two shares a line has no error; of more it is said how far it is from its times.
    off = found(256, lambda *asked: replace(line()(*asked), fixed=(FIXED_S, 0.045)))
    assert any("stays whatever its samples (by a line that is off by up to 4.5% of its times): more devices" in each
               for each in lines_of(planned(off)))  # fmt: skip
    # With a batch for each device, more of them do more: Amdahl's law is of one batch that is spread.
    assert found(256, weak=True).amdahl_bound is None


def test_no_bound_contradicts_the_table():
    """One device timed alone takes as long for half of its samples, as at a noisy moment; two are twice as fast."""

    def price(candidate, batch):
        cost = line()(candidate, batch)
        return cost if candidate.devices > 1 else Price({"compute": 26.6e-3}, cost.memory, (), (26.6e-3, 0.0))

    result = found(256, price)
    assert result.rows[0]["devices"] == 2
    assert (result.serial_fraction, result.amdahl_bound) == (None, None)
    text = "\n".join(lines_of(planned(result)))
    assert "Amdahl" not in text
    said = "serial     not known: the times of one device with fewer samples are too noisy to tell"
    assert said in text.splitlines()
    # Where several are no faster either, that is what the table says, too.
    flat = Price({"compute": 26.6e-3}, {}, (), (26.6e-3, 0.0))
    slower = Price({"compute": 2 * 26.6e-3}, {}, (), (26.6e-3, 0.0))
    even = found(256, lambda candidate, batch: flat if candidate.devices == 1 else slower)
    assert (even.serial_fraction, even.amdahl_bound) == (1.0, 1.0)


def test_weak_scaling_gives_each_device_the_batch_and_ranks_by_samples():
    rows = found(64, weak=True).rows
    assert [(row["devices"], row["batch_size"]) for row in rows] == [(2, 128), (2, 128), (1, 64)]
    assert rows[0]["step_s"] > rows[-1]["step_s"]
    assert rows[0]["samples_per_s"] == pytest.approx(128 / rows[0]["step_s"])
    assert "(a step of 128 samples against one of 64)" in rows[0]["reason"]
    assert Scaling(64, weak=True).of(3) == 192
    loser = found(64, line(all_reduce_s=0.05), weak=True).rows[1]
    assert loser["reason"].endswith(" a device on, 2 win")


def test_more_ranks_than_cores_are_priced_and_never_chosen():
    rows = found(4096, sets=[["cpu"], ["cpu"] * 8], strategies=None).rows
    assert [row["devices"] for row in rows] == [1, 8, 8]
    assert rows[1]["reason"] == "never chosen: 8 ranks share fewer cores"
    assert rows[1]["samples_per_s"] > rows[0]["samples_per_s"]
    # They fit, and are not chosen for another reason.
    assert rows[0]["reason"] == "the only candidate that fits and has no more ranks than cores"


def test_where_all_have_more_ranks_than_cores_the_fastest_says_so():
    rows = found(4096, sets=[["cpu"] * 8], strategies=None).rows
    assert len(rows) == 2
    assert rows[0]["reason"].endswith(" of 2 candidates, all with more ranks than cores")


def test_what_does_not_fit_comes_last_and_says_what_is_missing():
    room = WEIGHTS + 128 * PER_SAMPLE_BYTES
    rows = found(256, room=room).rows
    assert named(rows)[-1] == ("single", 1, "cpu")
    assert (rows[-1]["fits"], rows[-1]["missing_bytes"]) == (False, 128 * PER_SAMPLE_BYTES)
    assert "512.0 KiB more than there is" in rows[-1]["reason"]
    # Nobody is compared with what cannot run.
    assert "one device" not in rows[0]["reason"]


def test_what_fits_nowhere_says_how_much_is_missing_and_what_would_help():
    room = WEIGHTS + 20 * PER_SAMPLE_BYTES
    with pytest.raises(UsageError) as caught:
        found(256, room=room)
    text = str(caught.value)
    assert "fits on none of 3 candidates" in text
    assert "432.0 KiB are missing" in text
    # Two devices with 20 samples each.
    assert "--batch-size 40" in text
    # What is refused of some models is not promised to all.
    assert "--micro-batch 20 (not of a model with batch normalisation)" in text
    assert "recompute=true keeps fewer activations of its blocks" in text
    with pytest.raises(UsageError) as caught:
        found(256, room=room, has_blocks=False)
    assert str(caught.value).endswith("--micro-batch 20 (not of a model with batch normalisation)")
    for level, parts in (
        ("loose", "--batch-size 40, or the same batch in parts, --micro-batch 20; "),
        ("bits", ""),
    ):
        with pytest.raises(UsageError) as caught:
            found(256, room=room, level=level)
        # Level bits cuts no share further, of whatever model.
        assert (parts or "what would help: --batch-size 40; kway train --settings") in str(caught.value)


def test_a_model_that_is_too_large_for_any_batch_gets_no_advice_to_shrink_it():
    with pytest.raises(UsageError) as caught:
        found(256, room=WEIGHTS - 1)
    assert "a smaller batch does not help, as 1.0 MiB do not depend on it" in str(caught.value)


def test_what_was_not_measured_is_left_out_with_the_reason():
    def price(candidate, batch):
        if candidate.devices == 2:
            raise UsageError("all-reduce over 2 ranks", "it was not measured", "run kway measure")
        return line()(candidate, batch)

    result = found(256, price)
    assert named(result.rows) == [("single", 1, "cpu")]
    assert {each.strategy for each in result.left} == {"data=2", "threads=2"}
    assert "run kway measure" in result.left[0].why


def test_gpus_and_cpu_ranks_are_ranked_together():
    def price(candidate, batch):
        return line(per_sample_s=1e-6 if candidate.device_type == "cuda" else 1e-4)(candidate, batch)

    rows = found(4096, price, simulated(gpus=2, cores=2)).rows
    assert [row["device_set"][0].partition(":")[0] for row in rows] == ["cuda"] * 3 + ["cpu"] * 3
    # Where more devices pay is asked among devices of one type: two GPUs save 0.5 us a sample, two ranks 50.
    of = {tuple(row["device_set"]): row["break_even"]["batch_size"] for row in rows}
    assert (of["cuda:0", "cuda:1"], of["cpu", "cpu"]) == (1002, 12)


def test_of_candidates_too_close_to_tell_the_one_with_fewer_devices_is_chosen():
    # 64 samples: 7.4 ms on one device; 4.2 and what talking takes on two.
    result = found(64, line(all_reduce_s=3.1e-3), strategies=["single", "data"])
    assert [row["devices"] for row in result.rows] == [2, 1]
    assert result.chosen == 1
    assert result.rows[1]["reason"].startswith(
        "chosen of those within 3% of the fastest: data=2 on cpu:2 takes 0.99 "
    )
    assert (
        "to be 1.01 times as fast as one device (cpu:1), too close to tell where predictions may be off by 3%: "
    ) in result.rows[0]["reason"]
    assert found(64, line(all_reduce_s=2.5e-3), strategies=["single", "data"]).chosen == 0


def test_what_predictions_were_off_by_here_widens_what_is_too_close_to_tell():
    # Two devices are 1.19 times as fast: by far enough, unless such predictions are off by a fifth.
    cost = line(all_reduce_s=2e-3)
    assert found(64, cost, strategies=["single", "data"]).chosen == 0
    result = found(64, cost, strategies=["single", "data"], close=0.205)
    assert result.chosen == 1
    assert result.rows[1]["reason"].startswith("chosen of those within 20.5% of the fastest: ")
    assert (
        "1.19 times as fast as one device (cpu:1), too close to tell where predictions may be off by 20.5%: "
    ) in result.rows[0]["reason"]


def test_of_equals_on_as_many_devices_processes_come_before_threads():
    def price(candidate, batch):
        cost = line()(candidate, batch)
        return (
            cost
            if "data" in candidate.layout
            else Price({**cost.terms, "compute": cost.terms["compute"] * 0.99}, {})
        )

    result = found(256, price)
    assert result.rows[0]["strategy"] == "threads=2"
    assert result.rows[result.chosen]["strategy"] == "data=2"


def test_every_number_is_beside_the_same_one_device():
    """Compiled steps are faster here: of an eager row the eager one device counts, and none that does not fit."""

    def price(candidate, batch):
        half = 0.5 if candidate.step_kind == "compiled" else 1.0
        return line(fixed_s=FIXED_S * half, per_sample_s=PER_SAMPLE_S * half)(candidate, batch)

    result = found(256, price, kinds=("eager", "compiled"), strategies=["single", "data"])
    rows = result.rows
    for row in rows:
        one = one_device(rows, row)
        assert (one["devices"], one["step_kind"]) == (1, row["step_kind"])
    pairs = {row["step_kind"]: row for row in rows if row["devices"] == 2}
    # 25.6 ms to 12.8 ms and 0.5 ms eager: one device of the same kind is 1.86 times as long, and 12 break even.
    assert pairs["eager"]["break_even"]["batch_size"] == 12
    assert pairs["compiled"]["break_even"]["batch_size"] == 22
    speedups = {
        tuple(each.split()[1:4:2]): each.split()[7] for each in lines_of(planned(result))[0].splitlines()[1:]
    }
    text = f"{26.6 / 14.3:.2f}"
    assert speedups["data=2", "eager"] == text
    assert speedups["single", "eager"] == speedups["single", "compiled"] == "1.00"
    assert curves(planned(result))["data, eager"][1][1] == pytest.approx(26.6 / 14.3)
    # Of two devices alone no row is a comparison, a break-even or a serial fraction.
    small = found(256, room=WEIGHTS + 128 * PER_SAMPLE_BYTES)
    assert one_device(small.rows, small.rows[0]) is None
    assert small.rows[0]["break_even"]["batch_size"] is None
    assert small.serial_fraction is None
    # Another kind where there is none of the same: the fastest that fits.
    odd = [row for row in rows if (row["devices"], row["step_kind"]) != (1, "eager")]
    assert one_device(odd, pairs["eager"])["step_kind"] == "compiled"
