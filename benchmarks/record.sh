#!/usr/bin/env bash
# Measure every suite against every peer that Python finds here: benchmarks/record.sh [FOLDER]
#
# FOLDER (benchmarks/results) gets a file for each suite when it is complete. BUDGET=400 begins no
# case after that many seconds. What is compiled comes first, in JOBS processes at once, for PREPARE
# seconds at most. Suites follow in the order of their importance.
set -u
cd "$(dirname "$0")/.." || exit
folder=${1:-benchmarks/results}
python=${PYTHON:-python}
begun=$SECONDS
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1

# the tables that the project is judged by, then what takes minutes: many cases, fresh processes
tables="attention_dense block_sparse backward matmul_founding decode attention_window
 attention_wide backward_wide backward_small attention_small matmul_decode attention_varlen
 training bsr_training mla serving append fp8_attention fp8_matmul fp8_quantize
 sparse_attention selection sparsek gated_attention mask_building host new_sizes distributed"
sweeps="matmul_crossover matmul_llama matmul_square matmul_layers jax first_call"

bench() { "$python" -m blackwell_sparsek bench "$@"; }

measure() {
  local left=() seconds
  if [ -n "${BUDGET:-}" ]; then
    # a case that began in time may have ended after it
    seconds=$((BUDGET - SECONDS + begun))
    left=(--time-left $((seconds > 0 ? seconds : 0)))
  fi
  bench "$@" -o "$folder" "${left[@]}"
}

# shellcheck disable=SC2086 # lists of words
{
  # other sweeps run the kernels of the tables
  bench $tables matmul_llama --prepare "${JOBS:-$(nproc)}" --time-left "${PREPARE:-120}"
  measure $tables --seconds 0.15
  first=$?
  measure $sweeps --seconds 0.05
  second=$?
}
exit $((first > second ? first : second))
