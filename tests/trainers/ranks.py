"""One of two gloo ranks: python ranks.py <directory for the trained parameters>."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import runs
import torch
from byhand import Case, Model, batches, optimizer_of
from torch.utils.data import DataLoader

from ngn_kernels.trainers import FeedLoss, feed_loss


def transformers(case: Case) -> torch.nn.Module:
    model = Model()
    options = {**runs.hf_options(case), "ddp_backend": "gloo"}
    feed_loss(runs.hf_trainer(model, (optimizer_of(model), None), **options)).train()
    return model


def lightning(case: Case) -> torch.nn.Module:
    package = importlib.import_module("lightning.pytorch")
    module = runs.lightning_module(package, case)
    trainer = runs.lightning_trainer(
        package,
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=case.accumulate,
        callbacks=[FeedLoss()],
        use_distributed_sampler=False,  # it would shuffle
    )
    mine = batches()[int(os.environ["RANK"]) :: 2]
    trainer.fit(module, DataLoader(mine, batch_size=None))  # type: ignore[arg-type]
    return module.net


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    for run in (transformers, lightning):
        for accumulate in (1, 2):
            trained = run(Case(accumulate=accumulate)).state_dict()
            torch.save(trained, directory / f"{run.__name__}-{accumulate}.pt")
    # Where gloo's threads still drop tensors, an interpreter that ends in the usual way may abort.
    sys.stdout.flush()
    os._exit(0)
