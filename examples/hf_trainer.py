"""The GPT on characters with the transformers Trainer: python examples/hf_trainer.py."""

import tempfile

import torch
from common import arguments, characters, warmup_cosine
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ngn_kernels import NGNMDv1, groups
from ngn_kernels.trainers import feed_loss

CONTEXT, BATCH = 48, 16


def main():
    args = arguments(steps=600, text="")
    torch.manual_seed(0)
    tokens, alphabet = characters(args.text)
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    data = [{"input_ids": row, "labels": row} for row in rows]
    config = GPT2Config(
        vocab_size=len(alphabet), n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = NGNMDv1(
        groups(model, weight_decay=0.1),
        lr=1e-2,
        step_cap=1e-2,
        loss_target=0.2,
        decay_form="adamw",
        max_grad_norm=1.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=args.steps,
                per_device_train_batch_size=BATCH,
                max_grad_norm=0,  # the optimizer clips, inside its step
                logging_steps=max(1, args.steps // 20),
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=data,
            optimizers=(optimizer, warmup_cosine(optimizer, args.steps)),
        )
        feed_loss(trainer)  # the only line for NGN; it also logs ngn/shrink
        trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    print(f"loss at start {losses[0]:.3f}, at end {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
