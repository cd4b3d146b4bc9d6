"""A plain ``transformers.Trainer`` on a two-layer regression; imports no TRL."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Net(nn.Module):
    """Dropout, so that a stray random number would show; its loss is NaN where an input is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 1)])
        self.drop = nn.Dropout(0.2)

    def forward(self, x, y):
        hidden = self.drop(torch.tanh(self.layers[0](x)))
        return {"loss": (self.layers[1](hidden).squeeze(-1) - y).square().mean()}


class Rows(Dataset):
    """``bad`` of them hold a NaN."""

    def __init__(self, n=64, bad=()):
        generator = torch.Generator().manual_seed(5)
        self.x, self.bad = torch.randn(n, 4, generator=generator), set(bad)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        return {"x": x * float("nan") if i in self.bad else x, "y": x.sum()}


CONFIG = {
    "use_cpu": True, "per_device_train_batch_size": 8, "max_steps": 4, "logging_steps": 1, "report_to": "none",
    "save_strategy": "no", "seed": 3, "disable_tqdm": True, "learning_rate": 1e-2, "max_grad_norm": 0.1,
    "lr_scheduler_type": "constant",
}  # fmt: skip


def make_trainer(tmp, *, bad=(), cls=Trainer, callbacks=(), **config):
    """A trainer ready to train; ``config`` overrides the training arguments."""
    torch.manual_seed(0)
    trainer = cls(
        model=Net(),
        args=TrainingArguments(output_dir=str(tmp / "out"), **{**CONFIG, **config}),
        train_dataset=Rows(bad=bad),
        eval_dataset=Rows(8),
        callbacks=list(callbacks),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer
