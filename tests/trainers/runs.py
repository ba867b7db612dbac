"""How each trainer is run, as its own documentation says, with our one line."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from byhand import (
    EPOCHS,
    Case,
    CountingModel,
    Model,
    batches,
    let_overflow,
    loss_of,
    optimizer_of,
    samples,
    scaler_of,
    schedule_of,
)
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from ngn_kernels.trainers import FeedLoss, feed_loss


def loader() -> Any:
    """Micro-batches as they are."""
    return DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]


# transformers


def hf_arguments(**options: Any) -> Any:
    from transformers import TrainingArguments

    base = {
        "output_dir": "out",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "num_train_epochs": EPOCHS,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(**(base | options))


def hf_trainer(model: nn.Module, optimizers: Any, data: Any = None, **options: Any) -> Any:
    import transformers

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    chosen = {name: options.pop(name) for name in ("compute_loss_func",) if name in options}
    return Trainer(
        model,
        hf_arguments(**options),
        train_dataset=samples() if data is None else data,
        optimizers=optimizers,
        **chosen,
    )


def hf_options(case: Case) -> dict[str, Any]:
    return {
        "gradient_accumulation_steps": case.accumulate,
        "max_grad_norm": case.clip,
        "bf16": case.bf16,
        "label_smoothing_factor": case.smoothing,
    }


def transformers(case: Case) -> nn.Module:
    model = CountingModel() if case.items else Model()
    if case.smoothing:
        from transformers import PretrainedConfig

        model.config = PretrainedConfig()  # type: ignore[assignment]
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer) if case.schedule else None
    trainer = feed_loss(hf_trainer(model, (optimizer, schedule), **hf_options(case)))
    if case.overflow:  # fp16 itself is refused on a CPU
        trainer.accelerator.scaler = scaler_of()
        let_overflow(model, case.overflow)
    trainer.train()
    return model


def transformers_loss_func(case: Case) -> nn.Module:
    """compute_loss_func normalises by itself."""
    model = Model()

    def loss_func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return loss_of(outputs["logits"], labels, num_items_in_batch)

    trainer = hf_trainer(
        model, (optimizer_of(model), None), compute_loss_func=loss_func, **hf_options(case)
    )
    feed_loss(trainer).train()
    return model


def transformers_late(case: Case) -> nn.Module:
    """The Trainer makes the optimizer itself, after feed_loss()."""
    import transformers as package

    from ngn_kernels import NGNMDv1

    model = Model()
    trainer = package.Trainer(
        model,
        hf_arguments(**hf_options(case), learning_rate=0.05),
        train_dataset=samples(),
        optimizer_cls_and_kwargs=(NGNMDv1, {"lr": 0.05}),
    )
    trainer._get_train_sampler = lambda *_: SequentialSampler(samples())
    assert trainer.optimizer is None
    feed_loss(trainer).train()
    return model


# accelerate


def accelerate(case: Case) -> nn.Module:
    from accelerate import Accelerator

    accelerator = feed_loss(
        Accelerator(
            cpu=True,
            gradient_accumulation_steps=case.accumulate,
            mixed_precision="bf16" if case.bf16 else "no",
        )
    )
    original = Model()
    if case.overflow:
        accelerator.scaler = scaler_of()
        let_overflow(original, case.overflow)
    optimizer = optimizer_of(original)
    schedule = schedule_of(optimizer)
    model, optimizer, data, schedule = accelerator.prepare(original, optimizer, loader(), schedule)
    for _ in range(EPOCHS):
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients and case.clip:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                if case.schedule:
                    schedule.step()
                optimizer.zero_grad()
    return original


# Lightning, by both names


def lightning_module(package: Any, case: Case) -> Any:
    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.net)
            if not case.schedule:
                return optimizer
            schedule = {"scheduler": schedule_of(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Module()


def manual_module(package: Any, case: Case) -> Any:
    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = Model()

        def training_step(self, batch: Any, k: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.net(**batch)["loss"] / case.accumulate)
            if (k + 1) % case.accumulate == 0 or self.trainer.is_last_batch:
                if case.clip:
                    self.clip_gradients(
                        optimizer, gradient_clip_val=case.clip, gradient_clip_algorithm="norm"
                    )
                optimizer.step()
                optimizer.zero_grad()
                if case.schedule:
                    self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.net)
            return ([optimizer], [schedule_of(optimizer)]) if case.schedule else optimizer

    return Module()


def lightning_trainer(package: Any, **options: Any) -> Any:
    quiet = {
        "accelerator": "cpu",
        "max_epochs": EPOCHS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return package.Trainer(**(quiet | options))


def lightning(
    case: Case, name: str = "lightning.pytorch", make: Any = lightning_module
) -> nn.Module:
    package = importlib.import_module(name)
    module = make(package, case)
    options: dict[str, Any] = {"callbacks": [FeedLoss()]}
    if module.automatic_optimization:
        options["accumulate_grad_batches"] = case.accumulate
        options["gradient_clip_val"] = case.clip or None
    if case.bf16:
        options["precision"] = "bf16-mixed"
    if case.overflow:  # Lightning would take bf16 instead on a CPU
        plugins = importlib.import_module(f"{name}.plugins.precision")
        options["plugins"] = [Unrounded(plugins)]
        let_overflow(module.net, case.overflow)
    lightning_trainer(package, **options).fit(module, loader())
    return module.net


def Unrounded(plugins: Any) -> Any:
    """16-mixed with its scaler, and float32 in the model, as in the hand-written loop."""

    class Plugin(plugins.MixedPrecision):
        def autocast_context_manager(self) -> Any:
            return torch.autocast("cpu", enabled=False)

    return Plugin("16-mixed", "cpu", scaler_of())


def pytorch_lightning(case: Case) -> nn.Module:
    return lightning(case, "pytorch_lightning")


def lightning_manual(case: Case) -> nn.Module:
    return lightning(case, make=manual_module)


# Loops that need a line of their own


def fabric(case: Case) -> nn.Module:
    from lightning.fabric import Fabric

    net = Model()
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed" if case.bf16 else "32-true")
    model, optimizer = fabric.setup(net, optimizer_of(net))
    every = batches() * EPOCHS
    for k, batch in enumerate(every):
        loss = model(**batch)["loss"] / case.accumulate
        fabric.backward(loss)
        optimizer.add_loss(loss)
        if (k + 1) % case.accumulate == 0:
            if case.clip:
                fabric.clip_gradients(model, optimizer, max_norm=case.clip)
            optimizer.step()
            optimizer.zero_grad()
    return net


def ignite(case: Case) -> nn.Module:
    from ignite.engine import create_supervised_trainer

    model = Model()
    optimizer = optimizer_of(model)

    def loss_fn(outputs: Any, labels: Any) -> Any:
        loss = loss_of(outputs, labels)
        optimizer.add_loss(loss / case.accumulate)
        return loss

    trainer = create_supervised_trainer(
        model,
        optimizer,
        loss_fn,
        prepare_batch=lambda batch, **_: (batch["input_ids"], batch["labels"]),
        model_fn=lambda model, tokens: model.logits(tokens),
        gradient_accumulation_steps=case.accumulate,
    )
    trainer.run(batches(), max_epochs=EPOCHS)
    return model
