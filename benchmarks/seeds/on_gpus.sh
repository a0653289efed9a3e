#!/usr/bin/env bash
# One measurement on a machine with GPUs: the GPU tests, then the seeds. Whatever fails, the rest runs.
#   on_gpus.sh DATA YARDSTICK OUT [K,K,...] [SECONDS]
# TESTS=0 leaves the tests out. PYTHON names the interpreter; kway need not be installed in it.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
data=$(realpath "$1") yardstick=$(realpath "$2") gpus=${4:-1,2,4} seconds=${5:-560}
mkdir -p "$3"
out=$(realpath "$3")
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
begun=$SECONDS code=0

"$python" -m kway devices --json >"$out/cluster.json" 2>"$out/devices.log" || code=1
if [ "${TESTS:-1}" != 0 ]; then
    timeout --kill-after=10 270 "$python" -m pytest -q -s -m gpu tests/gpu --timeout 100 --durations 10 \
        -p no:cacheprovider -o faulthandler_timeout=90 >"$out/tests.log" 2>&1 || code=1
    tail -n 25 "$out/tests.log"
fi
left=$((seconds - (SECONDS - begun)))
timeout --kill-after=10 $((left + 10)) "$python" benchmarks/seeds/run.py --data "$data" --yardstick "$yardstick" \
    --gpus "$gpus" --seconds "$left" --out "$out/seeds-${gpus//,/-}.json" 2>&1 | tee "$out/seeds-${gpus//,/-}.log"
[ "${PIPESTATUS[0]}" = 0 ] || code=1
exit "$code"
