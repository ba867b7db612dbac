#!/bin/sh
# The engine with threads of its own under the thread sanitizer, which must be silent; and once more
# with partial sums that all threads share, of which it must not be.
set -eu
cd "$(dirname "$0")/.."
build=build/sanitize_threads
flags="-std=c++17 -O1 -g -ffp-contract=off -fno-trapping-math -fno-math-errno -pthread -fsanitize=thread"
python3 csrc/generate_layout.py "$build/layout.h"
export TSAN_OPTIONS=halt_on_error=1:exitcode=66

check() { # a folder with csrc and tests, the name of the program
  g++ $flags "-I$1/csrc" "-I$build" "$1/csrc/cpu/engine.cpp" "$1/csrc/cpu/threads.cpp" "$1/tests/engine_check.cpp" \
    -o "$build/$2"
  # Where addresses are laid out at random, some kernels leave the sanitizer no room.
  setarch -R "$build/$2" 1 4 >"$build/$2.txt" 2>"$build/$2.log"
}

check . engine || { cat "$build/engine.log"; exit 1; }
# Both numbers of threads have the same bits.
grep "threads 1 " "$build/engine.txt" | sed "s/threads 1 //" >"$build/one.txt"
grep "threads 4 " "$build/engine.txt" | sed "s/threads 4 //" >"$build/four.txt"
test -s "$build/one.txt"
cmp "$build/one.txt" "$build/four.txt"

rm -rf "$build/shared"
mkdir -p "$build/shared/tests"
cp -r csrc "$build/shared"
cp tests/engine_check.cpp "$build/shared/tests"
sed -i "s/bucket.partials\\[i\\] = {effective_step/bucket.partials[0] = {effective_step/" "$build/shared/csrc/cpu/engine.cpp"
if cmp -s csrc/cpu/engine.cpp "$build/shared/csrc/cpu/engine.cpp"; then
  echo "tests/sanitize_threads.sh: engine.cpp has no such line: correct the one that shares partial sums" >&2
  exit 1
fi
if check "$build/shared" race; then
  echo "tests/sanitize_threads.sh: shared partial sums were not noticed" >&2
  exit 1
fi
grep -q "ThreadSanitizer: data race" "$build/race.log" || { cat "$build/race.log"; exit 1; }
echo "threads: no race in $(wc -l <"$build/engine.txt") runs, and one where partial sums are shared"
