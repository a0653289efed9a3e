#!/usr/bin/env bash
# One command's worth of the measurement on a machine with GPUs.
#   on_gpus.sh DATA YARDSTICK OUT K[,K...] [SECONDS] [PARTS]
# Rows go to OUT/speed-K.rows.jsonl (with PARTS in the name where given): join them with run.py --merge.
# PYTHON names the interpreter; kway need not be installed in it. KINDS: kway's step kinds.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
data=$(realpath "$1") yardstick=$(realpath "$2") gpus=$4 seconds=${5:-560} parts=${6:-}
mkdir -p "$3"
out=$(realpath "$3")
name="speed-${gpus//,/-}${parts:+-${parts//,/-}}"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
# What is compiled once serves every part of this machine.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/speed-inductor}"
arguments=(--data "$data" --yardstick "$yardstick" --gpus "$gpus" --seconds "$seconds" --out "$out/$name.json")
[ -z "$parts" ] || arguments+=(--parts "$parts")
[ -z "${KINDS:-}" ] || arguments+=(--kinds "$KINDS")
timeout --kill-after=10 $((seconds + 20)) "${PYTHON:-python3}" benchmarks/speed/run.py "${arguments[@]}" 2>&1 |
    tee "$out/$name.log"
exit "${PIPESTATUS[0]}"
