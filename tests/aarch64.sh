#!/bin/sh
# The engine's baseline has nothing of x86 in it: compiled for ARM and run under an emulator, it
# gives the same bits as on this machine. Needs Debian's cross compiler and qemu-user.
set -eu
cd "$(dirname "$0")/.."
build=build/aarch64
flags="-std=c++17 -O3 -Wall -Wextra -Werror -ffp-contract=off -fno-trapping-math -fno-math-errno -pthread"
flags="$flags -Icsrc -I$build"
sources="csrc/cpu/engine.cpp csrc/cpu/threads.cpp tests/engine_check.cpp"
python3 csrc/generate_layout.py "$build/layout.h"
missing=""
command -v aarch64-linux-gnu-g++ >/dev/null || missing="g++-aarch64-linux-gnu"
command -v qemu-aarch64 >/dev/null || missing="$missing qemu-user"
if [ -n "$missing" ]; then
  echo "installing $missing"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi
g++ $flags $sources -o "$build/here"
aarch64-linux-gnu-g++ $flags -static $sources -o "$build/there"
"$build/here" >"$build/here.txt"
qemu-aarch64 "$build/there" >"$build/there.txt"
cmp "$build/here.txt" "$build/there.txt"
echo "aarch64: the same bits in $(wc -l <"$build/here.txt") runs"
