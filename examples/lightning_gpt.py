"""The GPT on characters with Lightning: python examples/lightning_gpt.py."""

import lightning
import torch
from common import GPT, arguments, characters, warmup_cosine
from torch.utils.data import DataLoader, RandomSampler

from ngn_kernels import NGNMDv1, groups
from ngn_kernels.trainers import FeedLoss

CONTEXT, BATCH = 48, 16


class Characters(lightning.LightningModule):
    def __init__(self, characters, steps):
        super().__init__()
        self.gpt, self.steps, self.losses = GPT(characters, CONTEXT), steps, []

    def training_step(self, batch, _):
        loss = self.gpt.loss(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = NGNMDv1(
            groups(self, weight_decay=0.1),
            lr=1e-2,
            step_cap=1e-2,
            loss_target=0.2,
            decay_form="adamw",
            max_grad_norm=1.0,
        )
        schedule = {"scheduler": warmup_cosine(optimizer, self.steps), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main():
    args = arguments(steps=600, text="")
    lightning.seed_everything(0, verbose=False)
    tokens, alphabet = characters(args.text)
    rows = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    sampler = RandomSampler(rows, replacement=True, num_samples=args.steps * BATCH)
    module = Characters(len(alphabet), args.steps)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        callbacks=[FeedLoss()],  # the only line for NGN; it also logs ngn/shrink
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=BATCH, sampler=sampler))
    start, end = module.losses[0], torch.tensor(module.losses[-5:]).mean()
    print(f"loss at start {start:.3f}, at end {end:.3f}")


if __name__ == "__main__":
    main()
