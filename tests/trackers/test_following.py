"""From events to trackers: what they get, in which order, in which thread, and what happens when one fails."""

import threading
import time

import pytest

from kway.errors import StoppedError
from kway.trackers.following import Following, config_of, figures

START = {
    "epochs": 2, "stops_after": None, "devices": 2, "resumed_from_step": None,
    "job": {"model": "net", "schedule": None, "optimizer_lr": 0.1},
}  # fmt: skip


def step(number, loss=0.5):
    return {"epoch": 1, "step": number, "global_step": number, "loss": loss, "samples": 80, "seconds": 2.0}


class Heard:
    def __init__(self, fails_in="", pause_s=0.0):
        self.calls, self.threads, self._fails, self._pause = [], set(), fails_in, pause_s

    def _take(self, *call):
        self.threads.add(threading.get_ident())
        time.sleep(self._pause)
        self.calls.append(call)
        if self._fails == call[0]:
            raise OSError(f"no {call[0]}\nand more")

    def begin(self, config):
        self._take("begin", config)

    def log(self, metrics, step):
        self._take("log", step, metrics)

    def end(self, status):
        self._take("end", status)

    @property
    def names(self):
        return [call[0] for call in self.calls]


def test_a_tracker_hears_the_run_in_order_and_in_one_thread_that_is_not_the_caller_s():
    heard = Heard()
    with Following([heard], pytest.fail) as follow:
        follow("notice", {"text": "before"})
        follow("start", START)
        follow("step", step(10))
        follow("checkpoint", {"step": 10})
        follow("end", {})
        follow("step", step(20))
    assert heard.names == ["begin", "log", "end"]
    assert heard.calls[0][1] == {"epochs": 2, "devices": 2, "model": "net", "optimizer_lr": 0.1}
    assert heard.calls[1:] == [
        ("log", 10, {"train/loss": 0.5, "train/samples_per_s": 40.0}),
        ("end", "finished"),
    ]
    assert len(heard.threads) == 1
    assert threading.get_ident() not in heard.threads


def test_figures_have_names_by_what_they_are_of():
    held = {
        "epoch": 1,
        "step": 5,
        "global_step": 5,
        "validation_loss": 0.3,
        "accuracy": 0.875,
        "by_class/a": 1,
    }
    assert figures("validation", held) == {
        "validation/loss": 0.3, "validation/accuracy": 0.875, "validation/by_class/a": 1.0,
    }  # fmt: skip
    row = {"epoch": 1, "steps": 5, "samples": 9, "train_loss": 0.4, "train_accuracy": 0.5, "seconds": 2.0,
           "samples_per_s": 4.5, "lr": 0.1, "validation_loss": 0.3, "accuracy": 0.875, "global_step": 5}  # fmt: skip
    assert figures("epoch", row) == {
        "epoch/train_loss": 0.4, "epoch/train_accuracy": 0.5, "epoch/seconds": 2.0, "epoch/samples_per_s": 4.5,
        "epoch/lr": 0.1,
    }  # fmt: skip
    assert figures("step", step(1) | {"seconds": 0.0, "loss": None}) == {}
    assert figures("warning", {"text": "x"}) == {}
    assert config_of(START)["model"] == "net"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x"), "failed"),
        (KeyboardInterrupt(), "stopped"),
        (StoppedError("x"), "stopped"),
        (None, "finished"),
    ],
)
def test_the_end_says_how_the_run_ended(error, status):
    heard = Heard()

    def run():
        with Following([heard], pytest.fail) as follow:
            follow("start", START)
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert heard.calls[-1] == ("end", status)


def test_a_run_that_never_began_has_no_end():
    heard = Heard()
    with pytest.raises(ValueError, match="refused"), Following([heard], pytest.fail):
        raise ValueError("refused")
    assert heard.calls == []


@pytest.mark.parametrize(
    ("method", "calls", "where"),
    [
        ("begin", ["begin", "end"], "begin"),
        ("log", ["begin", "log", "end"], "log at step 10"),
        ("end", ["begin", "log", "log", "end"], "end"),
    ],
)
def test_one_that_fails_is_told_of_once_and_the_others_go_on(method, calls, where):
    bad, good, said = Heard(method), Heard(), []
    with Following([bad, good], said.append) as follow:
        follow("start", START)
        follow("step", step(10))
        follow("step", step(20))
    assert bad.names == calls
    assert good.names == ["begin", "log", "log", "end"]
    assert said == [f"tracker heard failed in {where}, and hears no more of this run: OSError: no {method}"]


def test_a_slow_tracker_holds_up_neither_the_run_nor_its_end():
    slow, said = Heard(pause_s=0.6), []
    begun = time.perf_counter()
    with Following([slow], said.append, wait_s=0.1) as follow:
        follow("start", START)
        for number in range(1, 50):
            follow("step", step(number))
        assert time.perf_counter() - begun < 0.5
    assert said == ["tracker heard had not ended after 0.1 s, and is left to itself"]


def test_steps_that_are_taken_a_second_time_are_told_once():
    heard = Heard()
    with Following([heard], pytest.fail) as follow:
        for first, last in ((1, 4), (3, 6)):
            follow("start", START)
            for number in range(first, last):
                follow("step", step(number))
                follow(
                    "validation", {"epoch": 1, "step": number, "global_step": number, "validation_loss": 1.0}
                )
    assert heard.names.count("begin") == 1
    assert [call[1] for call in heard.calls if call[0] == "log"] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
