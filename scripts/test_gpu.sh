#!/usr/bin/env bash
# All tests that need an NVIDIA GPU: kernels, servers, compute-sanitizer, and several GPUs where there are several.
#
# PYTHON chooses the interpreter, whose environment must have the project and pytest; python3 by default.
# OSCAR_TEST_SERVER_ARGS adds flags to every server. PARTS names the parts to run, separated by blanks (the names are
# below); all by default. Arguments go to pytest, after those that choose a part's tests (so no -k). All parts take about
# 10 minutes with 16 cores, most of it compilers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" -c 'import torch; assert torch.cuda.is_available()' || {
  echo "error: $python sees no NVIDIA GPU; the line above says why" >&2
  exit 1
}
"$python" -c 'import importlib.metadata as m; m.entry_points(group="sglang.srt.plugins")["oscar"]' 2>/dev/null || {
  echo "error: sglang-oscar is not installed in the environment of $python; pip install -e ." >&2
  exit 1
}
root=$PWD
export PYTHONPATH="$root/python:$root/kernels:$root/rotation:$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

# Parts that need little of the GPU, or wait for compilers, run beside each other.
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
declare -A parts=(
  [memcheck]="test/gpu/test_sanitizer.py -k memcheck"
  [racecheck]="test/gpu/test_sanitizer.py -k racecheck"
  [triton_store]="test/kernels/test_store.py"
  [triton_decode]="test/kernels/test_decode.py"
  [triton_extend]="test/kernels/test_extend.py"
  [triton_ragged]="test/kernels/test_ragged_extend.py"
  [cuda_decode]="test/kernels/test_cuda_decode.py"
  [cuda_store]="test/kernels/test_cuda_store.py"
  [servers]="test/gpu/test_servers.py -k 'not on_'"
  [exact_rows]="test/gpu/test_exact_rows.py -k 'not on_'"
  [adapters]="test/server/test_adapters.py"
  [trainers]="test/gpu/test_memory_saver_gpu.py test/server/test_refit.py test/server/test_key_errors_served.py"
  # On two GPUs where there are two; skipped where Mooncake and nixl are missing.
  [disaggregation]="test/gpu/test_gpu_disaggregation.py"
  # Servers on several GPUs.
  [ranks2]="test/gpu/test_gpu_ranks.py -k on_2"
  [ranks4]="test/gpu/test_gpu_ranks.py -k on_4"
  [servers2]="test/gpu/test_servers.py -k on_2"
  [exact_dense2]="test/gpu/test_exact_rows.py -k 'on_2 and (dense or host_tier or experts)'"
  [exact_drafts2]="test/gpu/test_exact_rows.py -k 'on_2 and draft'"
  [exact_layers2]="test/gpu/test_exact_rows.py -k 'on_2 and (windows or hybrid or stages)'"
  [exact_images2]="test/gpu/test_exact_rows.py -k 'on_2 and images'"
  [servers4]="test/gpu/test_servers.py -k on_4"
  [exact_dense4]="test/gpu/test_exact_rows.py -k 'on_4 and (dense or host_tier)'"
  [exact_drafts4]="test/gpu/test_exact_rows.py -k 'on_4 and draft'"
  [exact_layers4]="test/gpu/test_exact_rows.py -k 'on_4 and (windows or hybrid)'"
)
# A file that no part names runs here.
parts[kernels]="test/kernels"
for part in "${!parts[@]}"; do
  case $part in triton_* | cuda_*) parts[kernels]+=" --ignore ${parts[$part]}" ;; esac
done
for part in ${PARTS:=${!parts[*]}}; do
  [ -n "${parts[$part]:-}" ] || {
    echo "error: PARTS: no part is named $part; there are: ${!parts[*]}" >&2
    exit 1
  }
done
# SGLang would not start on several GPUs because the other parts use the first of them.
export SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0
declare -A jobs
interrupted() {
  kill "${jobs[@]}" 2>/dev/null
  tail -n 100 "$logs"/*
  exit 143
}
trap interrupted TERM INT
for part in $PARTS; do
  eval "selection=(${parts[$part]})"  # expressions of -k have blanks
  "$python" -m pytest -q -s -rs -p no:cacheprovider "${selection[@]}" "$@" >"$logs/$part" 2>&1 &
  jobs[$part]=$!
done
status=0
for part in "${!jobs[@]}"; do
  wait "${jobs[$part]}" || status=1
  echo "== $part"
  cat "$logs/$part"
done
exit "$status"
