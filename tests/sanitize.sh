#!/bin/sh
# The CPU tests with an extension built under the address and undefined-behaviour sanitizers.
set -eu
cd "$(dirname "$0")/.."
build=build/sanitize
copy=$build/package
rm -rf "$copy"
mkdir -p "$copy"
cp -r ngn_kernels bench tests pyproject.toml "$copy"
rm -f "$copy"/ngn_kernels/*.so
ln -s bench "$copy/ngn_bench"
"$BIN/cmake" -S . -B "$build/cmake" -G Ninja -DNGN_SANITIZE=ON -DNGN_WERROR=ON -DNGN_CUDA=off \
  -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DCMAKE_MAKE_PROGRAM="$BIN/ninja" -DPython_EXECUTABLE="$BIN/python" \
  -Dpybind11_DIR="$("$BIN/python" -m pybind11 --cmakedir)" \
  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$copy/ngn_kernels"
MAKEFLAGS= "$BIN/cmake" --build "$build/cmake"
cd "$copy"
# Python and torch do not free everything at exit, and torch's own code is not instrumented.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONPATH="$PWD" \
  "$BIN/python" -m pytest -q -p no:cacheprovider tests/test_cpu_engine.py tests/test_conformance.py \
  tests/test_atomic.py tests/test_layouts.py -k "cpu and not two_to_the_31 and not device and not linker"
