#!/bin/sh
# sdist and wheel, each installed in a fresh environment and tried; then without a C++ compiler.
set -eu
cd "$(dirname "$0")/.."
work=build/package
rm -rf "$work"
mkdir -p "$work"
site=$("$BIN/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")

# A fresh environment that sees the development one's torch, but not its ngn_kernels.
fresh() {
  "$BIN/python" -m venv "$work/$1"
  for package in torch torchgen functorch numpy numpy.libs sympy mpmath networkx jinja2 markupsafe \
    filelock fsspec typing_extensions.py triton; do
    if [ -e "$site/$package" ]; then
      ln -s "$site/$package" "$("$work/$1/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/"
    fi
  done
}
try='import torch, ngn_kernels as n
x = torch.nn.Parameter(torch.ones(3)); x.grad = torch.ones(3)
n.NGNMDv1([x], backend="BACKEND").step(loss=1.0); assert (x < 1).all(); print("works:", n.__file__)'

"$BIN/python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { tail -30 "$work/build.log"; exit 1; }
ls "$work/dist"
if "$BIN/python" -m zipfile -l "$work"/dist/*.whl | grep -E "test_|results/|\.png"; then
  echo "the wheel contains tests, results or pictures"
  exit 1
fi
fresh wheel
"$work/wheel/bin/pip" install --quiet --no-deps "$work"/dist/*.whl
(cd "$work" && wheel/bin/python -c "$(echo "$try" | sed s/BACKEND/cpu/)" && wheel/bin/python -m ngn_kernels)
fresh sdist
# Without a compiler there is no wheel that pip could keep; the error says both ways out.
if CXX=/nonexistent/c++ "$work/sdist/bin/pip" install --no-deps "$work"/dist/*.tar.gz >"$work/refused.txt" 2>&1; then
  echo "an install without a compiler must fail"
  exit 1
fi
grep -q "NGN_EXTENSION=0" "$work/refused.txt"
CXX=/nonexistent/c++ NGN_EXTENSION=0 "$work/sdist/bin/pip" install --quiet --no-deps "$work"/dist/*.tar.gz
(cd "$work" && sdist/bin/python -c "$(echo "$try" | sed s/BACKEND/reference/)")
(cd "$work" && sdist/bin/python -m ngn_kernels) | tee "$work/doctor.txt"
grep -q "extension is not built" "$work/doctor.txt"
echo "package: wheel, sdist and an install without a compiler work"
