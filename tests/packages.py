"""What an sdist and a wheel contain, and how large they are: `packages.py ARCHIVE… [--write]`.

Fails if one contains what its users do not need, lacks what they do, or has outgrown the table of
docs/packaging.md by a fifth. `--write` writes that table.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "packaging.md"
TABLE = re.compile(r"(<!-- sizes:start -->\n).*(<!-- sizes:end -->)", re.S)
ROW = re.compile(r"^\| (\S+) \| ([\d,]+) kB \|", re.M)
PICTURE = re.compile(r"\.(png|svg|jpg|gif|pdf)$")
RECORD = re.compile(r"(^|/)results/|\.jsonl$")
GROWTH = 1.2


def files_of(archive: Path) -> dict[str, int]:
    """Names, without an sdist's own folder, and sizes."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {info.filename: info.file_size for info in wheel.infolist()}
    with tarfile.open(archive) as sdist:
        return {m.name.partition("/")[2]: m.size for m in sdist.getmembers() if m.isfile()}


def complaints(kind: str, files: dict[str, int]) -> list[str]:
    found = [f"{name} is a record" for name in files if RECORD.search(name)]
    if kind == "wheel":
        needed = (
            *("ngn_kernels/optimizer.py", "ngn_kernels/py.typed", "ngn_kernels/_cpu.pyi"),
            *("ngn_kernels/_cuda.pyi", "ngn_bench/gpu/stub_driver.c"),
        )
        pictures = [name for name in files if PICTURE.search(name)]
        found += [f"{n} is a test" for n in files if re.search(r"(^|/)(tests?/|test_|conftest)", n)]
        found += [
            f"{n} is a source of the extension"
            for n in files
            if n.endswith((".cpp", ".h", ".cu", ".cuh"))
        ]
        if not any(re.match(r"ngn_kernels/_cpu\..*(so|pyd)$", name) for name in files):
            found.append("the extension is missing")
    else:
        needed = (
            *("setup.py", "CMakeLists.txt", "csrc/cpu/engine.cpp", "csrc/cuda/kernels.cu"),
            *("csrc/find_nvcc.py", "tests/oracle.py", "LICENSE"),
        )
        pictures = [n for n in files if PICTURE.search(n) and n != "docs/images/step-sizes.png"]
        found += [f"{n} was built" for n in files if n.endswith((".so", ".pyd", ".pyc"))]
    found += [f"{name} is a picture" for name in pictures]
    return found + [f"{name} is missing" for name in needed if name not in files]


def main(arguments: list[str]) -> int:
    write = "--write" in arguments
    archives = [Path(word) for word in arguments if word != "--write"]
    known = {
        name: int(size.replace(",", "")) for name, size in ROW.findall(PAGE.read_text("utf-8"))
    }
    failed, rows = [], []
    for archive in archives:
        kind = "wheel" if archive.suffix == ".whl" else "sdist"
        files = files_of(archive)
        size = archive.stat().st_size // 1000
        failed += [f"{archive.name}: {complaint}" for complaint in complaints(kind, files)]
        if not write and size > GROWTH * known.get(kind, 0):
            failed.append(f"{archive.name}: {size} kB; docs/packaging.md says {known.get(kind)} kB")
        largest = max(files, key=lambda name: files[name])
        rows.append(
            f"| {kind} | {size:,} kB | {sum(files.values()) // 1000:,} kB | {len(files)} "
            f"| `{largest.rpartition('/')[2].partition('.')[0]}`, {files[largest] // 1000:,} kB |\n"
        )
    print("".join(rows), end="")
    if write:
        head = "| | size | unpacked | files | the largest file |\n| :-- | --: | --: | --: | :-- |\n"
        table = head + "".join(rows)
        text = TABLE.sub(lambda match: match[1] + table + match[2], PAGE.read_text("utf-8"))
        PAGE.write_text(text, encoding="utf-8")
    for line in failed:
        print(line, file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
