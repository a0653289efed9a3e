"""The table of a tuning."""

from dataclasses import replace

from kway.records import Tuning
from kway.report.tuning import lines_of


def row(choice, step_s, verdict, spread=0.0):
    return {
        "stage": "",
        "choice": choice,
        "step_s": step_s,
        "spread": spread,
        "ratio": step_s,
        "cost_s": 1.0,
        "verdict": verdict,
    }


FUSED = {"optimizer": "fused"}
RECORD = Tuning(
    *("net", "single", 1, ["cpu"], "math", "fp32", 16, FUSED, "measured", "", "2026-11-29T00:00:00+00:00"),
    [row({}, 1.0, "baseline", 0.35), row(FUSED, 0.5, "chosen", 0.31)],
    *(4.0, 60.0, 1.0, 0.5, ["no candidates here: threads (a rank has 1)"], {}),
)


def test_whether_a_choice_was_measured_a_second_time_shows():
    assert "spreads of 35% and 31%" in "\n".join(lines_of(RECORD))
    twice = "\n".join(lines_of(replace(RECORD, again=0.55)))
    assert "0.55 when both were measured once more" in twice
    assert "spreads of" not in twice
    assert "measured once" not in "\n".join(lines_of(replace(RECORD, choice={}, chosen_step_s=1.0)))


def test_what_was_not_tried_is_said_and_what_gives_more_time():
    assert "note       no candidates here: threads (a rank has 1)" in lines_of(RECORD)
    assert "--tune-seconds gives more" not in "\n".join(lines_of(replace(RECORD, again=0.5)))
    late = {
        **row({"step_kind": "compiled"}, 1.0, "not tried: it takes about 20 s, 1 s are left"),
        "step_s": None,
    }
    short = replace(RECORD, rows=[*RECORD.rows, {**late, "cost_s": None}])
    assert "1 candidate not tried for want of time: --tune-seconds gives more" in lines_of(short)[-1]
