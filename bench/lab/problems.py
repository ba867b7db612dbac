"""What a run trains: a model, its training batches, its loss and its score.

A task of one's own returns a `Classification`, or another subclass of `Problem`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import ImageFolder, Text

Batch = tuple[Tensor, ...]
Schedule = Callable[[float, int, int], float]
Prepare = Callable[[Tensor, bool], Tensor]
States = dict[int, Any]
"""The state of a recurrent model, by the first column of the piece of the batch it belongs to."""


def constant(lr: float, step: int, steps: int) -> float:
    """No schedule."""
    return lr


def warmup_cosine(warmup: float, final: float) -> Schedule:
    """Linear warm-up over a share of the steps, then half a cosine from `lr` to `final`."""

    def schedule(lr: float, step: int, steps: int) -> float:
        rise = max(1, round(warmup * steps))
        if step <= rise:
            return lr * step / rise
        end = min(lr, final)
        progress = (step - rise) / max(1, steps - rise)
        return end + (lr - end) * 0.5 * (1 + math.cos(math.pi * progress))

    return schedule


def three_stairs(lr: float, step: int, steps: int) -> float:
    """A tenth after each third of the steps."""
    return lr * 0.1 ** min(2, 3 * (step - 1) // steps)


WARMUP = 0.05
"""The share of a run that warms up under `--schedule cosine`."""
SCHEDULES: dict[str, Schedule] = {"constant": constant, "cosine": warmup_cosine(WARMUP, 0.0)}
"""As `--schedule`, in the place of the task's own."""


class Evaluation(NamedTuple):
    """Loss and score on held-out data: accuracy in per cent, or perplexity."""

    loss: float
    score: float


class Problem:
    """Base of all problems. The attributes say how to train; a subclass gives the three methods."""

    metric = "accuracy"
    evaluations = 10
    betas = (0.9, 0.999)
    schedule: Schedule = staticmethod(constant)
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    watch: tuple[str, ...] = ()
    """Names of the parameters whose step size and update are followed."""
    version = 1
    """Raised when a task changes so that its earlier runs no longer compare with new ones."""
    loss_floor = 0.0
    """A bound that the loss of no batch falls below."""
    channels_last = False
    """On a CPU, keep the weights of convolutions in the order that is faster there."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model = model
        self.steps = steps

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Training batches without end."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a training batch."""
        raise NotImplementedError

    def evaluate(self) -> Evaluation:
        """Loss and score on the held-out data; the model is in evaluation mode."""
        raise NotImplementedError

    def data(self) -> Iterable[Tensor]:
        """The tensors that the runs learn from and are scored on, if they are at hand."""
        return ()

    def held_out_batches(self) -> float:
        """How many training batches the held-out data would make; 0 if that is not known."""
        return 0.0

    def checksum(self) -> str:
        """Tells data sets apart; of bytes and integers alone, which no rounding changes."""
        checksum = 0
        for tensor in self.data():
            if not tensor.is_floating_point():
                checksum = zlib.crc32(tensor.contiguous().numpy().data, checksum)
        return f"{checksum:08x}"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def configure(self, **attributes: Any) -> Problem:
        """Set attributes of the training and return the problem."""
        for name, value in attributes.items():
            if not hasattr(self, name):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r} to set")
            setattr(self, name, value)
        return self


def _steps(epochs: float, per_epoch: int) -> int:
    return max(1, round(epochs * per_epoch))


class Classification(Problem):
    """Inputs and class numbers as tensors, cross-entropy, accuracy.

    `prepare(inputs, training)` turns a batch of stored inputs into what the model takes.
    """

    label_smoothing = 0.0
    """In training alone, this share of each label is spread over all classes."""

    def __init__(
        self,
        model: nn.Module,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        epochs: float,
        batch_size: int,
        prepare: Prepare | None = None,
    ) -> None:
        self.train, self.test = train, test
        self._plan(model, len(train[1]), epochs, batch_size, prepare)

    def _plan(
        self, model: nn.Module, count: int, epochs: float, batch_size: int, prepare: Prepare | None
    ) -> None:
        """Set all that follows from the number of training examples."""
        Problem.__init__(self, model, _steps(epochs, math.ceil(count / batch_size)))
        self.batch_size = min(batch_size, count)
        self.prepare = prepare or (lambda inputs, training: inputs)
        self.evaluations = max(2, min(20, math.ceil(epochs)))

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        inputs, labels = self.train
        while True:
            for index in torch.randperm(len(labels), generator=generator).split(self.batch_size):
                yield inputs[index], labels[index]

    def loss(self, batch: Batch) -> Tensor:
        inputs, labels = batch
        logits = self.model(self.prepare(inputs, True))
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def data(self) -> Iterable[Tensor]:
        return (*self.train, *self.test)

    def held_out_batches(self) -> float:
        return len(self.test[1]) / self.batch_size

    def held_out(self) -> Iterator[Batch]:
        """The held-out data in batches, small enough for a CPU's caches."""
        yield from zip(self.test[0].split(128), self.test[1].split(128), strict=True)

    def evaluate(self) -> Evaluation:
        loss = correct = count = 0.0
        for inputs, labels in self.held_out():
            labels = labels.to(self.device)
            logits = self.model(self.prepare(inputs.to(self.device), False)).float()
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            correct += float((logits.argmax(1) == labels).sum())
            count += len(labels)
        return Evaluation(loss / count, 100 * correct / count)


class FolderClassification(Classification):
    """Classification of images that are read from disk as they are needed."""

    def __init__(
        self,
        model: nn.Module,
        train: ImageFolder,
        test: ImageFolder,
        epochs: float,
        batch_size: int,
        prepare: Prepare | None = None,
        workers: int = 0,
    ) -> None:
        self.folders = (train, test)
        self.workers = workers
        self._plan(model, len(train), epochs, batch_size, prepare)

    def data(self) -> Iterable[Tensor]:
        return ()

    def held_out_batches(self) -> float:
        return len(self.folders[1]) / self.batch_size

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(
            self.folders[0],
            self.batch_size,
            shuffle=True,
            generator=generator,
            num_workers=self.workers,
        )
        while True:
            yield from loader

    def held_out(self) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(
            self.folders[1], self.batch_size, num_workers=self.workers
        )
        yield from loader


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


class LanguageModel(Problem):
    """Next-token prediction on random windows of a text; the score is the perplexity."""

    metric = "perplexity"

    def __init__(
        self,
        model: nn.Module,
        text: Text,
        steps: int,
        batch_size: int,
        context: int,
        held_out_tokens: int,
    ) -> None:
        super().__init__(model, steps)
        self.text = text
        self.batch_size = batch_size
        self.context = min(context, len(text.held_out) - 1)
        self.held_out_tokens = held_out_tokens

    def data(self) -> Iterable[Tensor]:
        return self.text.train, self.text.held_out[: self.held_out_tokens + 1]

    def held_out_batches(self) -> float:
        tokens = min(self.held_out_tokens, len(self.text.held_out) - 1)
        return tokens / self.context / self.batch_size

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        offsets = torch.arange(self.context + 1)
        tokens = self.text.train
        while True:
            start = torch.randint(
                len(tokens) - self.context, (self.batch_size, 1), generator=generator
            )
            yield (self._numbers(tokens[start + offsets]),)

    def _numbers(self, tokens: Tensor) -> Tensor:
        """Tokens as int64; 16-bit ones are stored signed but meant unsigned."""
        return tokens.long() & 0xFFFF if tokens.dtype == torch.int16 else tokens.long()

    def loss(self, batch: Batch) -> Tensor:
        (window,) = batch
        logits = self.model(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())

    def evaluate(self) -> Evaluation:
        tokens = self.text.held_out[: self.held_out_tokens + 1]
        rows = max(1, (len(tokens) - 1) // self.context)
        starts = torch.arange(rows).unsqueeze(1) * self.context
        windows = self._numbers(tokens[starts + torch.arange(self.context + 1)])
        loss = 0.0
        for window in windows.split(max(1, self.batch_size)):
            loss += float(self.loss((window.to(self.device),))) * len(window)
        return Evaluation(loss / rows, _perplexity(loss / rows))


class RecurrentLanguageModel(Problem):
    """Next-word prediction on a text read in order, the state carried from chunk to chunk.

    The text runs in columns side by side. A batch is a chunk of words and the numbers of its
    columns, so that each piece of a split batch finds the state of its own columns.
    """

    metric = "perplexity"

    def __init__(
        self,
        model: nn.Module,
        text: Text,
        epochs: float,
        batch_size: int,
        chunk: int,
        held_out_tokens: int,
    ) -> None:
        self.columns = self._in_columns(text.train, batch_size)
        self.test_columns = self._in_columns(text.held_out[:held_out_tokens], min(10, batch_size))
        per_epoch = math.ceil((self.columns.shape[1] - 1) / chunk)
        super().__init__(model, _steps(epochs, per_epoch))
        self.chunk = chunk
        self.states: States = {}

    def data(self) -> Iterable[Tensor]:
        return self.columns, self.test_columns

    def held_out_batches(self) -> float:
        return self.test_columns.numel() / self.columns.shape[0] / self.chunk

    @staticmethod
    def _in_columns(tokens: Tensor, count: int) -> Tensor:
        length = len(tokens) // count
        return tokens[: length * count].view(count, length)

    def _chunks(self, columns: Tensor) -> Iterator[Batch]:
        numbers = torch.arange(len(columns))
        for start in range(0, columns.shape[1] - 1, self.chunk):
            yield columns[:, start : start + self.chunk + 1], numbers

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        while True:
            self.states = {}
            yield from self._chunks(self.columns)

    def loss(self, batch: Batch) -> Tensor:
        words, numbers = batch
        piece = int(numbers[0])
        logits, self.states[piece] = self.model(words[:, :-1], self.states.get(piece))
        return F.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())

    def evaluate(self) -> Evaluation:
        kept, self.states = self.states, {}
        loss = count = 0.0
        for words, numbers in self._chunks(self.test_columns):
            loss += float(self.loss((words.to(self.device), numbers))) * (words.shape[1] - 1)
            count += words.shape[1] - 1
        self.states = kept
        return Evaluation(loss / count, _perplexity(loss / count))
