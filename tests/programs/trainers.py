"""Real trainers from their packages, on small models with random weights; nothing is downloaded.

torchrun --nproc-per-node 2 trainers.py OUT NAME      writes OUT/rank<R>.json: {NAME: sha256 of all parameters}
and OUT/model.json: [path, class, names of its own parameters] of each module
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neutral
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

STEPS = 4


class Tokens(Dataset):
    """Random sequences whose labels are themselves."""

    def __init__(self, labels: int | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(3, 90, (32, 12), generator=generator)
        self.labels = labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        labels = ids if self.labels is None else ids.sum() % self.labels
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


MODEL: list[tuple[str, str, list[str]]] = []


def noted(model: nn.Module) -> nn.Module:
    """`model`, and in MODEL what it is made of."""
    for path, part in model.named_modules():
        own = [name for name, _ in part.named_parameters(recurse=False)]
        MODEL.append((path, type(part).__name__, own))
    return model


def sizes() -> dict[str, int]:
    return {
        "vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return noted(LlamaForCausalLM(LlamaConfig(**sizes())))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    options = {name: size for name, size in sizes().items() if name != "num_key_value_heads"}
    return noted(BertForSequenceClassification(BertConfig(**options, num_labels=3)))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return noted(MixtralForCausalLM(MixtralConfig(**sizes(), num_local_experts=4, num_experts_per_tok=2)))


def trainer(model: nn.Module, data: Dataset, **options: Any) -> list[object]:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=2, per_device_eval_batch_size=2, learning_rate=1e-2,
            report_to=[], save_strategy="no", use_cpu=True, eval_strategy="steps", eval_steps=2, logging_steps=1,
            disable_tqdm=True, dataloader_num_workers=0, **options,
        )  # fmt: skip
        job = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        job.train()
        keep = ("loss", "grad_norm", "eval_loss", "step")
        history = [[(key, entry[key]) for key in keep if key in entry] for entry in job.state.log_history]
    return [*model.state_dict().values(), repr(history), torch.get_rng_state()]


def accelerated() -> list[object]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=2))
    seen: list[object] = []
    for number, batch in enumerate(loader):
        if number == 2 * STEPS:
            break
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(wrapped.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss)
    return [*seen, *model.state_dict().values(), torch.get_rng_state()]


def lit() -> list[object]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            loss = self.net(**batch).loss
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: dict[str, Tensor], _index: int) -> None:
            self.log("validation", self.net(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        job = lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, val_check_interval=2, limit_val_batches=1,
            default_root_dir=folder,
        )  # fmt: skip
        job.fit(module, DataLoader(Tokens(), batch_size=2), DataLoader(Tokens(), batch_size=2))
    return [*module.state_dict().values(), sorted((k, float(v)) for k, v in job.callback_metrics.items())]


PROGRAMS: dict[str, Callable[[], list[object]]] = {
    "llama": lambda: trainer(llama(), Tokens(), gradient_accumulation_steps=2),
    "bert": lambda: trainer(bert(), Tokens(labels=3), bf16=True),
    "experts": lambda: trainer(mixtral(), Tokens(), gradient_checkpointing=True),
    "accelerate": accelerated,
    "lightning": lit,
}

if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", ACCELERATE_USE_CPU="true")
    name = sys.argv[2]
    torch.manual_seed(11)
    torch.set_num_threads(1)
    neutral.write(sys.argv[1], {name: neutral.digest(PROGRAMS[name]())})
    if os.environ["RANK"] == "0":
        Path(sys.argv[1], "model.json").write_text(json.dumps(MODEL))
    if dist.is_initialized():
        dist.destroy_process_group()
