#!/usr/bin/env bash
# Fuzzes what reads files, for as many seconds as the first argument says: `make test-sanitize`.
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
# A file that is right, to start from: 79 bytes of header, 8 of data.
printf '\x4f\0\0\0\0\0\0\0%s12345678' \
  '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"k":"v"}}' \
  >build/fuzz/corpus/good
build/fuzz/safetensors -max_total_time="${1:-60}" -timeout=5 -rss_limit_mb=1024 -verbosity=0 \
  -print_final_stats=1 -artifact_prefix=build/fuzz/ -dict=tests/fuzz/safetensors.dict \
  build/fuzz/corpus
