"""Every task of the paper builds, trains a little and scores, on small files in its format."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_lab_data import (
    write_cifar10,
    write_cifar100,
    write_imagenet1k,
    write_imagenet32,
    write_mnist,
)

pytest.importorskip("sklearn")

from ngn_bench.errors import BenchError
from ngn_bench.lab import train
from ngn_bench.lab.problems import Classification, LanguageModel, RecurrentLanguageModel
from ngn_bench.lab.tasks import TASKS, Scale, Setup, _shift_and_flip, find_task
from ngn_bench.lab.train import Machine, RunSpec

TINY = "steps=1e-9,model=0.1,batch=0.05,context=0.1"


def write_text(folder: Path) -> None:
    for name, text in (
        ("tinyshakespeare/input.txt", "What say you, my lord?\n" * 60),
        ("rotten_tomatoes/rt-polarity.neg", "dull and long . \n" * 60),
        ("rotten_tomatoes/rt-polarity.pos", "a fine film . \n" * 60),
        *((f"ptb/ptb.{part}.txt", " no it was n't black monday \n" * 60) for part in ("train",)),
        *((f"ptb/ptb.{part}.txt", " it was monday \n" * 60) for part in ("valid",)),
        ("wikitext-2/wiki.train.tokens", " = Robert <unk> = \n" * 60),
        ("wikitext-2/wiki.valid.tokens", " = Robert = \n" * 60),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_mnist(folder)
    write_cifar10(folder)
    write_cifar100(folder)
    write_imagenet32(folder, npz=False)
    write_imagenet1k(folder)
    write_text(folder)
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_and_scores(name: str, data_dir: Path) -> None:
    run = train.run(RunSpec(name, "ngn-mdv1", 1e-2, 0, TINY), Machine(data_dir))
    assert run["status"] == "finished"
    assert run["steps"] == 1
    assert run["metric"] in ("accuracy", "perplexity")
    assert run["curve"][-1]["score"] >= 0
    layers = run["telemetry"]["layers"]
    assert layers and all(layer["update"][0] > 0 for layer in layers.values())


def test_no_loss_falls_below_the_floor_of_smoothed_labels() -> None:
    """The floor is what a model loses that predicts the smoothed labels themselves."""
    problem = find_task("digits-smoothed")(Setup())
    assert isinstance(problem, Classification)
    (images, labels) = (part[:50] for part in problem.train)
    smoothed = torch.nn.functional.one_hot(labels, 10) * 0.8 + 0.02
    problem.model = PerfectModel(smoothed.log())
    assert float(problem.loss((images, labels))) == pytest.approx(problem.loss_floor, rel=2e-6)
    assert float(problem.loss((images, labels))) >= problem.loss_floor > 0.86
    problem.model = PerfectModel(2 * smoothed.log())
    assert float(problem.loss((images, labels))) > problem.loss_floor + 0.01


class PerfectModel(torch.nn.Module):
    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits


def test_noisy_labels_are_those_of_training_alone() -> None:
    clean, noisy = (find_task(f"digits-{kind}")(Setup()) for kind in ("mlp", "noisy"))
    assert isinstance(clean, Classification) and isinstance(noisy, Classification)
    assert noisy.test[1].equal(clean.test[1])
    wrong = float((noisy.train[1] != clean.train[1]).float().mean())
    assert 0.24 < wrong < 0.3  # nine in ten of the three in ten drawn differ
    assert noisy.batch_size == 4


FULL_SIZE = {
    "digits-mlp": 17_610,
    "mnist-mlp": 89_610,
    "cifar10-resnet20": 269_722,
    "cifar10-vgg16": 15_245_130,
    "cifar100-resnet110": 1_733_812,
}


@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_full_size_is_the_papers(name: str, data_dir: Path) -> None:
    problem = find_task(name)(Setup(data_dir))
    assert sum(p.numel() for p in problem.model.parameters()) == FULL_SIZE[name]


def test_the_papers_set_ups(data_dir: Path) -> None:
    mnist = find_task("mnist-mlp")(Setup(data_dir))
    assert mnist.steps == 10  # one batch of up to 128 from the 40 images, ten epochs
    shakespeare = find_task("shakespeare-transformer")(Setup(data_dir))
    assert isinstance(shakespeare, LanguageModel)
    assert (shakespeare.steps, shakespeare.batch_size, shakespeare.context) == (2000, 16, 32)
    assert len(shakespeare.model.blocks) == 24  # type: ignore[arg-type]
    lm = find_task("lm-transformer++")(
        Setup(data_dir, scale=Scale(model=0.1, context=0.01), options={"size": "160m"})
    )
    assert (lm.steps, lm.betas, lm.max_grad_norm) == (4800, (0.9, 0.95), 1.0)
    assert lm.autocast is torch.bfloat16
    assert lm.schedule(1.0, 480, 4800) == 1.0
    assert lm.schedule(1.0, 4800, 4800) == pytest.approx(1e-5)


def test_the_lstm_carries_its_state_through_an_epoch(data_dir: Path) -> None:
    setup = Setup(data_dir, scale=Scale(steps=0.02, model=0.02, batch=0.2, context=0.1))
    problem = find_task("ptb-lstm")(setup)
    assert isinstance(problem, RecurrentLanguageModel)
    batches = problem.batches(torch.Generator())
    problem.loss(next(batches))
    kept = problem.states[0]
    problem.model.eval()
    with torch.no_grad():
        problem.evaluate()
    assert problem.states[0] is kept
    problem.loss(next(batches))
    assert not problem.states[0][0][0].equal(kept[0][0])


def test_micro_batches_of_the_lstm_keep_their_own_states(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *arguments: x)
    scale = "steps=0.02,model=0.02,batch=0.2,context=0.1"
    runs = [
        train.run(RunSpec("ptb-lstm", "adam", 1e-3, 0, scale), Machine(data_dir, micro_batch=size))
        for size in (None, 1)
    ]
    assert runs[0]["steps"] > 5
    for whole, split in zip(*(run["curve"] for run in runs), strict=True):
        assert split["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)


def test_more_steps_than_the_task_has(data_dir: Path) -> None:
    """The paper's ablation trains the 70m model for 4800 steps, twice as many as elsewhere."""
    spec = RunSpec("mnist-mlp", "adam", 1e-3, 0, TINY, options=(("steps", "7"),))
    run = train.run(spec, Machine(data_dir))
    assert run["steps"] == run["curve"][-1]["step"] == 7


def test_an_untrained_language_model_scores_about_its_vocabulary(data_dir: Path) -> None:
    torch.manual_seed(0)
    problem = find_task("shakespeare-transformer")(Setup(data_dir, scale=Scale(model=0.2)))
    assert isinstance(problem, LanguageModel)
    with torch.no_grad():
        assert problem.evaluate().score == pytest.approx(problem.text.vocab, rel=0.1)


def test_shifts_and_flips_keep_the_pixels() -> None:
    torch.manual_seed(0)
    images = torch.zeros(64, 3, 32, 32)
    images[:, :, 10:22, 10:22] = torch.rand(64, 3, 12, 12)
    moved = _shift_and_flip(images)
    assert moved.shape == images.shape
    torch.testing.assert_close(moved.sum((2, 3)), images.sum((2, 3)))
    columns = moved.amax((1, 2)) > 0
    assert len({tuple(row.tolist()) for row in columns}) > 3


@pytest.mark.parametrize("text", ["0.25", "steps=0.5,model=0.1"])
def test_scale_survives_a_round_trip(text: str) -> None:
    scale = Scale.parse(text)
    assert str(Scale.parse(str(scale))) == str(scale)


def test_a_plain_scale_cuts_the_steps_and_the_model() -> None:
    scale = Scale.parse("0.25")
    assert (scale.steps, scale.model, scale.context, scale.batch) == (0.25, 0.5, 0.5, 1.0)


@pytest.mark.parametrize("text", ["2", "0", "big", "width=0.1", "steps=", "steps=0.1,model=-1"])
def test_a_bad_scale_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--scale"):
        Scale.parse(text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnist-mpl", "Did you mean 'mnist-mlp'"),
        ("nowhere.py:task", r"no task file nowhere\.py"),
        ("no_such_module_here:task", "cannot import"),
        ("math:no_such_function", "has no function 'no_such_function'"),
    ],
)
def test_an_unknown_task_is_named(name: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        find_task(name)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def task(:\n", r"SyntaxError.*line 1"),
        ("x = 1\nimport no_such_package\n", r"no_such_package.*faulty\.py, line 2"),
    ],
)
def test_a_task_file_with_a_fault_is_named_with_its_line(
    tmp_path: Path, code: str, message: str
) -> None:
    path = tmp_path / "faulty.py"
    path.write_text(code)
    with pytest.raises(BenchError, match=rf"cannot load the task: .*{message}"):
        find_task(f"{path}:task")


def test_a_language_model_of_ones_own_size(data_dir: Path) -> None:
    options = {"size": "dim=32,heads=2,layers=3"}
    problem = find_task("lm-transformer++")(Setup(data_dir, options=options))
    assert len(problem.model.blocks) == 3  # type: ignore[arg-type]
    assert problem.model.embed.weight.shape == (256, 32)  # type: ignore[union-attr]


@pytest.mark.parametrize("size", ["7b", "dim=32", "dim=33,heads=2,layers=1"])
def test_a_bad_size_is_refused(size: str, data_dir: Path) -> None:
    with pytest.raises(BenchError, match="size"):
        find_task("lm-transformer++")(Setup(data_dir, options={"size": size}))


def test_the_documented_task_of_ones_own_works(tmp_path: Path) -> None:
    document = Path(__file__).parents[1] / "docs" / "lab.md"
    blocks = re.findall(r"```python\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if block.startswith("# rings.py")]
    assert code.count("\n") < 30
    path = tmp_path / "rings.py"
    path.write_text(code)
    spec = RunSpec(f"{path}:rings", "ngn-m", 1.0, 0, str(Scale(steps=0.5)))
    run = train.run(spec, Machine())
    assert run["status"] == "finished"
    assert run["curve"][-1]["score"] > 70
