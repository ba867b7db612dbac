#!/bin/sh
# The C++ engine for Windows and macOS, with all warnings as errors, by the Clang and the system headers that the
# package ziglang brings. Where wine is installed, the baseline also runs as a Windows program and gives the same
# bits as on this machine. Not tried: the module itself, which needs those systems' Python.
set -eu
cd "$(dirname "$0")/.."
build=build/platforms
mkdir -p "$build"
flags="-std=c++17 -Wall -Wextra -Werror -ffp-contract=off -fno-trapping-math -fno-math-errno -fno-jump-tables"
flags="$flags -Icsrc -I$build"
python3 csrc/generate_layout.py "$build/layout.h"

check() {
  target=$1 isa=$2
  shift 2
  "$RELEASE/python" -m ziglang c++ -target "$target" $flags -DNGN_ISA="$isa" "$@" -c csrc/cpu/engine.cpp \
    -o "$build/engine.o"
  # MSVC's linker does not get Clang's own library, which has what __builtin_cpu_supports reads.
  if grep -q __cpu_model "$build/engine.o"; then echo "platforms: engine.cpp needs Clang's library" >&2; exit 1; fi
  echo "platforms: $target $isa compiles"
}
check x86_64-windows-gnu baseline
check x86_64-windows-gnu avx2 -mavx2 -mfma
check x86_64-windows-gnu avx512 -mfma -mavx512f -mavx512vl -mavx512bw -mavx512dq -mprefer-vector-width=512
check aarch64-macos baseline
for target in x86_64-windows-gnu aarch64-macos; do
  "$RELEASE/python" -m ziglang c++ -target "$target" $flags -c csrc/cpu/threads.cpp -o "$build/threads.o"
done
# Where the kernels' launcher is of use, without the image, which nvcc makes.
touch "$build/no.fatbin"
for source in driver image; do
  "$RELEASE/python" -m ziglang c++ -target x86_64-windows-gnu $flags -DNGN_IMAGE="\"$build/no.fatbin\"" \
    -c "csrc/cuda/$source.cpp" -o "$build/$source.obj"
done
echo "platforms: the CUDA launcher compiles for Windows"

command -v wine >/dev/null || exit 0
sources="csrc/cpu/engine.cpp csrc/cpu/threads.cpp tests/engine_check.cpp"
g++ $flags -O1 -pthread $sources -o "$build/here"
"$RELEASE/python" -m ziglang c++ -target x86_64-windows-gnu $flags -O1 $sources -o "$build/there.exe"
# The C libraries print a hexadecimal number with or without the zeros at its end.
"$build/here" | sed 's/0*p/p/' >"$build/here.txt"
WINEDEBUG=-all WINEPREFIX="$PWD/$build/wine" wine "$build/there.exe" | tr -d '\r' | sed 's/0*p/p/' >"$build/there.txt"
cmp "$build/here.txt" "$build/there.txt"
echo "platforms: under wine the same bits in $(wc -l <"$build/here.txt") runs"
