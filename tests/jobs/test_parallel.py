"""A loop of the user's own inside ranks that are there, and alone."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import kway

X = torch.randn(11, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(11) % 4


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


def job_of(**more):
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    more = {"validation": (X[:5], Y[:5]), **more}
    return kway.Job(
        model=more.pop("model", net), loss=nn.CrossEntropyLoss(), optimizer=sgd, data=(X, Y), batch_size=4,
        precision="fp64", metrics={"accuracy": kway.accuracy}, **more,
    )  # fmt: skip


def loop(context, job, folder):
    with kway.parallel(job, strategy="data") as p:
        losses, counts = [], []
        for epoch in range(2):
            for batch in p.batches(epoch):
                losses.append(float(p.step(batch)))
                counts.append(p.gather(batch.count))
        p.barrier()
        with p.first_on_main():
            path = folder / "prepared"
            if p.is_main:
                path.write_text("once")
            prepared = path.read_text()
        found = p.evaluate()
        saved = p.save(folder / f"on-{p.size}")
        p.print(f"printed by {p.rank} of {p.size}")
        gathered = p.gather(torch.tensor([p.rank]))
        mode = p.model.training
    left = [name for name, module in p.model.named_modules() if "forward" in vars(module)]
    return losses, counts, found, str(saved), gathered, prepared, mode, left


def by_hand(context, halved):
    """Train with a rate that the loop itself halves, or that the job halves by a schedule."""
    half = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    with kway.parallel(job_of(**({} if halved else {"schedule": half})), strategy="data") as p:
        for batch in p.batches(0):
            (inputs, targets), count = batch.micro[0]
            assert torch.equal(inputs, X[batch.indices])
            assert torch.equal(targets, Y[batch.indices])
            assert (len(batch.micro), count) == (1, batch.count)
            p.step(batch)
            if halved:
                for group in p.optimizer.param_groups:
                    group["lr"] /= 2
    return p.model.state_dict()


def test_a_loop_may_change_options_of_its_optimizer_and_look_at_its_tensors(ranks):
    own, other = (ranks.run(by_hand, halved, size=2) for halved in (True, False))
    for mine, scheduled in zip(own, other, strict=True):
        for name, value in scheduled.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=0)


def test_every_number_of_ranks_sees_the_same(ranks, tmp_path):
    alone = ranks.run(loop, job_of(), tmp_path, size=1)[0]
    assert alone[1] == [[4], [4], [3]] * 2
    weights = load_file(alone[3] if alone[3].endswith("safetensors") else f"{alone[3]}/weights.safetensors")
    run = kway.train(job_of(), devices="cpu:1", epochs=2)
    for name, value in weights.items():
        torch.testing.assert_close(value, run.model.state_dict()[name], rtol=0, atol=1e-12)
    for size in (2, 3):
        for rank, (losses, counts, found, saved, gathered, prepared, mode, left) in enumerate(
            ranks.run(loop, job_of(), tmp_path, size=size)
        ):
            assert losses == pytest.approx(alone[0], rel=0, abs=1e-12)
            assert [sum(shares) for shares in counts] == [4, 4, 3, 4, 4, 3]
            assert found == pytest.approx(alone[2], rel=0, abs=1e-12)
            assert [int(value) for value in gathered] == list(range(size)), rank
            assert (prepared, mode, left) == ("once", True, [])
            for name, value in load_file(saved).items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-12)


def test_only_the_first_rank_prints(ranks, capfd, tmp_path):
    ranks.run(loop, job_of(), tmp_path, size=3)
    printed = capfd.readouterr()
    assert "printed by 0 of 3" in printed.out + printed.err
    assert "printed by 1" not in printed.out + printed.err


def one_step_more(context, job, folder):
    with kway.parallel(job, strategy="data") as p:
        begun = p.resume(folder)
        for batch in islice(p.batches(begun.epoch, begun.step), 1):
            p.step(batch)
        p.checkpoint(folder, begun.epoch, begun.step + 1)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_other_masks_are_spoken_of_where_the_model_draws_some(ranks, tmp_path, capfd, drop):
    job = replace(job_of(), model=partial(nn.Sequential, nn.Linear(3, 4), nn.Dropout(drop)))
    ranks.run(one_step_more, job, tmp_path / "kept", size=2)
    ranks.run(one_step_more, job, tmp_path / "kept", size=1)
    said = capfd.readouterr().err
    assert "resumed from step 1" in said
    assert ("on 1 device instead of 2 other masks are drawn" in said) == (drop > 0)


def test_several_devices_alone_are_an_error_that_names_the_launcher():
    with (
        pytest.raises(kway.UsageError, match=r"kway launch --devices cpu:2"),
        kway.parallel(job_of(), devices="cpu:2"),
    ):
        pass


def test_without_validation_data_there_is_nothing_to_evaluate():
    with (
        kway.parallel(job_of(validation=None), devices="cpu:1") as p,
        pytest.raises(kway.UsageError, match="validation="),
    ):
        p.evaluate()


def test_an_error_in_the_loop_leaves_model_threads_and_random_state(tmp_path):
    model = net()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    job = kway.Job(**{**vars(job_of()), "model": model})
    with pytest.raises(KeyError, match="mine"):
        leave_early(job)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(module) for module in model.modules())


def leave_early(job):
    with kway.parallel(job, devices="cpu:1") as p:
        for batch in p.batches(0):
            p.step(batch)
            raise KeyError("mine")


def test_a_file_in_the_way_of_saving_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        kway.parallel(job_of(), devices="cpu:1") as p,
        pytest.raises(kway.UsageError, match="cannot be written"),
    ):
        p.save(tmp_path / "file")


def scalar(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none").mean().reshape(())


def test_what_names_no_folder_is_refused():
    with kway.parallel(job_of(), devices="cpu") as p:
        for use in (p.save, p.resume, lambda folder: p.checkpoint(folder, 0)):
            for folder in ("", None, 3):
                with pytest.raises(kway.UsageError, match="folder="):
                    use(folder)


def test_a_loss_that_returns_a_scalar_is_warned_about_once(capsys):
    with kway.parallel(replace(job_of(), loss=scalar), devices="cpu:1") as p:
        for batch in p.batches(0):
            p.step(batch)
    assert capsys.readouterr().err.count("kway: warning: the loss returned a scalar") == 1


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)


def judged(context, job):
    """Return the rates after each of four epochs."""
    rates = []
    with kway.parallel(job, strategy="data") as p:
        for epoch in range(4):
            for batch in p.batches(epoch):
                p.step(batch)
            p.evaluate()
            p.evaluate()
            rates.append(p.engine.optimizer.param_groups[0]["lr"])
    return rates


def test_a_schedule_that_waits_for_a_figure_gets_it_with_each_evaluation(ranks):
    record = kway.train(job_of(schedule=plateau), devices="cpu", epochs=4, echo=False).record
    assert ranks.run(judged, job_of(schedule=plateau)) == 2 * [[row["lr"] for row in record.epochs]]
    assert record.epochs[-1]["lr"] < 0.1


def test_a_schedule_that_waits_for_a_figure_is_refused_where_there_is_none():
    with (
        pytest.raises(kway.UsageError, match=r"ReduceLROnPlateau .* set validation="),
        kway.parallel(job_of(schedule=plateau, validation=None), devices="cpu"),
    ):
        pass


def test_a_folder_that_is_none_is_named_so():
    with kway.parallel(job_of()) as p:
        for act in (p.save, p.resume):
            with pytest.raises(kway.UsageError, match="folder=None: it must be a path"):
                act(None)


class Open(nn.Linear):
    """Keeps what no checkpoint can hold."""

    kept = object()

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def refused_saves(context, folder):
    """Try two saves that cannot be, then one that can; return what the first two raised."""
    said = []
    with kway.parallel(job_of(model=partial(Open, 3, 4)), strategy="data") as p:
        first, *_, last = p.batches(0)
        p.step(first)
        for options in ({"keep": 0}, {}):
            with pytest.raises(kway.UsageError) as caught:
                p.checkpoint(folder, 0, 1, **options)
            said.append(str(caught.value))
        p.model.kept = "a text"
        p.step(last)
        p.checkpoint(folder, 1)
    return said


def test_a_checkpoint_that_is_refused_is_an_error_on_all_ranks(ranks, tmp_path):
    one, other = ranks.run(refused_saves, tmp_path, limit=30)
    assert one == other
    assert "keep=0" in one[0]
    assert "modules['_extra_state'] is a builtins.object" in one[1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_schedule_has_no_figure_twice_where_a_loop_goes_on(tmp_path):
    def rate(p):
        return p.optimizer.param_groups[0]["lr"]

    job = job_of(schedule=plateau)
    with kway.parallel(job, devices="cpu") as p:
        for batch in p.batches(0):
            p.step(batch)
        p.evaluate()
        p.checkpoint(tmp_path / "judged", epoch=1)
        for batch in p.batches(1):
            p.step(batch)
        p.checkpoint(tmp_path / "open", epoch=2)
        p.evaluate()
        own, drawn = rate(p), float(torch.rand(()))
    for folder, moves in (("judged", False), ("open", True)):
        with kway.parallel(job, devices="cpu") as p:
            p.resume(tmp_path / folder)
            before, again = rate(p), float(torch.rand(()))
            p.evaluate()
            assert (rate(p) < before) == moves
    assert rate(p) == own
    assert again == drawn


def test_what_is_no_share_is_refused_with_what_to_write():
    with (
        kway.parallel(job_of()) as p,
        pytest.raises(kway.UsageError, match=r"step\(\) of a tuple.*p\.batches\(epoch\)"),
    ):
        p.step((X[:4], Y[:4]))


def test_a_loop_saves_into_a_folder_whose_parents_are_not_there_yet(tmp_path):
    with kway.parallel(job_of()) as p:
        p.step(next(iter(p.batches(0))))
        p.checkpoint(tmp_path / "runs" / "first", 0, 1)
    assert [path.name for path in (tmp_path / "runs" / "first").iterdir()] == ["step-1"]


def test_saving_goes_on_where_it_was_after_a_save_that_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with kway.parallel(job_of()) as p:
        first, second, *_ = p.batches(0)
        p.step(first)
        p.checkpoint(tmp_path / "run", 0, 1)
        with pytest.raises(kway.KwayError):
            p.checkpoint(tmp_path / "file", 0, 1)
        p.step(second)
        p.checkpoint(tmp_path / "run", 0, 2)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-1", "step-2"]
