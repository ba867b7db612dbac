"""Fine-tuning with TRL: python examples/trl_sft.py [--model FOLDER-OR-NAME].

Without --model a small model is made, so that nothing is downloaded.
"""

import tempfile

import torch
from common import arguments, sentences, warmup_cosine
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from ngn_kernels import NGNMDv1, groups
from ngn_kernels.trainers import feed_loss


def small_model(texts):
    """A GPT-2 of 2 layers, and a tokenizer of the texts' words."""
    words = ["<pad>", "<eos>", *sorted({word for text in texts for word in text.split()})]
    vocabulary = {word: k for k, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = GPT2Config(vocab_size=len(words), n_positions=64, n_embd=64, n_layer=2, n_head=4)
    config.bos_token_id = config.eos_token_id = 1
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<pad>"}
    return GPT2LMHeadModel(config), PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def main():
    args = arguments(steps=150, model="")
    torch.manual_seed(0)
    texts = sentences(2000)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = small_model(texts)
    optimizer = NGNMDv1(
        groups(model, weight_decay=0.01),
        lr=1e-2,
        step_cap=1e-2,
        loss_target=0.2,
        decay_form="adamw",
        max_grad_norm=1.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            folder, max_steps=args.steps, per_device_train_batch_size=16, max_grad_norm=0,
            logging_steps=max(1, args.steps // 20), save_strategy="no", report_to="none", bf16=False,
        )  # fmt: skip
        trainer = SFTTrainer(
            model, settings, train_dataset=Dataset.from_list([{"text": text} for text in texts]),
            processing_class=tokenizer, optimizers=(optimizer, warmup_cosine(optimizer, args.steps)),
        )  # fmt: skip
        feed_loss(trainer).train()  # the only line for NGN
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    print(f"loss at start {losses[0]:.3f}, at end {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
