"""Kill runs and go on with them: does each end as the run that was never stopped?

``soak``: SIGKILL one rank, all ranks or the parent, inside steps or inside a save, and go on on another number of
devices. ``saving``: kills aimed at saving 50 MB. ``preempt``: SIGTERM and SIGUSR1 at random moments. One JSON line a
kill; ``--out`` keeps the summary.
"""

import argparse
import collections
import datetime
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from job import EVERY, SHARDS, STEPS
from processes import Running, complete, kill, unfinished

LAST_WORD = "end"


def ended(run: Running) -> tuple[str, str]:
    """Return the fingerprint and the step it went on from, as the run said at its end."""
    words = run.lines[-1].split() if run.lines else []
    return (words[1], words[2]) if words and words[0] == LAST_WORD else ("", "")


def devices_of(draw: random.Random) -> str:
    """Draw a number of devices."""
    return f"cpu:{draw.randint(1, 4)}"


def strike(run: Running, draw: random.Random, inside: str, who: str) -> dict[str, Any]:
    """Kill at a moment of ``inside``: ``step`` or ``save``. Return what was hit and how things stood."""
    saves = run.folder / "checkpoints"
    target = draw.randint(2, STEPS - 2) if inside == "step" else EVERY * draw.randint(1, STEPS // EVERY - 1)
    if not run.until_step(target - (inside == "save")):
        return {"missed": True}
    if inside == "save":
        while not unfinished(saves) and run.process.poll() is None:
            pass
    else:
        time.sleep(draw.random() * 0.02)
    victims = run_victims(run, who, draw)
    during = bool(unfinished(saves))
    kill(victims)
    return {"at_step": run.step, "save_under_way": during, "killed": len(victims)}


def run_victims(run: Running, who: str, draw: random.Random) -> list[int]:
    """Choose the processes to kill. A job on one device has no ranks beside its own process."""
    ranks = [pid for pid, rank in run.known.items() if rank >= 0]
    if who == "parent" or not ranks:
        return [run.process.pid]
    return ranks if who == "all" else [draw.choice(ranks)]


def soak(options: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """Kill ``--kills`` runs and go on with each to its end."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kway-soak-") as place:
        whole = Running(Path(place, "whole"), "cpu:2", "lenet")
        whole.end()
        expected, _ = ended(whole)
        assert expected, whole.errors[-5:]
        while len(rows) < options.kills:
            row = one_kill(Path(place, f"run-{len(rows)}"), draw, len(rows), expected)
            if row is not None:
                rows.append(row)
                print(json.dumps(row), flush=True)
    lost = [row["lost_steps"] for row in rows]
    return {
        "runs": len(rows),
        "same_sha256": sum(row["same"] for row in rows),
        "inside_steps": sum(not row["inside_saving"] for row in rows),
        "inside_saving": sum(row["inside_saving"] for row in rows),
        "who": dict(collections.Counter(row["who"] for row in rows)),
        "devices_before_and_after": dict(collections.Counter(f"{r['before']} {r['after']}" for r in rows)),
        "interval_steps": EVERY,
        "lost_steps_median": statistics.median(lost),
        "lost_steps_most": max(lost),
        "lost_more_than_an_interval": sum(row["lost_intervals"] > 1 for row in rows),
        "failed_to_go_on": sum(row["code"] != 0 for row in rows),
        "processes_left": sum(row["left"] for row in rows),
    }


def one_kill(folder: Path, draw: random.Random, number: int, expected: str) -> dict[str, Any] | None:
    """Kill one run and go on with it; ``None`` where it ended before it was hit."""
    inside = "save" if number % 20 < 9 else "step"
    who = ("rank", "all", "parent")[(number + number // 20) % 3]
    before, after = devices_of(draw), devices_of(draw)
    run = Running(folder, before, "lenet")
    run.until_step(1)
    run.known = run.pids()
    hit = strike(run, draw, inside, who)
    if hit.get("missed"):
        run.process.kill()
        run.left()
        return None
    run.end()
    left = run.left()
    begun = unfinished(folder / "checkpoints")
    there = complete(folder / "checkpoints")
    # What was said last may be older than what was done: the pipe is read by a thread of its own.
    again = Running(folder, after, "lenet")
    code = again.end()
    found, resumed = ended(again)
    went_on = int(resumed) if resumed.isdigit() else 0
    return {
        "kill": number,
        "who": who,
        "before": before,
        "after": after,
        "inside_saving": bool(begun),
        "at_step": run.step,
        "resumed_from": went_on,
        "newest": there[-1] if there else None,
        "lost_steps": run.step - went_on,
        # A save that was under way at the kill is not lost work: it had not been promised yet.
        "lost_intervals": max(0, (run.step - went_on - 1) // EVERY - bool(begun)),
        "left": len(left),
        "code": code,
        "same": found == expected,
    }


def saving(options: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """Kill 2 ranks again and again while they save 50 MB; each start loads what the last one left."""
    from kway.checkpoints.reading import newest

    rows = []
    with tempfile.TemporaryDirectory(prefix="kway-saving-") as place:
        folder = Path(place, "run")
        saves = folder / "checkpoints"
        while len(rows) < options.kills:
            run = Running(folder, "cpu:2", "large")
            if not run.until_step(1):
                raise SystemExit("\n".join(run.errors[-10:]))
            run.known = run.pids()
            # Most kills meet a save that has complete ones before it: there is something to lose then.
            wanted = len(complete(saves)) + draw.choice([0, 1, 1, 2])
            deadline = time.monotonic() + 30
            while len(complete(saves)) < wanted and time.monotonic() < deadline:
                time.sleep(0.002)
            before = complete(saves)
            while not (begun := unfinished(saves)) and time.monotonic() < deadline:
                pass
            time.sleep(draw.random() * 0.05)
            kill(run_victims(run, draw.choice(["rank", "all", "parent"]), draw))
            run.end()
            left = run.left()
            warned: list[str] = []
            found = newest(saves, warned.append)
            if found is not None:
                found.verify()
                found.weights()
            rows.append(
                {
                    "kill": len(rows),
                    "unfinished": len(unfinished(saves)),
                    "newest": None if found is None else found.step,
                    # Not an older one either: what was complete before the kill stays.
                    "whole": not before or (found is not None and found.step >= before[-1]),
                    "broken": warned,
                    "left": len(left),
                    "began": len(begun),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return {
        "kills": len(rows),
        "left_an_unfinished_save": sum(row["unfinished"] > 0 for row in rows),
        "newest_was_whole": sum(row["whole"] and not row["broken"] for row in rows),
        "with_one_before": sum(row["newest"] is not None for row in rows),
        "processes_left": sum(row["left"] for row in rows),
    }


def preempt(options: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """Send signals at random moments, each to a run that goes on from the last, until all are sent."""
    rows: list[dict[str, Any]] = []
    ends = []
    with tempfile.TemporaryDirectory(prefix="kway-preempt-") as place:
        whole = Running(Path(place, "whole"), "cpu:1", "lenet")
        whole.end()
        expected, _ = ended(whole)
        number = 0
        while len(rows) < options.kills:
            folder, last = Path(place, f"run-{number}"), 0
            number += 1
            while True:
                devices = devices_of(draw)
                run = Running(folder, devices, "lenet")
                name = draw.choice(["SIGTERM", "SIGUSR1"])
                if len(rows) < options.kills and run.until_step(min(STEPS - 5, last + draw.randint(1, 60))):
                    run.process.send_signal(getattr(signal, name))
                code = run.end()
                if code == 0:
                    ends.append(ended(run)[0] == expected)
                    break
                steps = {p.name: int(p.read_text()) for p in folder.glob("rank-*.steps")}
                first, stopped = run.first, complete(folder / "checkpoints")[-1]
                rows.append(
                    {
                        "signal": name,
                        "devices": devices,
                        "code": code,
                        "stopped_at": stopped,
                        "first_step_said": first,
                        "in_order": first == last + 1,
                        "said": run.errors[-1] if run.errors else "",
                        "passes": steps,
                        "at_one_step": at_one_step(steps, stopped - last),
                        "left": len(run.left()),
                    }
                )
                last = rows[-1]["stopped_at"]
                for path in folder.glob("rank-*.steps"):
                    path.unlink()
                print(json.dumps(rows[-1]), flush=True)
    return {
        "signals": len(rows),
        "stopped_with_code_75": sum(row["code"] == 75 for row in rows),
        "stopped_at_one_step_on_all_ranks": sum(row["at_one_step"] for row in rows),
        "went_on_with_the_next_step": sum(row["in_order"] for row in rows),
        "runs_ended": len(ends),
        "runs_with_the_sha256_of_the_whole": sum(ends),
        "processes_left": sum(row["left"] for row in rows),
    }


def at_one_step(passes: dict[str, int], taken: int) -> bool:
    """Whether the ranks, a forward pass for each of their shards, have taken so many steps each."""
    least, most = SHARDS // len(passes), -(-SHARDS // len(passes))
    return sum(passes.values()) == SHARDS * taken and {*passes.values()} <= {least * taken, most * taken}


def kept(found: dict[str, Any]) -> bool:
    """Whether what was counted is what kway promises."""
    whole = {
        "runs": ("same_sha256",),
        "kills": ("newest_was_whole",),
        "signals": (
            "stopped_with_code_75",
            "stopped_at_one_step_on_all_ranks",
            "went_on_with_the_next_step",
        ),
        "runs_ended": ("runs_with_the_sha256_of_the_whole",),
    }
    none = ("lost_more_than_an_interval", "failed_to_go_on", "processes_left")
    return not any(found.get(name) for name in none) and all(
        found[name] == found[count] for count, names in whole.items() if count in found for name in names
    )


def main() -> int:
    """Run one of the three. Exit code 1 where anything was not as it is promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["soak", "saving", "preempt"])
    parser.add_argument("--kills", type=int, help="default: 100, 50, 30")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.kills = options.kills or {"soak": 100, "saving": 50, "preempt": 30}[options.what]
    begun = time.monotonic()
    work = {"soak": soak, "saving": saving, "preempt": preempt}[options.what]
    found = work(options, random.Random(options.seed))
    import torch

    found |= {
        "seconds": round(time.monotonic() - begun),
        "seed": options.seed,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} usable cores",
        "torch": str(torch.__version__),
    }
    print(json.dumps(found), flush=True)
    if options.out is not None:
        held = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps({**held, options.what: found}, indent=2) + "\n")
    return 0 if kept(found) else 1


if __name__ == "__main__":
    sys.exit(main())
