"""The paper's training tasks by name, with the set-ups of its table "Summary of experiment setup".

A task is a function from a `Setup` to a `Problem`. One's own is named `file.py:function` or
`package.module:function` on the command line and needs no registration.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import models
from ..errors import BenchError, unknown_name
from ..models.text import PlusSize
from . import data
from .problems import (
    Classification,
    FolderClassification,
    LanguageModel,
    Prepare,
    Problem,
    RecurrentLanguageModel,
    three_stairs,
    warmup_cosine,
)


@dataclass(frozen=True)
class Scale:
    """By how much to cut the paper's sizes down: 1 is the paper's, smaller is smaller."""

    steps: float = 1.0
    model: float = 1.0
    batch: float = 1.0
    context: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Scale:
        """`0.1`: a tenth of the training, √0.1 of width, depth, context; or `steps=…,model=…`."""
        parts = text.split(",")
        try:
            if "=" not in text:
                factor = float(text)
                root = math.sqrt(factor)
                scale = cls(steps=factor, model=root, context=root)
            else:
                scale = cls(**{key: float(value) for key, value in (p.split("=") for p in parts)})
        except (TypeError, ValueError) as error:
            raise BenchError(
                f"--scale is a number or some of steps=, model=, batch=, context=, not {text!r}"
            ) from error
        if not all(0 < value <= 1 for value in vars(scale).values()):
            raise BenchError(f"--scale makes things smaller: values in (0, 1], not {text!r}")
        return scale

    def __str__(self) -> str:
        return ",".join(f"{key}={value:.6g}" for key, value in vars(self).items())


@dataclass(frozen=True)
class Setup:
    """What a task is built from: data folder, seed, scale, and options such as the model's size."""

    data_dir: Path = Path("data")
    seed: int = 0
    scale: Scale = field(default_factory=Scale)
    options: dict[str, str] = field(default_factory=dict)
    loader_workers: int = 0

    def size(self, full: int) -> int:
        """A width, a depth or a number of heads of the model, cut down."""
        return max(1, round(full * self.scale.model))

    def epochs(self, full: float) -> float:
        """An amount of training, cut down."""
        return full * self.scale.steps

    def steps(self, full: int) -> int:
        return max(1, round(full * self.scale.steps))

    def batch(self, full: int) -> int:
        return max(1, round(full * self.scale.batch))

    def context(self, full: int) -> int:
        return max(2, round(full * self.scale.context))

    def held_out(self, full: int) -> int:
        """How much held-out data to score on: less for short trainings, but enough to compare."""
        return max(min(full, 1000), round(full * min(1.0, 25 * self.scale.steps)))


Build = Callable[[Setup], Problem]
TASKS: dict[str, Build] = {}


def task(name: str) -> Callable[[Build], Build]:
    """Register a task under a name of its own."""

    def register(build: Build) -> Build:
        TASKS[name] = build
        return build

    return register


def find_task(name: str) -> Build:
    """A task by its name, or as `file.py:function` or `package.module:function`."""
    if name in TASKS:
        return TASKS[name]
    if ":" not in name:
        raise unknown_name("task", name, [*TASKS, "your_file.py:function"])
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place)
        if not path.exists():
            raise BenchError(f"no task file {place}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise BenchError(f"cannot load the task: {describe(error, name)}") from error
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise BenchError(f"cannot import the task's module {place}: {error}") from error
    if not callable(getattr(module, function, None)):
        raise BenchError(f"{place} has no function {function!r}")
    return getattr(module, function)


def task_file(name: str) -> Path | None:
    """The file of a task of one's own; None for the paper's tasks."""
    if name in TASKS:
        return None
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place)
    spec = importlib.util.find_spec(place)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def fingerprint(paths: Sequence[Path]) -> str:
    """A short hash of the content of files, and of the files of folders; empty without any."""
    digest = hashlib.sha256()
    for path in paths:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in filter(Path.is_file, files):
            with file.open("rb") as stream:
                while block := stream.read(2**20):
                    digest.update(block)
    return digest.hexdigest()[:16] if paths else ""


def describe(error: Exception, task_name: str) -> str:
    """What went wrong in a task, and for one's own file in which line of it."""
    place = task_name.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__) if place.endswith(".py") else []
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == Path(place).resolve()]
    where = f" ({place}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def _normalised(mean: tuple[float, ...], std: tuple[float, ...], augment: bool = False) -> Prepare:
    """Bytes to standardised floats; in training, shift by up to 4 pixels and flip."""
    mean_bytes = torch.tensor(mean).view(-1, 1, 1) * 255
    std_bytes = torch.tensor(std).view(-1, 1, 1) * 255

    def prepare(images: Tensor, training: bool) -> Tensor:
        pixels = (images - mean_bytes.to(images.device)) / std_bytes.to(images.device)
        return _shift_and_flip(pixels) if training and augment else pixels

    return prepare


def _shift_and_flip(pixels: Tensor) -> Tensor:
    number, _, height, width = pixels.shape
    padded = F.pad(pixels, (4, 4, 4, 4))
    top, left = torch.randint(9, (2, number, 1), device=pixels.device)
    rows = top + torch.arange(height, device=pixels.device)
    columns = left + torch.arange(width, device=pixels.device)
    flipped = torch.rand(number, 1, device=pixels.device) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    index = torch.arange(number, device=pixels.device).view(-1, 1, 1)
    moved = padded.permute(0, 2, 3, 1)[index, rows.unsqueeze(2), columns.unsqueeze(1)]
    return moved.permute(0, 3, 1, 2).contiguous()


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _images(setup: Setup, split: data.Split) -> data.Split:
    """The split, with the test images cut down as the set-up says."""
    count = setup.held_out(len(split.test.labels))
    return split._replace(test=data.Images(split.test.images[:count], split.test.labels[:count]))


def _mlp(
    setup: Setup, split: data.Split, prepare: Prepare, epochs: float, batch_size: int
) -> Problem:
    """An MLP of 2×100 on grey images."""
    model = models.MLP(split.train.images[0].numel(), (setup.size(100), setup.size(100)), 10)
    problem = Classification(
        model, split.train, split.test, setup.epochs(epochs), setup.batch(batch_size), prepare
    )
    return problem.configure(watch=("hidden.0.weight", "hidden.1.weight", "head.weight"))


@task("digits-mlp")
def digits_mlp(setup: Setup) -> Problem:
    """MLP of 2×100 on scikit-learn's digits, 15 epochs of batches of 32; needs no data files."""
    return _mlp(setup, data.digits(), _normalised((0.3053,), (0.3760,)), 15, 32)


def smoothed_floor(smoothing: float, classes: int) -> float:
    """The entropy of smoothed labels, and a rounding below it: no batch's loss is smaller."""
    other = smoothing / classes
    own = 1 - smoothing + other
    return -(own * math.log(own) + (classes - 1) * other * math.log(other)) * (1 - 1e-6)


@task("digits-smoothed")
def digits_smoothed(setup: Setup) -> Problem:
    """digits-mlp with labels smoothed by 0.2, so that no loss falls below 0.867."""
    smoothing = 0.2
    return digits_mlp(setup).configure(
        label_smoothing=smoothing, loss_floor=smoothed_floor(smoothing, 10)
    )


@task("digits-noisy")
def digits_noisy(setup: Setup) -> Problem:
    """digits-mlp in batches of 4, and three in ten training labels drawn at random."""
    train, test = data.digits()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(10, (len(train.labels),), generator=generator)
    noisy = torch.rand(len(drawn), generator=generator) < 0.3
    train = data.Images(train.images, torch.where(noisy, drawn, train.labels))
    return _mlp(setup, data.Split(train, test), _normalised((0.3053,), (0.3760,)), 5, 4)


@task("mnist-mlp")
def mnist_mlp(setup: Setup) -> Problem:
    """MLP of 2×100 on MNIST, 10 epochs of batches of 128."""
    split = _images(setup, data.mnist(setup.data_dir))
    return _mlp(setup, split, _normalised((0.1307,), (0.3081,)), 10, 128)


def _cifar(
    setup: Setup, split: data.Split, model: torch.nn.Module, epochs: float, batch_size: int
) -> Problem:
    train, test = _images(setup, split)
    prepare = _normalised((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), augment=True)
    problem = Classification(
        model, train, test, setup.epochs(epochs), setup.batch(batch_size), prepare
    )
    return problem.configure(channels_last=True)


RESNET_WATCH = tuple(f"layer{stage}.0.conv1.weight" for stage in (1, 2, 3))


@task("cifar10-resnet20")
def cifar10_resnet20(setup: Setup) -> Problem:
    """ResNet-20 on CIFAR-10, 50 epochs of batches of 128."""
    model = models.cifar_resnet(6 * setup.size(3) + 2, 10, setup.size(16))
    problem = _cifar(setup, data.cifar10(setup.data_dir), model, 50, 128)
    return problem.configure(watch=RESNET_WATCH)


@task("cifar10-cnn")
def cifar10_cnn(setup: Setup) -> Problem:
    """Three convolutions on a fifth of CIFAR-10, 4 epochs of batches of 64."""
    train, test = _images(setup, data.cifar10(setup.data_dir))
    train = data.Images(train.images[:10000], train.labels[:10000])
    prepare = _normalised((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    model = models.SmallCNN(10, setup.size(32))
    problem = Classification(model, train, test, setup.epochs(4), setup.batch(64), prepare)
    return problem.configure(channels_last=True, watch=("convs.0.weight", "head.weight"))


@task("cifar10-vgg16")
def cifar10_vgg16(setup: Setup) -> Problem:
    """VGG16 on CIFAR-10, 50 epochs of batches of 128."""
    model = models.VGG16(10, setup.size(64))
    problem = _cifar(setup, data.cifar10(setup.data_dir), model, 50, 128)
    return problem.configure(watch=("features.0.weight", "classifier.1.weight"))


@task("cifar10-vit")
def cifar10_vit(setup: Setup) -> Problem:
    """Vision Transformer on CIFAR-10, 200 epochs of batches of 512."""
    heads, depth = setup.size(8), setup.size(6)
    model = models.ViT(dim=64 * heads, depth=depth, heads=heads, mlp_dim=64 * heads)
    problem = _cifar(setup, data.cifar10(setup.data_dir), model, 200, 512)
    return problem.configure(watch=_qkv(depth, (0, 3, 5)))


def _qkv(depth: int, blocks: tuple[int, ...]) -> tuple[str, ...]:
    """Attention weights of the given blocks, or of as many as the model has."""
    kept = sorted({min(block, depth - 1) for block in blocks})
    return tuple(f"blocks.{block}.attn.qkv.weight" for block in kept)


@task("cifar100-resnet110")
def cifar100_resnet110(setup: Setup) -> Problem:
    """ResNet-110 on CIFAR-100, 100 epochs of batches of 128."""
    model = models.cifar_resnet(6 * setup.size(18) + 2, 100, setup.size(16))
    problem = _cifar(setup, data.cifar100(setup.data_dir), model, 100, 128)
    return problem.configure(watch=RESNET_WATCH)


@task("imagenet32-resnet18")
def imagenet32_resnet18(setup: Setup) -> Problem:
    """ResNet-18 on ImageNet at 32×32, 45 epochs of batches of 128, constant step size."""
    train, test = _images(setup, data.imagenet32(setup.data_dir))
    model = models.resnet18(1000, setup.size(64), small=True)
    prepare = _normalised(IMAGENET_MEAN, IMAGENET_STD, augment=True)
    problem = Classification(model, train, test, setup.epochs(45), setup.batch(128), prepare)
    return problem.configure(watch=RESNET_WATCH)


def _imagenet1k(setup: Setup, model: torch.nn.Module, epochs: int, batch_size: int) -> Problem:
    train, test = data.imagenet1k(setup.data_dir, side=224)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))

    def prepare(pixels: Tensor, training: bool) -> Tensor:
        return (pixels - mean.to(pixels.device)) / std.to(pixels.device)

    return FolderClassification(
        model,
        train,
        test,
        setup.epochs(epochs),
        setup.batch(batch_size),
        prepare,
        setup.loader_workers,
    )


@task("imagenet1k-resnet18")
def imagenet1k_resnet18(setup: Setup) -> Problem:
    """ResNet-18 on ImageNet-1k, 90 epochs of batches of 256, a tenth of the lr every 30."""
    problem = _imagenet1k(setup, models.resnet18(1000, setup.size(64)), 90, 256)
    return problem.configure(watch=RESNET_WATCH, schedule=three_stairs)


@task("imagenet1k-vit-tiny")
def imagenet1k_vit_tiny(setup: Setup) -> Problem:
    """ViT-Tiny on ImageNet-1k, 200 epochs of batches of 512, warm-up of 5, cosine, bfloat16."""
    depth = setup.size(12)
    model = models.vit_tiny(1000, dim=64 * setup.size(3), depth=depth)
    return _imagenet1k(setup, model, 200, 512).configure(
        watch=_qkv(depth, (0, 6, 11)),
        schedule=warmup_cosine(5 / 200, 0.0),
        autocast=torch.bfloat16,
    )


def _characters(setup: Setup, text: data.Text) -> Problem:
    """Transformer of 24 layers and 8 heads on characters, 2000 batches of 16."""
    heads, layers, context = setup.size(8), setup.size(24), setup.context(32)
    model = models.char_transformer(text.vocab, context, layers, heads, 8 * heads)
    held_out = setup.held_out(len(text.held_out))
    problem = LanguageModel(model, text, setup.steps(2000), setup.batch(16), context, held_out)
    return problem.configure(watch=_qkv(layers, (0, layers // 2, layers - 1)), evaluations=5)


@task("shakespeare-transformer")
def shakespeare_transformer(setup: Setup) -> Problem:
    """Transformer of 24 layers on the characters of Tiny Shakespeare, 2000 batches of 16."""
    return _characters(setup, data.shakespeare(setup.data_dir))


@task("shakespeare-gpt")
def shakespeare_gpt(setup: Setup) -> Problem:
    """Transformer of 3 layers on the characters of Tiny Shakespeare, 1500 batches of 16."""
    text = data.shakespeare(setup.data_dir)
    heads, context = setup.size(4), setup.context(64)
    layers = setup.size(3)
    model = models.char_transformer(text.vocab, context, layers, heads, 16 * heads)
    held_out = setup.held_out(len(text.held_out))
    problem = LanguageModel(model, text, setup.steps(1500), setup.batch(16), context, held_out)
    return problem.configure(watch=_qkv(layers, (0, layers - 1)), evaluations=5)


@task("rotten-tomatoes-transformer")
def rotten_tomatoes_transformer(setup: Setup) -> Problem:
    """Transformer of 24 layers on the characters of Rotten Tomatoes, 2000 batches of 16."""
    return _characters(setup, data.rotten_tomatoes(setup.data_dir))


def _words(setup: Setup, text: data.Text) -> Problem:
    model = models.WordLSTM(text.vocab, setup.size(400), setup.size(1150), layers=3)
    problem = RecurrentLanguageModel(
        model,
        text,
        setup.epochs(150),
        setup.batch(20),
        setup.context(70),
        setup.held_out(len(text.held_out)),
    )
    return problem.configure(watch=tuple(f"rnns.{k}.weight_hh_l0" for k in range(3)))


@task("ptb-lstm")
def ptb_lstm(setup: Setup) -> Problem:
    """LSTM of 3 layers on the words of the Penn Treebank, 150 epochs of batches of 20×70."""
    return _words(setup, data.ptb(setup.data_dir))


@task("ptb-lstm-small")
def ptb_lstm_small(setup: Setup) -> Problem:
    """LSTM of 2 layers of 200 on the words of the Penn Treebank, 700 batches of 20×35."""
    text = data.ptb(setup.data_dir)
    width, steps = setup.size(200), setup.steps(700)
    model = models.WordLSTM(text.vocab, width, width, layers=2, dropout=0.0)
    rows, chunk = setup.batch(20), setup.context(35)
    held_out = setup.held_out(len(text.held_out))
    problem = RecurrentLanguageModel(model, text, 1, rows, chunk, held_out)
    watched = tuple(f"rnns.{k}.weight_hh_l0" for k in range(2))
    return problem.configure(steps=steps, watch=watched, evaluations=2)


@task("wikitext2-lstm")
def wikitext2_lstm(setup: Setup) -> Problem:
    """LSTM of 3 layers on the words of WikiText-2, 150 epochs of batches of 20×70."""
    return _words(setup, data.wikitext2(setup.data_dir))


def _language_model_size(name: str) -> PlusSize:
    """One of the paper's sizes, or one's own as `dim=256,heads=4,layers=4`."""
    if name in models.TRANSFORMER_PLUS_SIZES:
        return models.TRANSFORMER_PLUS_SIZES[name]
    try:
        values = {key: int(value) for key, value in (part.split("=") for part in name.split(","))}
        size = PlusSize(**values)
    except (TypeError, ValueError):
        known = [*models.TRANSFORMER_PLUS_SIZES, "dim=256,heads=4,layers=4"]
        raise unknown_name("size", name, known) from None
    if min(size) < 1 or size.dim % (2 * size.heads):
        raise BenchError(f"--size {name}: dim must be a multiple of twice the heads, all positive")
    return size


LM_STEPS = {"70m": 2400, "160m": 4800, "410m": 13500, "1b": 13500}


@task("lm-transformer++")
def lm_transformer_plus(setup: Setup) -> Problem:
    """Transformer++ language model (70m–1b), batches of 256×2048, clipping at 1, bfloat16."""
    name = setup.options.get("size", "70m")
    full = _language_model_size(name)
    heads, layers, context = setup.size(full.heads), setup.size(full.layers), setup.context(2048)
    text = data.language(setup.data_dir, setup.options.get("text"), setup.options.get("tokenizer"))
    model = models.TransformerPlus(
        text.vocab, context, layers, heads, dim=heads * (full.dim // full.heads)
    )
    held_out = min(len(text.held_out), setup.held_out(10_000_000))
    problem = LanguageModel(
        model, text, setup.steps(LM_STEPS.get(name, 2400)), setup.batch(256), context, held_out
    )
    return problem.configure(
        betas=(0.9, 0.95),
        schedule=warmup_cosine(0.1, 1e-5),
        max_grad_norm=1.0,
        autocast=torch.bfloat16,
        watch=_qkv(layers, (0, layers // 2, layers - 1)),
        evaluations=5,
    )
