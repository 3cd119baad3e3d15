#!/usr/bin/env bash
# Measures the tables of benchmark/README.md on this machine's GPU.
#
#   bash benchmark/run.sh                      all of it: some hours
#   bash benchmark/run.sh kernels paper        these parts
#   bash benchmark/run.sh --list [PART ...]    only prints the commands
#
# Results go to OUT (results/CARD by default, such as results/h200), logs of servers beside them. What is there already is
# not measured again, so a run that was cut off goes on. A measurement that fails does not stop the others; its output
# is in OUT/NAME.out, and the exit status is 1. SERVER_ARGS adds flags to every server, PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
list=0
if [ "${1:-}" = --list ]; then
  list=1
  shift
fi
if [ -z "${OUT:-}" ]; then
  card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | sed 's/^NVIDIA //' | tr 'A-Z ' 'a-z_' || true)
  [ -n "$card" ] || [ "$list" = 1 ] || {
    echo "error: nvidia-smi names no GPU; these tables need one" >&2
    exit 1
  }
  OUT=results/${card:-card}
fi
failed=()

measure() {  # measure NAME FLAG SCRIPT [ARGUMENT ...]: FLAG is how SCRIPT is told where its result goes
  local name=$1 flag=$2
  shift 2
  # Scripts save as they go: what is not complete has another name, however the run ends.
  local command=("$python" "$@" "$flag" "$OUT/$name.part.json")
  if [ "$list" = 1 ]; then
    local word line=
    for word in "${command[@]}"; do
      [[ $word != *[!A-Za-z0-9_./:,=+-]* ]] || word=${word@Q}
      line+="$word "
    done
    echo "${line% }"
    return
  fi
  if [ -e "$OUT/$name.json" ]; then
    echo "$name: there already"
    return
  fi
  echo "$name: ${command[*]}"
  mkdir -p "$OUT"
  local begin=$SECONDS
  if "${command[@]}" >"$OUT/$name.out" 2>&1; then
    mv "$OUT/$name.part.json" "$OUT/$name.json"
    echo "$name: $((SECONDS - begin)) s"
  else
    failed+=("$name")
    echo "$name: failed after $((SECONDS - begin)) s; see $OUT/$name.out" >&2
  fi
}
kernel() { measure "kernels_$1" --json "benchmark/kernels/$2.py" "${@:3}"; }
serving() { measure "$1" --out "benchmark/serving/$2.py" "${@:3}" ${SERVER_ARGS:+--server-args "$SERVER_ARGS"}; }

stock=flashinfer,flashinfer_fp8,fa3,fa3_fp8,xqa,xqa_fp8
caches=bf16,fp8,fa3,fa3_fp8,xqa_fp8,int2,k2v2
reference=(--k-rotation test/data/reference_k_rotation.safetensors --v-rotation test/data/reference_v_rotation.safetensors)

kernels() {
  kernel decode bench_decode --kernels cuda,cuda:k3v2,cuda:k4v2,triton --baselines "$stock"
  kernel decode_256 bench_decode --heads 16x2x256,24x2x256,32x2x256,32x4x256 --shapes 8x131072,32x32768 \
    --kernels cuda --baselines "$stock"
  kernel decode_exact bench_decode --no-baseline --shapes 1x100000,32x32768 \
    --kernels triton,triton:k16v2,triton:k2v16,triton:k16v16
  kernel verify bench_verify --kernels cuda,triton --heads 32x8,96x8,48x8
  kernel store bench_store
  kernel store_k3v2 bench_store --bits k3v2
  kernel extend bench_extend
}
decode() {
  serving decode_qwen3_8b bench_decode
  serving decode_qwen3_4b bench_decode --shape qwen3-4b
}
throughput() {
  serving throughput_qwen3_8b bench_throughput --modes "$caches" --requests 8,45,full
  # A prompt of 100K tokens takes a quarter of the time with a quarter of the layers, in a quarter of the memory.
  SERVER_ARGS="--mem-fraction-static 0.22${SERVER_ARGS:+ $SERVER_ARGS}" serving throughput_100k_qwen3_8b_9_layers \
    bench_throughput --shape qwen3-8b:9 --length 100000 --modes "$caches" --requests 1,8,full
}
speculation() {
  serving speculation_ngram_qwen3_8b bench_speculation
  serving speculation_eagle3_qwen3_8b bench_speculation --algorithm EAGLE3 --modes fa3,fa3_fp8,int2
  serving speculation_nextn_qwen3.6_35b_a3b bench_speculation --algorithm NEXTN --shape qwen3.6-35b-a3b \
    --loads 4x131072,32x32768,1x261000 --modes fa3,fa3_fp8,int2
}
hybrids() {
  # With few layers a step waits for the host, whatever the cache: 70 and 53 GB of weights.
  serving context_qwen3.6_35b_a3b bench_context --shape qwen3.6-35b-a3b --modes fa3,fa3_fp8,int2 --steps
  serving context_qwen3_next bench_context --shape qwen3-next-80b-a3b:16 --modes fa3,fa3_fp8,int2 --steps
  SERVER_ARGS="--moe-runner-backend triton${SERVER_ARGS:+ $SERVER_ARGS}" serving context_gpt_oss_20b bench_context \
    --shape gpt-oss-20b --loads 4x130816,1x130816 --modes fa3,fa3_fp8,int2
  serving room_qwen3.6_35b_a3b bench_context --shape qwen3.6-35b-a3b --room
}
paper() {
  serving paper_qwen3_8b bench_paper table8,table9,figure4,figure5,figure6 --modes "$caches"
  serving paper_qwen3_4b bench_paper table8,table9,figure4,figure5,figure6 --modes "$caches" --shape qwen3-4b
}
memory() {
  serving memory_qwen3_8b memory_account --shapes qwen3-8b --fill 0.15
  serving memory_qwen3_32b memory_account --shapes qwen3-32b --fill 0.3 --longest 40000
}
arrivals() { SERVER_ARGS="--mem-fraction-static 0.22${SERVER_ARGS:+ $SERVER_ARGS}" serving arrivals_qwen3_8b_9_layers bench_arrivals; }
tiers() {
  serving host_tier_qwen3_8b bench_host_tier
  serving sessions_qwen3_8b bench_sessions
}
start() { serving start_qwen3_8b bench_start; }
two_gpus() {
  [ "$list" = 1 ] || [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ] || {
    echo "two_gpus: this machine has one GPU"
    return
  }
  local shape
  for shape in qwen3-32b glm-4.7:10; do
    SERVER_ARGS="--tp-size 2${SERVER_ARGS:+ $SERVER_ARGS}" serving "throughput_tp2_${shape/:/_layers_}" bench_throughput \
      --shape "$shape" --modes fa3,fa3_fp8,int2 --requests 8,full
  done
  serving disaggregation_qwen3_8b bench_disaggregation --gpus 0,1 --transfers mooncake_tcp,nixl --modes fa3,int2 \
    --lengths 2048,8192,32768
}
soak() {
  serving soak soak "${reference[@]}" --requests 10000 --part 1000 --longest 60000 --tokens 131072
  serving soak_poisoned soak "${reference[@]}" --requests 2000 --poison 50
  serving soak_poisoned_drafts soak "${reference[@]}" --requests 2000 --poison 50 --drafts
}
fit() {
  measure fit --out benchmark/rotation/bench_fit.py
  measure fit_focus --out benchmark/rotation/bench_fit.py --recipe focus
}

parts=(kernels decode throughput speculation hybrids paper memory arrivals tiers two_gpus start soak fit)
for part in "$@"; do
  [[ " ${parts[*]} " == *" $part "* ]] || {
    echo "error: no part is named $part; there are: ${parts[*]}" >&2
    exit 1
  }
done
for part in "${@:-${parts[@]}}"; do "$part"; done
[ ${#failed[@]} = 0 ] || {
  echo "failed: ${failed[*]}" >&2
  exit 1
}
