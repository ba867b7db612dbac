"""The lab's readers, on small files in each data set's published format."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from ngn_bench.errors import BenchError
from ngn_bench.lab import data


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write_mnist(folder: Path, count: int = 40, packed: bool = True) -> np.ndarray:
    """MNIST's four files with `count` random images; returns the training images."""
    rng = np.random.default_rng(0)
    (folder / "mnist").mkdir(parents=True)
    for prefix in ("t10k", "train"):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            name = f"{prefix}-{kind}-ubyte"
            if packed:
                (folder / "mnist" / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / "mnist" / name).write_bytes(idx(array))
    return images


@pytest.mark.parametrize("packed", [True, False])
def test_mnist(tmp_path: Path, packed: bool) -> None:
    images = write_mnist(tmp_path, packed=packed)
    train, test = data.mnist(tmp_path)
    assert train.images.shape == test.images.shape == (40, 1, 28, 28)
    assert train.images.squeeze(1).equal(torch.from_numpy(images))
    assert train.labels.tolist() == [k % 10 for k in range(40)]


DAMAGED = gzip.compress(idx(np.zeros((3, 28, 28), np.uint8))[:-5])


@pytest.mark.parametrize(
    ("content", "message"),
    [(DAMAGED, "is not an IDX file"), (DAMAGED[:-20], "cannot be unpacked")],
    ids=["damaged", "cut"],
)
def test_a_faulty_mnist_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(BenchError, match=rf"train-images-idx3-ubyte\.gz {message}"):
        data.mnist(tmp_path)


def test_a_missing_token_file_names_the_option(tmp_path: Path) -> None:
    np.array([1], np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(BenchError, match=r"val\.bin.*--text") as caught:
        data.language(tmp_path, str(tmp_path), None)
    assert "--data-dir" not in str(caught.value)


def test_a_missing_file_is_named_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(BenchError) as caught:
        data.mnist(tmp_path / "nowhere")
    message = str(caught.value)
    assert "train-images-idx3-ubyte.gz" in message
    assert "MNIST database" in message
    assert "--data-dir" in message


READERS = [
    (data.cifar10, "cifar-10-batches-bin", "University of Toronto"),
    (data.cifar100, "cifar-100-binary", "University of Toronto"),
    (data.imagenet32, "train_data_batch_1", "image-net.org"),
    (lambda folder: data.imagenet1k(folder, 224), "imagenet1k/train", "image-net.org"),
    (data.shakespeare, "tinyshakespeare/input.txt", "char-rnn"),
    (data.rotten_tomatoes, "rt-polarity.neg", "Cornell"),
    (data.ptb, "ptb.train.txt", "RNNLM"),
    (data.wikitext2, "wiki.train.tokens", "Salesforce Research"),
]


@pytest.mark.parametrize(("read", "name", "source"), READERS)
def test_every_reader_names_what_is_missing(read, name: str, source: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError) as caught:
        read(tmp_path)
    assert name in str(caught.value)
    assert source in str(caught.value)


def cifar_rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), np.arange(count) % 10


def write_cifar10(folder: Path, count: int = 20, binary: bool = True) -> None:
    """CIFAR-10's files, binary or Python version, with `count` images each."""
    inner = folder / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    inner.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        images, labels = cifar_rows(count, seed)
        if binary:
            rows = np.concatenate([labels[:, None].astype(np.uint8), images], axis=1)
            (inner / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            batch = {b"data": images, b"labels": labels.tolist(), b"batch_label": b"x"}
            (inner / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("binary", [True, False])
def test_cifar10(tmp_path: Path, binary: bool) -> None:
    write_cifar10(tmp_path, binary=binary)
    train, test = data.cifar10(tmp_path)
    assert train.images.shape == (100, 3, 32, 32)
    assert test.images.shape == (20, 3, 32, 32)
    expected, labels = cifar_rows(20, 1)
    assert train.images[20:40].flatten(1).equal(torch.from_numpy(expected))
    assert train.labels[20:40].tolist() == labels.tolist()


def write_cifar100(folder: Path, count: int = 20, binary: bool = True) -> None:
    """CIFAR-100's files, binary or Python version, with `count` images each."""
    inner = folder / ("cifar-100-binary" if binary else "cifar-100-python")
    inner.mkdir(parents=True)
    for seed, name in enumerate(("train", "test")):
        images, _ = cifar_rows(count, seed)
        fine = np.arange(count) * 3 % 100
        if binary:
            labels = np.stack([fine // 5, fine], 1).astype(np.uint8)
            (inner / f"{name}.bin").write_bytes(np.concatenate([labels, images], 1).tobytes())
        else:
            batch = {b"data": images, b"fine_labels": fine.tolist(), b"coarse_labels": [0] * count}
            (inner / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("binary", [True, False])
def test_cifar100_takes_the_fine_labels(tmp_path: Path, binary: bool) -> None:
    write_cifar100(tmp_path, binary=binary)
    train, test = data.cifar100(tmp_path)
    assert train.labels.tolist() == test.labels.tolist() == [k * 3 for k in range(20)]


def test_a_cut_cifar_file_is_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BenchError, match=r"data_batch_2\.bin is not made of rows of 3073 bytes"):
        data.cifar10(tmp_path)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
def test_a_cifar_file_cut_between_two_images_is_named(
    name: str, binary: bool, tmp_path: Path
) -> None:
    write_cifar10(tmp_path, binary=binary)
    fewer = tmp_path / "fewer"
    write_cifar10(fewer, count=15, binary=binary)
    (path,) = tmp_path.glob(f"cifar-10-batches-*/{name}*")
    (cut,) = fewer.glob(f"*/{name}*")
    path.write_bytes(cut.read_bytes())
    with pytest.raises(BenchError, match=rf"{name}.*15 images.*20.*get it again"):
        data.cifar10(tmp_path)


@pytest.mark.parametrize("npz", [True, False])
def test_a_cut_imagenet32_file_is_named(npz: bool, tmp_path: Path) -> None:
    write_imagenet32(tmp_path, npz)
    (path,) = (tmp_path / "imagenet32").glob("train_data_batch_7*")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(BenchError, match=r"train_data_batch_7.*is not a"):
        data.imagenet32(tmp_path)


class Malicious:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, capsys) -> None:
    write_cifar10(tmp_path, binary=False)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Malicious(), b"labels": []}))
    with pytest.raises(BenchError, match="refused"):
        data.cifar10(tmp_path)
    assert capsys.readouterr().out == ""


def write_imagenet32(folder: Path, npz: bool, count: int = 4) -> None:
    """ImageNet32's ten training batches and its validation batch; classes count from 1."""
    inner = folder / "imagenet32"
    inner.mkdir(parents=True)
    for seed, name in enumerate([*(f"train_data_batch_{k}" for k in range(1, 11)), "val_data"]):
        images, _ = cifar_rows(count, seed)
        labels = [1 + (seed + k) % 1000 for k in range(count)]
        if npz:
            np.savez(inner / f"{name}.npz", data=images, labels=labels, mean=images.mean(0))
        else:
            (inner / name).write_bytes(pickle.dumps({"data": images, "labels": labels}))


@pytest.mark.parametrize("npz", [True, False])
def test_imagenet32_counts_classes_from_zero(tmp_path: Path, npz: bool) -> None:
    write_imagenet32(tmp_path, npz)
    train, test = data.imagenet32(tmp_path)
    assert train.images.shape == (40, 3, 32, 32)
    assert train.labels[:4].tolist() == [0, 1, 2, 3]
    assert test.images.flatten(1).equal(torch.from_numpy(cifar_rows(4, 10)[0]))


def write_imagenet1k(folder: Path, classes: int = 2, count: int = 3) -> None:
    """Folders of JPEGs: class k is a colour of its own, on images of different sizes."""
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for k in range(classes):
            inner = folder / "imagenet1k" / part / f"n{k:08d}"
            inner.mkdir(parents=True)
            for number in range(count):
                colour = (255, 0, 0) if k == 0 else (0, 0, 255)
                image.new("RGB", (90 + 20 * number, 70), colour).save(inner / f"{number}.JPEG")


def test_imagenet1k(tmp_path: Path) -> None:
    write_imagenet1k(tmp_path)
    train, val = data.imagenet1k(tmp_path, side=32)
    assert len(train) == len(val) == 6
    assert train.classes == 2
    for folder in (train, val):
        red, label = folder[0]
        blue, other = folder[5]
        assert red.shape == (3, 32, 32)
        assert (label, other) == (0, 1)
        assert red[0].min() > 0.9 and red[2].max() < 0.1
        assert blue[2].min() > 0.9 and blue[0].max() < 0.1


def test_imagenet1k_training_crops_differ_and_validation_crops_do_not(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    ramp = np.tile(np.arange(100, dtype=np.uint8), (80, 1))
    for part in ("train", "val"):
        inner = tmp_path / "imagenet1k" / part / "n0"
        inner.mkdir(parents=True)
        image.fromarray(np.stack([ramp] * 3, -1)).save(inner / "ramp.png")
    train, val = data.imagenet1k(tmp_path, side=16)
    torch.manual_seed(0)
    assert not train[0][0].equal(train[0][0])
    assert val[0][0].equal(val[0][0])
    assert float(val[0][0].mean()) == pytest.approx(49.5 / 255, abs=0.02)


def test_characters_hold_out_the_last_tenth(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text("ab" * 45 + "c" * 10)
    text = data.shakespeare(tmp_path)
    assert text.vocab == 3
    assert text.train.tolist() == [0, 1] * 45
    assert text.held_out.tolist() == [2] * 10


def test_rotten_tomatoes_is_latin1_and_keeps_every_line(tmp_path: Path) -> None:
    (tmp_path / "rotten_tomatoes").mkdir()
    for kind, line in (("neg", "d\xe9j\xe0 vu \x85 \n"), ("pos", "bon \n")):
        path = tmp_path / "rotten_tomatoes" / f"rt-polarity.{kind}"
        path.write_bytes(line.encode("latin-1") * 30)
    text = data.rotten_tomatoes(tmp_path)
    assert text.vocab == len(set("d\xe9j\xe0 vu \x85 \nbon"))
    assert len(text.train) + len(text.held_out) == 30 * 10 + 30 * 4 + 59


@pytest.mark.parametrize("name", ["wikitext-2/wiki.{}.tokens", "wikitext-2-raw/wiki.{}.raw"])
def test_wikitext2_words(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name.format("train")).write_text(" = Title = \n a b a \n")
    (tmp_path / name.format("valid")).write_text(" a z b \n")
    text = data.wikitext2(tmp_path)
    assert text.vocab == len({"<unk>", "=", "Title", "<eos>", "a", "b"})
    assert text.train.tolist() == [1, 2, 1, 3, 4, 5, 4, 3]
    assert text.held_out.tolist() == [4, 0, 5, 3]


def test_ptb_words(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.train.txt").write_text(" no it was <unk> \n")
    (tmp_path / "ptb" / "ptb.valid.txt").write_text(" it was new \n")
    text = data.ptb(tmp_path)
    assert text.train.tolist() == [1, 2, 3, 0, 4]
    assert text.held_out.tolist() == [2, 3, 0, 4]


def test_language_model_text_as_bytes_and_as_stored_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(100)))
    text = data.language(tmp_path, str(tmp_path / "text.txt"), None)
    assert text.vocab == 256
    assert text.held_out.tolist() == list(range(90, 100))
    np.array([1, 65535, 7], np.uint16).tofile(tmp_path / "train.bin")
    np.array([50279, 3], np.uint16).tofile(tmp_path / "val.bin")
    stored = data.language(tmp_path, str(tmp_path), None)
    assert stored.vocab == data.NEOX_VOCAB
    assert (stored.train.long() & 0xFFFF).tolist() == [1, 65535, 7]


def test_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a b c a b a b a b a")
    text = data.language(tmp_path, str(tmp_path / "text.txt"), str(tmp_path / "tokenizer.json"))
    assert text.vocab == 3
    assert text.train.tolist() == [1, 2, 0, 1, 2, 1, 2, 1, 2]


def test_diabetes_says_which_set_it_is(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    fallback = data.diabetes(tmp_path)
    assert fallback.features.shape == (442, 10)
    assert "not the paper's Pima set" in fallback.name
    (tmp_path / "pima_diabetes").mkdir()
    path = tmp_path / "pima_diabetes" / "pima-indians-diabetes.csv"
    path.write_text("a,b,c,d,e,f,g,h,Target\n1,2,3,4,5,6,7,8,1\n8,7,6,5,4,3,2,1,0\n")
    pima = data.diabetes(tmp_path)
    assert pima.name == "Pima Indians Diabetes"
    assert pima.features.shape == (2, 8)
    assert pima.targets.tolist() == [1, 0]
