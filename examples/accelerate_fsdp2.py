"""The GPT on characters on several ranks with Accelerate and FSDP2:

torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from common import GPT, Progress, arguments, characters, warmup_cosine
from torch.utils.data import DataLoader, RandomSampler

from ngn_kernels import NGNMDv1, groups
from ngn_kernels.trainers import feed_loss

CONTEXT, BATCH = 48, 8


def main():
    args = arguments(steps=300, text="")
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
    )
    # The only line for NGN: each rank hands over the loss that it calls backward() on.
    accelerator = feed_loss(Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available()))
    tokens, alphabet = characters(args.text)
    rows = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    shares = args.steps * BATCH * accelerator.num_processes
    sampler = RandomSampler(rows, replacement=True, num_samples=shares)
    model = GPT(len(alphabet), CONTEXT)
    optimizer = NGNMDv1(
        groups(model, weight_decay=0.1),
        lr=1e-2,
        step_cap=1e-2,
        loss_target=0.2,
        decay_form="adamw",
        max_grad_norm=1.0,
    )
    model, wrapped, data = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=BATCH, sampler=sampler)
    )
    scheduler = warmup_cosine(optimizer, args.steps)
    progress = Progress(args.steps)
    for batch in data:
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        accelerator.backward(loss)
        wrapped.step()
        wrapped.zero_grad()
        scheduler.step()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        if accelerator.is_main_process:
            progress(mean)
    accelerator.end_training()


if __name__ == "__main__":
    main()
