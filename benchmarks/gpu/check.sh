#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command and under eight minutes:
#
#     benchmarks/gpu/check.sh [OUTPUT_DIR]          (default: gpu-check)
#
# Needs torch >= 2.11, Triton >= 3.6, transformers >= 5.17, pytest and hypothesis, and specbatch itself: installed from a
# wheel, or its compiled core in specbatch/. No network, no Rust. PYTHON chooses the interpreter. Writes JSON and logs to
# OUTPUT_DIR and prints a summary; exits 1 when something failed, 3 when there is no GPU.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=$(mkdir -p "${1:-gpu-check}" && cd "${1:-gpu-check}" && pwd) || exit 1
python=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$python" -c 'import torch, triton, transformers, specbatch._core' || exit 1
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device that torch can use; to see what is missing: specbatch doctor" >&2
    exit 3
fi

failed=()
run() { # name, seconds, command...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    local code=$?
    tail -n 25 "$out/$name.log"
    echo "== $name: exit $code after $((SECONDS - start)) s"
    [ $code -eq 0 ] || failed+=("$name")
}

run doctor 60 "$python" -c 'import json; from specbatch.doctor import diagnose; print(json.dumps(diagnose().to_dict(), indent=1))'
run tests 180 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/gpu
run attention 90 "$python" benchmarks/gpu/attention.py --json "$out/attention.json"
for part in benchmarks/gpu/engine_*.py; do
    [ -e "$part" ] || continue
    name=$(basename "$part" .py)
    run "$name" 150 "$python" "$part" --json "$out/$name.json"
done

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]} (logs in $out)"
    exit 1
fi
echo "all passed; results in $out"
