#!/usr/bin/env bash
# Fuzzes the file reader for $1 seconds (default 60). `make test-sanitize` calls this.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v clang++ >/dev/null; then
  echo "fuzz: SKIPPED, clang++ was not found. To have it: apt-get install clang"
  exit 0
fi
mkdir -p build/fuzz/corpus
clang++ -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
  -Iinclude -Isrc tests/fuzz/safetensors.cpp src/common/safetensors.cpp src/common/tensor.cpp \
  -o build/fuzz/safetensors
# The initial corpus: one valid file, and two that were once read wrongly.
seed() {  # name, header, data
  local length
  length=$(printf '%08x' ${#2} | sed -E 's/(..)(..)(..)(..)/\\x\4\\x\3\\x\2\\x\1/')
  { printf '%b' "$length\0\0\0\0"; printf '%s' "$2$3"; } >"build/fuzz/$1"
}
seed corpus/good '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"k":"v"}}' 12345678
seed corpus/overflow '{"a":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}}' ''
seed corpus/negative '{"a":{"dtype":"F32","shape":[0,9223372036854775809],"data_offsets":[0,0]}}' ''
# A file with many names, run once. In the corpus it would slow down all other inputs.
seed names "{\"__metadata__\":{$(seq -f '"%g":""' -s , 30000)}}" ''
build/fuzz/safetensors -timeout=5 -verbosity=0 build/fuzz/names
build/fuzz/safetensors -max_total_time="${1:-60}" -timeout=5 -rss_limit_mb=1024 -verbosity=0 \
  -print_final_stats=1 -artifact_prefix=build/fuzz/ -dict=tests/fuzz/safetensors.dict \
  build/fuzz/corpus
