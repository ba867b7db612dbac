"""Readers of data sets in the formats in which they are published.

Each takes the data folder (`--data-dir`) and returns tensors. Nothing is downloaded: the error for
a missing file names the file, where it should be and where it comes from.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import pickle
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import BenchError, missing_package


class Images(NamedTuple):
    """Images as bytes (number, channels, height, width) and their class numbers."""

    images: Tensor
    labels: Tensor


class Split(NamedTuple):
    train: Images
    test: Images


class Text(NamedTuple):
    """Token numbers of a text's training and held-out parts, and the size of the vocabulary."""

    train: Tensor
    held_out: Tensor
    vocab: int


def locate(folder: Path, names: Sequence[str], source: str) -> Path:
    """The first of `names` that exists below `folder`."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    wanted = " or ".join(str(folder / name) for name in names)
    raise BenchError(
        f"missing data: {wanted}\n  It comes from {source}. "
        "Put it there, or say with --data-dir where your data folder is."
    )


def optional(module: str, package: str, what: str) -> Any:
    """Import an optional dependency; raise with the install command if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(what, package) from error


def _require(condition: bool, path: Path, what: str) -> None:
    if not condition:
        raise BenchError(f"{path} is not {what}: the file is damaged or of another format")


def _idx(path: Path) -> Tensor:
    """An array in MNIST's IDX format: type and rank in four bytes, big-endian sizes, then bytes."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise BenchError(f"{path} cannot be unpacked ({error}): get the file again") from error
    _require(content[:3] == b"\x00\x00\x08" and len(content) > 3, path, "an IDX file of bytes")
    rank = content[3]
    shape = np.frombuffer(content, ">u4", rank, 4).astype(int).tolist()
    _require(len(content) == 4 + 4 * rank + int(np.prod(shape)), path, f"an IDX file of {shape}")
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    return torch.from_numpy(values.reshape(shape).copy())


@functools.cache
def mnist(data_dir: Path) -> Split:
    """MNIST from its four IDX files, packed or not."""
    source = (
        "the MNIST database of handwritten digits by LeCun, Cortes and Burges, or a mirror of it"
    )

    def part(prefix: str) -> Images:
        arrays = []
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
            names = [f"mnist/{prefix}-{kind}.gz", f"mnist/{prefix}-{kind}"]
            arrays.append(_idx(locate(data_dir, names, source)))
        return Images(arrays[0].unsqueeze(1), arrays[1].long())

    return Split(part("train"), part("t10k"))


@functools.cache
def digits() -> Split:
    """The 8×8 digits that come with scikit-learn; every fifth one is held out."""
    bunch = optional("sklearn.datasets", "scikit-learn", "digits-mlp").load_digits()
    images = torch.tensor(bunch.images * (255 / 16), dtype=torch.uint8).unsqueeze(1)
    labels = torch.tensor(bunch.target, dtype=torch.long)
    held_out = torch.arange(len(labels)) % 5 == 0
    return Split(
        Images(images[~held_out], labels[~held_out]), Images(images[held_out], labels[held_out])
    )


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays inside plain containers, and refuses anything that could run code."""

    ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise BenchError(f"a data file asks for {module}.{name}, which no array needs: refused")
        return super().find_class(module, name)


def _unpickle(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        try:
            content = _ArrayUnpickler(file, encoding="bytes").load()
        except (pickle.UnpicklingError, EOFError) as error:
            raise BenchError(f"{path} is not a pickled batch: {error}") from error
    return {key.decode() if isinstance(key, bytes) else key: v for key, v in content.items()}


def _unzip(path: Path) -> dict[str, Any]:
    try:
        with np.load(path) as arrays:
            return {name: arrays[name] for name in ("data", "labels") if name in arrays}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise BenchError(f"{path} is not a whole .npz file ({error}): get it again") from error


def _pickled_images(path: Path, label_key: str) -> Images:
    batch = _unpickle(path)
    _require({"data", label_key} <= batch.keys(), path, f"a batch with data and {label_key}")
    return _stack([(batch["data"], batch[label_key])])


def _same_size(paths: Sequence[Path], parts: Sequence[Images]) -> None:
    """Raise if a file of CIFAR-10 has fewer images than the others: it was cut short."""
    most = max(len(part.labels) for part in parts)
    for path, part in zip(paths, parts, strict=True):
        if len(part.labels) < most:
            raise BenchError(
                f"{path} has {len(part.labels)} images where another file has {most}: "
                "it was cut short, get it again"
            )


def _joined(parts: Sequence[Images]) -> Images:
    return Images(torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts]))


def _stack(batches: Sequence[tuple[Any, Any]], first_label: int = 0) -> Images:
    images = np.concatenate([np.asarray(data, dtype=np.uint8) for data, _ in batches])
    labels = np.concatenate([np.asarray(labels, dtype=np.int64) for _, labels in batches])
    side = round((images.shape[1] / 3) ** 0.5)
    return Images(
        torch.from_numpy(images.reshape(-1, 3, side, side)), torch.from_numpy(labels - first_label)
    )


def _binary_images(path: Path, label_bytes: int) -> Images:
    """CIFAR's binary version: label bytes (the last one counts), then 3072 bytes of image."""
    rows, width = np.fromfile(path, np.uint8), label_bytes + 3072
    _require(rows.size > 0 and rows.size % width == 0, path, f"made of rows of {width} bytes")
    rows = rows.reshape(-1, width)
    return _stack([(rows[:, label_bytes:], rows[:, label_bytes - 1])])


CIFAR_SOURCE = "the CIFAR page of Alex Krizhevsky, University of Toronto (binary or Python version)"


@functools.cache
def cifar10(data_dir: Path) -> Split:
    """CIFAR-10, binary version or Python version."""
    folders = ("cifar-10-batches-bin", "cifar-10-batches-py")
    folder = locate(data_dir, folders, CIFAR_SOURCE)
    binary = folder.name == folders[0]
    suffix = ".bin" if binary else ""

    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    paths = [locate(folder, [name + suffix], CIFAR_SOURCE) for name in names]
    parts = [_binary_images(p, 1) if binary else _pickled_images(p, "labels") for p in paths]
    _same_size(paths, parts)
    return Split(_joined(parts[:-1]), parts[-1])


@functools.cache
def cifar100(data_dir: Path) -> Split:
    """CIFAR-100 with its 100 fine labels, binary version or Python version."""
    folders = ("cifar-100-binary", "cifar-100-python")
    folder = locate(data_dir, folders, CIFAR_SOURCE)

    def part(name: str) -> Images:
        if folder.name == folders[0]:
            return _binary_images(locate(folder, [f"{name}.bin"], CIFAR_SOURCE), 2)
        return _pickled_images(locate(folder, [name], CIFAR_SOURCE), "fine_labels")

    return Split(part("train"), part("test"))


@functools.cache
def imagenet32(data_dir: Path) -> Split:
    """ImageNet at 32×32: ten training batches and `val_data`, pickled or as .npz."""
    source = "the downloads of image-net.org (downsampled images, 32×32)"
    folder = data_dir / "imagenet32"

    def part(names: Sequence[str]) -> Images:
        batches = []
        for name in names:
            path = locate(folder, [name, f"{name}.npz"], source)
            batch: Any = _unzip(path) if path.suffix == ".npz" else _unpickle(path)
            _require("data" in batch and "labels" in batch, path, "a batch with data and labels")
            batches.append((batch["data"], batch["labels"]))
        return _stack(batches, first_label=1)

    return Split(part([f"train_data_batch_{k}" for k in range(1, 11)]), part(["val_data"]))


class ImageFolder(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """ImageNet-1k as folders of JPEGs, one folder per class.

    Training images are cropped at random and flipped; the others are resized and cropped in the
    middle. Items are float images in [0, 1].
    """

    def __init__(self, folder: Path, training: bool, side: int = 224) -> None:
        image_module = optional("PIL.Image", "pillow", "ImageNet-1k")
        self.open: Callable[[IO[bytes]], Any] = image_module.open
        self.training = training
        self.side = side
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self.items = [
            (path, label)
            for label, class_folder in enumerate(classes)
            for path in sorted(class_folder.iterdir())
            if path.suffix.lower() in (".jpeg", ".jpg", ".png")
        ]
        self.classes = len(classes)
        if not self.items:
            raise BenchError(f"{folder} has no folders of JPEG images, one per class")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.items[index]
        with path.open("rb") as file:
            image = self.open(file).convert("RGB")
        image = self._random_crop(image) if self.training else self._middle_crop(image)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if self.training and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return pixels.contiguous(), label

    def _random_crop(self, image: Any) -> Any:
        """A box of 8–100 % of the area and an aspect of 3:4–4:3, resized to a square."""
        width, height = image.size
        for _ in range(10):
            area = width * height * float(torch.empty(()).uniform_(0.08, 1))
            aspect = float(torch.empty(()).uniform_(np.log(3 / 4), np.log(4 / 3)).exp())
            w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                left = int(torch.randint(width - w + 1, ()))
                top = int(torch.randint(height - h + 1, ()))
                box = (left, top, left + w, top + h)
                return image.resize((self.side, self.side), box=box)
        return self._middle_crop(image)

    def _middle_crop(self, image: Any) -> Any:
        width, height = image.size
        side = min(width, height) * 7 / 8
        left, top = (width - side) / 2, (height - side) / 2
        return image.resize((self.side, self.side), box=(left, top, left + side, top + side))


def imagenet1k(data_dir: Path, side: int) -> tuple[ImageFolder, ImageFolder]:
    """ImageNet-1k: `imagenet1k/train/<class>/*.JPEG` and `imagenet1k/val/<class>/*.JPEG`."""
    source = (
        "the downloads of image-net.org (ILSVRC2012; the validation images have to be sorted into "
        "one folder per class)"
    )
    train = locate(data_dir, ["imagenet1k/train"], source)
    val = locate(data_dir, ["imagenet1k/val"], source)
    return ImageFolder(train, True, side), ImageFolder(val, False, side)


def _characters(text: str) -> Text:
    """Characters as tokens; the last tenth of the text is held out."""
    alphabet, codes = np.unique(np.array(list(text)), return_inverse=True)
    tokens = torch.from_numpy(codes.astype(np.int64))
    cut = int(0.9 * len(tokens))
    return Text(tokens[:cut], tokens[cut:], len(alphabet))


def shakespeare_path(data_dir: Path) -> Path:
    source = "the folder data/tinyshakespeare of Karpathy's repository char-rnn"
    return locate(data_dir, ["tinyshakespeare/input.txt"], source)


@functools.cache
def shakespeare(data_dir: Path) -> Text:
    """Tiny Shakespeare, by character."""
    return _characters(shakespeare_path(data_dir).read_text(encoding="utf-8"))


@functools.cache
def rotten_tomatoes(data_dir: Path) -> Text:
    """The sentences of the Rotten Tomatoes polarity set, by character, in a fixed random order."""
    source = "the sentence polarity dataset v1.0 of Pang and Lee's movie review data, Cornell"
    lines: list[str] = []
    for kind in ("neg", "pos"):
        path = locate(data_dir, [f"rotten_tomatoes/rt-polarity.{kind}"], source)
        lines += path.read_text(encoding="latin-1").split("\n")[:-1]
    order = np.random.default_rng(0).permutation(len(lines))
    return _characters("\n".join(lines[k] for k in order))


def _words(train: Path, held_out: Path) -> Text:
    """Words as tokens, lines ended by <eos>; words that the training text lacks become <unk>."""
    vocab: dict[str, int] = {"<unk>": 0}
    parts: list[Tensor] = []
    for path in (train, held_out):
        words = path.read_text(encoding="utf-8").replace("\n", " <eos> ").split()
        if not parts:
            for word in words:
                vocab.setdefault(word, len(vocab))
        parts.append(torch.tensor([vocab.get(word, 0) for word in words], dtype=torch.long))
    return Text(parts[0], parts[1], len(vocab))


@functools.cache
def ptb(data_dir: Path) -> Text:
    """The Penn Treebank as prepared by Mikolov, by word."""
    source = "the folder data of simple-examples.tgz, the examples of Mikolov's RNNLM toolkit"
    train = locate(data_dir, ["ptb/ptb.train.txt"], source)
    return _words(train, locate(data_dir, ["ptb/ptb.valid.txt"], source))


@functools.cache
def wikitext2(data_dir: Path) -> Text:
    """WikiText-2 by word, from its `.tokens` files or the raw ones."""
    source = "WikiText-2 by Merity et al., Salesforce Research, word-level or raw"
    stems = ["wikitext-2/wiki.{}.tokens", "wikitext-2/wiki.{}.raw", "wikitext-2-raw/wiki.{}.raw"]
    train, held_out = (
        locate(data_dir, [stem.format(part) for stem in stems], source)
        for part in ("train", "valid")
    )
    return _words(train, held_out)


NEOX_VOCAB = 50280
"""The paper's vocabulary: the GPT-NeoX tokenizer's, padded."""


def language(data_dir: Path, text: str | None, tokenizer: str | None) -> Text:
    """Text for the language models, as bytes or through a tokenizer file.

    `text` is a UTF-8 file, whose last tenth is held out, or a folder with `train.bin` and `val.bin`
    of 16-bit token numbers; without it, Tiny Shakespeare.
    """
    path = Path(text) if text else shakespeare_path(data_dir)
    if path.is_dir():
        train, held_out = (_stored_tokens(path / f"{part}.bin") for part in ("train", "val"))
        vocab = _tokenizer(tokenizer).get_vocab_size() if tokenizer else NEOX_VOCAB
        return Text(train, held_out, vocab)
    if not path.exists():
        raise BenchError(
            f"missing text: {path}. --text names a text file, or a folder with train.bin and val.bin"
        )
    if tokenizer:
        encoder = _tokenizer(tokenizer)
        numbers = encoder.encode(path.read_text(encoding="utf-8")).ids
        tokens, vocab = torch.tensor(numbers, dtype=torch.long), encoder.get_vocab_size()
    else:
        tokens, vocab = torch.from_numpy(np.fromfile(path, np.uint8)), 256
    cut = int(0.9 * len(tokens))
    return Text(tokens[:cut], tokens[cut:], vocab)


def _stored_tokens(path: Path) -> Tensor:
    if not path.exists():
        raise BenchError(
            f"missing tokens: {path}. A folder given with --text holds train.bin and val.bin, "
            "16-bit token numbers without a header"
        )
    return torch.from_numpy(np.fromfile(path, np.int16))


def _tokenizer(path: str) -> Any:
    """A tokenizer.json in the format of Hugging Face's tokenizers."""
    tokenizers = optional("tokenizers", "tokenizers", "a tokenizer file")
    if not Path(path).exists():
        raise BenchError(f"missing tokenizer file: {path}")
    return tokenizers.Tokenizer.from_file(path)


class Table(NamedTuple):
    """A regression problem: features, targets, and which data set it is."""

    features: np.ndarray
    targets: np.ndarray
    name: str


def diabetes(data_dir: Path) -> Table:
    """Pima Indians Diabetes if the data folder has it, otherwise scikit-learn's diabetes set."""
    path = data_dir / "pima_diabetes" / "pima-indians-diabetes.csv"
    if path.exists():
        first = path.open(encoding="utf-8").readline()
        header = any(character.isalpha() for character in first)
        rows = np.loadtxt(path, delimiter=",", skiprows=int(header))
        _require(rows.ndim == 2 and rows.shape[1] == 9, path, "a table of 8 features and a target")
        return Table(rows[:, :-1], rows[:, -1], "Pima Indians Diabetes")
    what = f"without {path} (the Pima Indians Diabetes Database as CSV), diabetes"
    datasets = optional("sklearn.datasets", "scikit-learn", what)
    features, targets = datasets.load_diabetes(return_X_y=True)
    name = f"scikit-learn's diabetes set, not the paper's Pima set (no {path})"
    return Table(features, targets, name)
