#!/bin/sh
# sdist and wheel: what they contain, and each installed in a fresh environment and tried, the wheel where there
# is no compiler. Then an installation from the sources without a compiler.
set -eu
cd "$(dirname "$0")/.."
work=$PWD/build/package
rm -rf "$work"
mkdir -p "$work/path"
purelib="import sysconfig; print(sysconfig.get_paths()['purelib'])"
site=$("$BIN/python" -c "$purelib")

# A fresh environment that sees the development one's torch, but not its ngn_kernels; with the oldest numpy.
fresh() {
  "$BIN/python" -m venv "$work/$1"
  for package in torch torchgen functorch sympy mpmath networkx jinja2 markupsafe \
    filelock fsspec typing_extensions.py triton; do
    if [ -e "$site/$package" ]; then
      ln -s "$site/$package" "$("$work/$1/bin/python" -c "$purelib")/"
    fi
  done
  "$work/$1/bin/pip" install --quiet "numpy==$(sed -n 's/^numpy==//p' tests/versions/oldest.txt)"
}
# Run in a folder without the sources, with a PATH on which there is no program.
alone() {
  (cd "$work" && env -i PATH="$work/path" HOME="$work" "$@")
}

"$BIN/python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { tail -30 "$work/build.log"; exit 1; }
PATH="$RELEASE:$PATH" "$RELEASE/auditwheel" show "$work"/dist/*.whl
PATH="$RELEASE:$PATH" "$RELEASE/auditwheel" repair --wheel-dir "$work/repaired" "$work"/dist/*.whl
case $(ls "$work/repaired") in *-manylinux_2_*) ;; *) echo "auditwheel found no manylinux policy"; exit 1 ;; esac
"$BIN/python" tests/packages.py "$work"/repaired/*.whl "$work"/dist/*.tar.gz "$@"

fresh wheel
"$work/wheel/bin/pip" install --quiet --no-deps "$work"/repaired/*.whl
alone "$work/wheel/bin/python" "$PWD/tests/smoke.py" cpu reference triton
alone "$work/wheel/bin/python" -m ngn_kernels | tee "$work/doctor.txt"
grep -q "^compilers *C++: none; C: none" "$work/doctor.txt"
grep -q "^cpu *available" "$work/doctor.txt"
grep -q "^reference *available" "$work/doctor.txt"
if "$BIN/python" csrc/find_nvcc.py 75 80 >"$work/nvcc.txt" 2>&1; then
  grep -q "^cuda *no GPU here" "$work/doctor.txt" # not: not built
fi
# What README shows a newcomer.
sed -n '/^```python$/,/^```$/p' README.md | sed '/^```/d' >"$work/readme.py"
grep -q "optimizer.step(loss=loss)" "$work/readme.py"
alone "$work/wheel/bin/python" -W error::RuntimeWarning "$work/readme.py"

fresh sdist
# Without a compiler there is no wheel that pip could keep; the error says both ways out.
if CXX=/nonexistent/c++ "$work/sdist/bin/pip" install --no-deps "$work"/dist/*.tar.gz >"$work/refused.txt" 2>&1; then
  echo "an install without a compiler must fail"
  exit 1
fi
grep -q "NGN_EXTENSION=0" "$work/refused.txt"
CXX=/nonexistent/c++ NGN_EXTENSION=0 "$work/sdist/bin/pip" install --quiet --no-deps "$work"/dist/*.tar.gz
alone "$work/sdist/bin/python" "$PWD/tests/smoke.py" reference
alone "$work/sdist/bin/python" -m ngn_kernels >"$work/doctor.txt"
grep -q "extension is not built" "$work/doctor.txt"

# cibuildwheel itself needs Docker; which wheels it would build, it says without.
wheels=0
for platform in linux/x86_64 linux/aarch64 macos/arm64 windows/AMD64; do
  "$RELEASE/cibuildwheel" --print-build-identifiers --platform "${platform%/*}" --archs "${platform#*/}" \
    >"$work/identifiers.txt"
  wheels=$((wheels + $(wc -l <"$work/identifiers.txt")))
done
[ "$wheels" -eq 20 ] || { echo "cibuildwheel would build $wheels wheels, not 5 for each of 4 platforms"; exit 1; }
echo "package: wheel, sdist and an install without a compiler work"
