#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command and under eight minutes:
#
#     benchmarks/gpu/check.sh [OUTPUT_DIR]          (default: gpu-check)
#
# Needs torch >= 2.11, Triton >= 3.6 and transformers >= 5.17 in the interpreter that PYTHON names; no network, no Rust.
# The rest comes from WHEELS (default: wheels/): a folder with specbatch's abi3 wheel and, where they are not installed, those
# of pytest and hypothesis with what they need, made beforehand:
#
#     maturin build --release --out wheels && pip download --only-binary :all: -d wheels pytest hypothesis
#
# Writes JSON and logs to OUTPUT_DIR and prints a summary; exits 1 when something failed, 3 when there is no GPU.
# REHEARSE=1 does on a CPU, with a tiny model, what can be done there: to try this script before it is needed.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=$(mkdir -p "${1:-gpu-check}" && cd "${1:-gpu-check}" && pwd) || exit 1
python=${PYTHON:-python}
wheels=${WHEELS:-wheels}
rehearse=${REHEARSE:-}
export PYTHONPATH=$PWD:$out/site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
started=$SECONDS

if compgen -G "$wheels/*.whl" >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --upgrade --target "$out/site" "$wheels"/*.whl || exit 1
fi
# The checkout goes before the wheel, so it borrows the wheel's compiled core where it has none of its own.
if ! compgen -G "specbatch/_core*.so" >/dev/null; then
    cp "$out"/site/specbatch/_core*.so specbatch/ 2>/dev/null
fi
"$python" - <<'END' || exit 1
import importlib, sys
wanted = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 17), "specbatch._core": (), "pytest": (), "hypothesis": ()}
for name, least in wanted.items():
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name} cannot be imported: {error} (see the head of this script)")
    found = tuple(int(n) for n in module.__version__.split("+")[0].split(".")[:2]) if least else ()
    if found < least:
        sys.exit(f"{name} {module.__version__} is too old, at least {'.'.join(map(str, least))} is needed")
END
if [ -z "$rehearse" ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
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
    tail -n 40 "$out/$name.log"
    echo "== $name: exit $code after $((SECONDS - start)) s"
    [ $code -eq 0 ] || failed+=("$name")
}

run doctor $([ -n "$rehearse" ] && echo 150 || echo 60) "$python" -c '
import json, sys
from specbatch.doctor import diagnose
found = diagnose()
json.dump(found.to_dict(), open(sys.argv[1], "w"), indent=1)
print(json.dumps(found.to_dict(), indent=1))
sys.exit(not found.healthy)' "$out/doctor.json"
if [ -n "$rehearse" ]; then
    run tests 120 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/gpu tests/test_rng.py
    run engine_speed 120 "$python" -m benchmarks.gpu.engine_speed --device cpu --dtype float32 --shapes tiny \
        --rows 1,4 --steps 10 --json "$out/engine_speed.json"
else
    run tests 160 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/gpu tests/test_rng.py
    run engine_speed 150 "$python" -m benchmarks.gpu.engine_speed --seconds 125 --json "$out/engine_speed.json"
    run attention 70 "$python" -m benchmarks.gpu.attention --json "$out/attention.json"
fi

"$python" - "$out" "$((SECONDS - started))" "${failed[*]:-}" <<'END'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
parts = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if path.stem != "summary"}
summary = {"seconds": int(sys.argv[2]), "failed": sys.argv[3].split(), **parts}
(out / "summary.json").write_text(json.dumps(summary, indent=1))
END
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed after $((SECONDS - started)) s: ${failed[*]} (logs in $out)"
    exit 1
fi
echo "all passed after $((SECONDS - started)) s; results in $out/summary.json"
