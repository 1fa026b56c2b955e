#!/usr/bin/env bash
# Compare Triton releases on one GPU: benchmarks/releases.sh FOLDER RELEASE[=PATH] RELEASE=PATH ...
#
#     pip install --no-deps --target /tmp/triton-3.9.0 triton==3.9.0
#     benchmarks/releases.sh benchmarks/results/releases/2026-11-19 3.6.0 3.9.0=/tmp/triton-3.9.0
#
# A release without a PATH is the installed one. Results go to FOLDER/triton-RELEASE. Releases take
# turns, group of suites by group of suites, so that all are measured at the same temperature. What is
# compiled comes first, in JOBS processes at once; every release has a cache of its own.
set -u
cd "$(dirname "$0")/.." || exit
folder=$1
shift
python=${PYTHON:-python}
caches=${TRITON_CACHE_DIR:-$HOME/.triton/cache}
groups=("backward decode matmul_decode" "attention_dense block_sparse matmul_founding host" "first_call")

# bench RELEASE[=PATH] ARGUMENTS: `bsk bench` of this library alone
bench() {
  local name=${1%%=*} path=${1#"${1%%=*}"}
  shift
  path=${path#=}
  PYTHONPATH="${path:+$path:}src${PYTHONPATH:+:$PYTHONPATH}" TRITON_CACHE_DIR="$caches-$name" \
    "$python" -m blackwell_sparsek bench "$@" --peers bsk
}

status=0
for release in "$@"; do
  # shellcheck disable=SC2086 # a list of words
  bench "$release" ${groups[0]} ${groups[1]} --prepare "${JOBS:-$(nproc)}" --time-left 120
done
for group in "${groups[@]}"; do
  for release in "$@"; do
    # shellcheck disable=SC2086
    bench "$release" $group --seconds 0.25 -o "$folder/triton-${release%%=*}" || status=1
  done
done
exit $status
