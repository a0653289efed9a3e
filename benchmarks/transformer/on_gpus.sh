#!/usr/bin/env bash
# One command's worth of the measurement on a machine with GPUs.
#   on_gpus.sh YARDSTICK OUT K[,K...] [SIZES] [SECONDS] [PARTS]
# Rows go to OUT/gpt-K-SIZES.rows.jsonl (with PARTS in the name where given): join them with run.py --merge.
# YARDSTICK: the folder of gpt.py, or - for none. PYTHON names the interpreter; kway need not be installed in it.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
gpus=$3 sizes=${4:-124m,774m} seconds=${5:-400} parts=${6:-}
arguments=(--gpus "$gpus" --sizes "$sizes" --seconds "$seconds")
[ "$1" = - ] || arguments+=(--yardstick "$(realpath "$1")")
mkdir -p "$2"
out=$(realpath "$2")
name="gpt-${gpus//,/-}-${sizes//,/-}${parts:+-${parts//,/-}}"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
# What is compiled once serves every part of this machine.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/gpt-inductor}"
[ -z "$parts" ] || arguments+=(--parts "$parts")
timeout --kill-after=10 $((seconds + 20)) "${PYTHON:-python3}" benchmarks/transformer/run.py \
    "${arguments[@]}" --out "$out/$name.json" 2>&1 | tee "$out/$name.log"
exit "${PIPESTATUS[0]}"
