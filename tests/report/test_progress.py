import io
from typing import Any

import pytest

from kway.report.progress import Progress, terminal_width


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


START = {
    "event": "start",
    "epochs": 10,
    "steps_per_epoch": 40,
    "samples": 4000,
    "devices": 2,
    "strategy": "data",
}
EPOCH = {
    "event": "epoch",
    "epoch": 1,
    "steps": 40,
    "samples": 4000,
    "train_loss": 0.51239,
    "seconds": 2.0,
    "samples_per_s": 2000.0,
    "lr": 0.1,
    "train_accuracy": 0.7,
    "validation_loss": 0.4,
    "accuracy": 0.95,
}


def step(number: int, **changes: Any) -> dict[str, Any]:
    event = {"event": "step", "epoch": 1, "step": number, "steps": 40, "loss": 0.5}
    return event | {"samples": 100 * number, "seconds": 0.05 * number} | changes


def screen(text: str) -> list[str]:
    """What a terminal shows after ``text``: a carriage return goes back and later characters overwrite."""
    shown: list[str] = []
    for line in text.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        shown.append("".join(cells).rstrip())
    return shown


def test_terminal_redraws_one_line_with_rate_time_left_and_loss() -> None:
    out, clock = Terminal(), Clock()
    show = Progress(out, clock=clock, width=lambda: 120)
    show(START)
    show(step(10))
    clock.now += 1
    show(step(20))
    lines = screen(out.getvalue())
    assert lines[0] == "10 epochs, 40 steps over 4,000 samples each, data on 2 devices"
    # 380 of 400 steps are left at 100 samples in 0.05 s.
    assert lines[1:] == ["epoch  1/10  step 20/40  2,000 samples/s  19 s of training left  loss 0.5000"]


def test_terminal_keeps_a_line_for_each_epoch_and_shows_the_last_accuracy() -> None:
    out, clock = Terminal(), Clock()
    show = Progress(out, clock=clock, width=lambda: 120)
    for event in [START, step(10), EPOCH, step(1, epoch=2)]:
        show(event)
    lines = screen(out.getvalue())
    assert lines[1] == (
        "epoch  1/10  loss 0.5124  validation loss 0.4000  accuracy 0.9500  2.0 s  2,000 samples/s"
    )
    assert lines[2].startswith("epoch  2/10  step  1/40")
    assert lines[2].endswith("loss 0.5000  accuracy 0.9500 (epoch 1)")


@pytest.mark.parametrize("compiles", [False, True])
def test_steps_that_wait_for_a_compiler_are_no_part_of_rate_and_time_left(compiles: bool) -> None:
    def compiled(number: int, **changes: Any) -> dict[str, Any]:
        return step(number, **{"seconds": 50.0 + 0.05 * number} | changes)

    stream, clock = Terminal(), Clock()
    show = Progress(stream, clock=clock, width=lambda: 120)
    show(START | {"compiles": compiles})
    assert ("compiling" in stream.getvalue()) == compiles
    shown = []
    for event in (compiled(10), compiled(20), compiled(10, epoch=2, seconds=0.5)):
        clock.now += 1
        show(event)
        shown.append(screen(stream.getvalue())[-1])
    # 400 steps at 20 a second; with what compiling took, some 17 minutes.
    assert ("training left" in shown[0], "samples/s" in shown[0]) == (not compiles, not compiles)
    assert ("2,000 samples/s  19 s of training left" in shown[1]) == compiles
    assert ("min" in shown[1]) == (not compiles)
    assert "2,000 samples/s  18 s of training left" in shown[2]
    # A run that is started again compiles again.
    show(START | {"compiles": compiles})
    clock.now += 1
    show(compiled(10))
    assert ("training left" in screen(stream.getvalue())[-1]) == (not compiles)


def test_data_of_unknown_length_show_what_is_known() -> None:
    out, clock = Terminal(), Clock()
    show = Progress(out, clock=clock, width=lambda: 120)
    show(START | {"steps_per_epoch": None, "samples": None})
    show(step(10, steps=None))
    assert screen(out.getvalue()) == [
        "10 epochs, data on 2 devices",
        "epoch  1/10  step 10  2,000 samples/s  loss 0.5000",
    ]


def test_a_run_that_ends_by_its_steps_says_so() -> None:
    out, clock = Terminal(), Clock()
    show = Progress(out, clock=clock, width=lambda: 120)
    show(START | {"stops_after": 60})
    show(step(20))
    assert screen(out.getvalue()) == [
        "stops after 60 steps, 40 steps over 4,000 samples an epoch, data on 2 devices",
        # 40 of 60 steps are left.
        "epoch 1/2  step 20/40  2,000 samples/s  2 s of training left  loss 0.5000",
    ]
    show(EPOCH)
    show(EPOCH | {"epoch": 2, "steps": 20})
    found = screen(out.getvalue())
    assert found[1].startswith("epoch 1/2  loss")
    assert found[2].startswith("epoch 2/2 (20 of 40 steps)  loss")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stops_after": 400}, "10 epochs, 40 steps over 4,000 samples each"),
        (
            {"epochs": 1, "steps_per_epoch": 1, "samples": 1},
            "1 epoch, 1 step over 1 sample each",
        ),
        ({"stops_after": 399}, "stops after 399 steps, 40 steps over 4,000 samples an epoch"),
        (
            {"stops_after": 1, "steps_per_epoch": None, "samples": None},
            "stops after 1 step, 10 epochs at most",
        ),
    ],
)
def test_steps_are_named_where_they_may_end_the_run(changes: dict[str, Any], said: str) -> None:
    out = io.StringIO()
    Progress(out)(START | changes)
    assert out.getvalue() == f"{said}, data on 2 devices\n"


def test_a_shorter_line_leaves_nothing_of_the_longer_one() -> None:
    out, clock = Terminal(), Clock()
    show = Progress(out, clock=clock, width=lambda: 120)
    show(step(39, loss=123456.0))
    clock.now += 1
    show({"event": "step", "epoch": 2, "step": 1, "steps": 40, "loss": None, "samples": 1, "seconds": 1.0})
    assert screen(out.getvalue()) == ["epoch 2  step  1/40  1.00 samples/s"]


@pytest.mark.parametrize("width", [2, 10, 25, 40, 80])
def test_narrow_terminals_never_wrap(width: int) -> None:
    out, clock = Terminal(), Clock()
    show = Progress(out, clock=clock, width=lambda: width)
    show(step(10))
    show(EPOCH)
    drawn = out.getvalue().replace("\r", "\n").split("\n")
    assert max(len(line) for line in drawn) == min(width - 1, max(len(line) for line in drawn))
    assert drawn[1].startswith("epoch 1"[: width - 1])


def test_a_window_that_shrinks_does_not_wrap() -> None:
    out, clock = Terminal(), Clock()
    columns = [100]
    show = Progress(out, clock=clock, width=lambda: columns[0])
    show(step(10))
    before = len(out.getvalue())
    columns[0] = 30
    clock.now += 1
    show(step(20))
    show(EPOCH)
    assert max(len(part) for part in out.getvalue()[before:].replace("\r", "\n").split("\n")) <= 29


def test_redraws_are_limited() -> None:
    out, clock = Terminal(), Clock()
    show = Progress(out, clock=clock, width=lambda: 80)
    for number in range(1, 41):
        clock.now += 0.01
        show(step(number))
    assert out.getvalue().count("\r") == 4


def test_plain_stream_has_a_line_an_epoch_and_at_most_one_in_thirty_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    show = Progress(out, clock=clock)
    show(START)
    for number in range(1, 36):
        clock.now += 1
        show(step(number))
    show(EPOCH)
    lines = out.getvalue().split("\n")
    assert "\r" not in out.getvalue()
    assert len(lines) == 4
    assert lines[1].startswith("epoch  1/10  step 30/40")
    assert lines[2].startswith("epoch  1/10  loss 0.5124")


def test_a_validation_inside_an_epoch_updates_the_accuracy() -> None:
    out, clock = Terminal(), Clock()
    show = Progress(out, clock=clock, width=lambda: 120)
    show({"event": "validation", "epoch": 1, "step": 5, "validation_loss": 0.3, "accuracy": 0.875})
    show(step(6))
    assert screen(out.getvalue())[-1].endswith("accuracy 0.8750")


def test_an_epoch_without_validation_shows_training_metrics_and_keeps_the_last_accuracy() -> None:
    out, clock = Terminal(), Clock()
    show = Progress(out, clock=clock, width=lambda: 120)
    show(EPOCH)
    show({"event": "epoch", "epoch": 2, "train_loss": 0.4, "train_accuracy": 0.75, "seconds": 1.0})
    show(step(1, epoch=3))
    lines = screen(out.getvalue())
    assert lines[1] == "epoch 2  loss 0.4000  training accuracy 0.7500  1.0 s"
    assert lines[2].endswith("accuracy 0.9500 (epoch 1)")


def test_what_an_earlier_run_did_does_not_pass_for_this_one() -> None:
    out = io.StringIO()
    show = Progress(out)
    start = {"event": "start", "epochs": 2, "steps_per_epoch": 40, "samples": 4000, "devices": 1}
    show({**start, "strategy": "single", "resumed_from_step": 40})
    show({**EPOCH, "earlier": True})
    show({**EPOCH, "epoch": 2})
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("single on 1 device, 40 steps taken before")
    assert [line.partition("  loss")[0] for line in lines[1:]] == ["epoch 1/2 (trained before)", "epoch 2/2"]


def test_losses_that_are_not_finite_are_shown() -> None:
    out = io.StringIO()
    Progress(out)(EPOCH | {"train_loss": "nan", "validation_loss": float("inf")})
    assert "loss nan  validation loss inf" in out.getvalue()


def test_close_clears_the_line_and_can_be_called_twice() -> None:
    out = Terminal()
    show = Progress(out, width=lambda: 80)
    show(step(1))
    show({"event": "end"})
    show.close()
    assert screen(out.getvalue()) == [""]


def test_unknown_events_are_left_alone() -> None:
    out = io.StringIO()
    Progress(out)({"event": "checkpoint", "step": 3})
    assert out.getvalue() == ""


def test_total_epochs_serves_without_a_start() -> None:
    out = Terminal()
    Progress(out, 3, width=lambda: 80)(step(1))
    assert screen(out.getvalue())[0].startswith("epoch 1/3")


def test_width_of_a_stream_without_a_terminal() -> None:
    assert terminal_width(io.StringIO()) == 80


@pytest.mark.parametrize("live", [False, True])
def test_many_short_epochs_have_a_line_every_five_seconds_and_the_last_one(live: bool) -> None:
    out, clock = (Terminal() if live else io.StringIO()), Clock()
    show = Progress(out, clock=clock, width=lambda: 120)
    show(START | {"epochs": 1000})
    for number in range(1, 101):
        show(EPOCH | {"epoch": number})
        clock.now += 0.2
    # Of 20 s: the first epoch, and those that begin a new five seconds.
    kept = [line for line in screen(out.getvalue())[1:] if line]
    shown = [int(line.split()[1].split("/")[0]) for line in kept]
    assert shown == [1, 26, 51, 76, *([100] if live else [])]
    show.close()
    show.close()
    shown = [int(line.split()[1].split("/")[0]) for line in screen(out.getvalue())[1:] if line]
    assert shown == [1, 26, 51, 76, 100]


def test_up_to_fifty_epochs_each_has_its_line() -> None:
    out = io.StringIO()
    show = Progress(out)
    show(START | {"epochs": 50})
    for number in range(1, 51):
        show(EPOCH | {"epoch": number})
    assert out.getvalue().count("\n") == 51


def test_a_note_does_not_bring_back_what_was_passed_over() -> None:
    out, clock = io.StringIO(), Clock()
    show = Progress(out, clock=clock)
    show(START | {"epochs": 100})
    show(EPOCH)
    show(EPOCH | {"epoch": 2})
    show({"event": "notice", "text": "here"})
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()[1:]] == ["epoch", "note"]
