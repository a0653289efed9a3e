"""Copies are of the moment at which they were taken, on the CPU, in memory that is used again."""

import pytest
import torch

from kway.checkpoints.copies import Copies
from kway.checkpoints.snapshot import Snapshot, freeze


def test_copies_share_nothing_with_their_source_and_keep_the_order_in_memory():
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    source = {"last": last, "view": torch.arange(10)[::2], "wide": torch.ones(2, 1).expand(2, 3),
              "0": torch.tensor(3), "none": torch.empty(0, 2), "z": torch.tensor([1 + 2j]).conj()}  # fmt: skip
    right = {name: tensor.clone() for name, tensor in source.items()}
    copy = Copies().take(source)
    copy.wait()
    for tensor in (last, source["view"]):
        tensor.zero_()
    assert all(torch.equal(copy.tensors[name], right[name]) for name in right)
    assert copy.tensors["last"].stride() == last.stride()


def test_memory_is_used_again_where_shape_and_dtype_are_the_same():
    copies = Copies()
    first = copies.take({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}).tensors
    second = copies.take({"a": torch.zeros(3), "b": torch.ones(4), "c": torch.ones(3).double()}).tensors
    assert [second[n].data_ptr() == first[n].data_ptr() for n in "abc"] == [True, False, False]
    assert copies.take({"b": torch.ones(4)}).tensors.keys() == {"b"}


def test_parameters_are_copied_without_their_history():
    weight = torch.nn.Parameter(torch.ones(2))
    assert not Copies().take({"w": weight}).tensors["w"].requires_grad


def test_tied_weights_are_copied_once():
    weight = torch.nn.Parameter(torch.ones(2))
    frozen = freeze(Snapshot(0, 0, {"a": weight, "b": weight, "c": weight.detach()}, {}), {})
    assert frozen.files["weights"].tensors.keys() == {"a"}
    assert frozen.ties == {"b": "a", "c": "a"}
    assert frozen.size == 8


@pytest.mark.gpu
@pytest.mark.parametrize("has_room", [True, False])
def test_a_gpu_copies_what_was_queued_before_and_never_what_comes_after(tmp_path, has_room, monkeypatch):
    from kway.checkpoints.reading import open_checkpoint
    from kway.checkpoints.writer import Writer

    if not has_room:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1))
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    weight, half = torch.zeros(8_000_000, device=device), torch.zeros(3, device=device, dtype=torch.bfloat16)
    busy = torch.randn(4000, 4000, device=device)
    with Writer(tmp_path / "c") as writer:
        for step in range(1, 9):
            for _ in range(20):
                busy = busy @ busy / 4000  # the copy waits for this, the caller does not
            weight.fill_(step)
            half.fill_(step)
            made = weight * 2  # freed at once: its memory is asked for again below
            writer.save(
                Snapshot(step, 0, {"w": weight, "made": made}, {"o": {"h": half, "cpu": torch.tensor(step)}})
            )
            del made
            torch.full((8_000_000,), -1.0, device=device)
            weight.fill_(-step)
            half.fill_(-step)
            assert writer._copies["weights"]._of_gpus[device].memory.is_pinned()
    assert writer.saved == list(range(1, 9))
    for step in range(1, 9):
        read = open_checkpoint(tmp_path / f"c/step-{step}")
        assert read.weights()["w"].eq(step).all()
        assert read.weights()["made"].eq(2 * step).all()
        assert read.part("o")["h"].tolist() == [step] * 3
        assert read.part("o")["cpu"].item() == step


@pytest.mark.gpu
def test_what_a_gpu_holds_is_copied_whatever_its_dtype_and_order_in_memory():
    source = {"last": torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
              "view": torch.arange(10, device="cuda")[::2], "0": torch.tensor(3, device="cuda"),
              "wide": torch.ones(2, 1, device="cuda").expand(2, 3), "none": torch.empty(0, 2, device="cuda"),
              "z": torch.tensor([1 + 2j], device="cuda").conj(), "cpu": torch.ones(2),
              "bit": torch.tensor([True, False], device="cuda")}  # fmt: skip
    copies = Copies()
    for early in (False, True):
        if early:
            copies.ready(source)
            source["view"] += 1
        copy = copies.take(source)
        copy.wait()
        assert list(copy.tensors) == list(source)
        assert all(torch.equal(copy.tensors[name], tensor.cpu()) for name, tensor in source.items())
        assert copy.tensors["last"].stride() == source["last"].stride()
    memory = copy.tensors["0"].untyped_storage().data_ptr()
    assert copies.take(source).tensors["0"].untyped_storage().data_ptr() == memory
    copies.ready({"0": source["0"]})  # and then something else is taken after all
    del source["wide"]
    changed = copies.take(source)
    changed.wait()
    assert all(torch.equal(changed.tensors[name], tensor.cpu()) for name, tensor in source.items())
