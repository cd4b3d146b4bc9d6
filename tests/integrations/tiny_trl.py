"""Real TRL trainers on a random two-layer Qwen2 and a character tokenizer, all made in memory; and a fake run."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import copy
import random
from functools import cache
from tempfile import TemporaryDirectory

import torch
import transformers
from accelerate.utils import imports
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rlwatch.control.mailbox import PendingCommand
from rlwatch.control.policy import RunHealth
from rlwatch.recorder.losses import Counters
from rlwatch.records import DISTRIBUTIONS, Command, Event

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# Asked of the file system a thousand times in a training of three steps: a tenth of its time.
imports._is_package_available = cache(imports._is_package_available)

CHARS = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789", "="]


def tokenizer():
    tk = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARS)}, unk_token="<unk>"))
    tk.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tk.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tk, padding_side="left", **special)


def fresh_model(seed=0):
    set_seed(seed)
    config = Qwen2Config(
        vocab_size=len(CHARS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def model_on_disk(where, seed=0):
    """A policy whose reference TRL can load: its weights lie where its configuration says."""
    fresh_model(seed).save_pretrained(where)
    return Qwen2ForCausalLM.from_pretrained(where)


@cache
def _saved(seed):
    """The folder it lies in, and the policy of ``seed`` as read from there."""
    folder = TemporaryDirectory(prefix="rlwatch-policy-")
    return folder, model_on_disk(folder.name, seed)


def policy(seed=0):
    """The same as ``model_on_disk`` gives, from a folder that all tests of this process share."""
    model = copy.deepcopy(_saved(seed)[1])
    set_seed(seed)
    return model


def dataset(n=64, **columns):
    """Prompts, and ``columns`` that are functions of the row's number."""
    rng = random.Random(1)
    prompts = ["".join(rng.choices("0123456789", k=3)) + "=" for _ in range(n)]
    return Dataset.from_list([{"prompt": p, **{c: f(i) for c, f in columns.items()}} for i, p in enumerate(prompts)])


def digits(completions, **kwargs):
    """A reward with variance: how many of the characters are odd digits."""
    return [sum(c in "13579" for c in text) / 8 for text in completions]


COMMON = {
    "use_cpu": True, "bf16": False, "activation_checkpointing": False, "learning_rate": 1e-3,
    "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 3,
    "logging_steps": 1, "report_to": "none", "save_strategy": "no", "seed": 3, "disable_tqdm": True,
    "lr_scheduler_type": "constant",
}  # fmt: skip


def make_trainer(
    tmp,
    *,
    kind="grpo",
    reward=digits,
    model=None,
    peft_config=None,
    eval_rows=0,
    seed=0,
    cls=None,
    columns=None,
    **config,
):
    """A trainer ready to train; ``config`` overrides the training arguments."""
    config_class, trainer_class = (GRPOConfig, GRPOTrainer) if kind == "grpo" else (RLOOConfig, RLOOTrainer)
    model = policy(seed) if model is None else model
    trainer = (cls or trainer_class)(
        model=model,
        reward_funcs=reward,
        args=config_class(output_dir=str(tmp / "out"), **{**COMMON, **config}),
        train_dataset=dataset(**(columns or {})),
        eval_dataset=dataset(eval_rows) if eval_rows else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class FakeRun:
    """Has the methods of ``rlwatch.Run`` the integration uses, and remembers every call."""

    rank, world_size, ranks, linked = 0, 1, None, False

    def __init__(self):
        self.logged, self.spikes, self.completions, self.events, self.ends = [], [], [], [], []
        self.distributions = []
        self.queue, self.answers = [], []
        self.counters = Counters()
        self.findings = ()
        self.active = True
        self.resumed = None

    def introduce(self):
        pass

    def decide(self, *, resumed=None, step=None):
        self.resumed = resumed

    @property
    def measures(self):
        return self.active

    def log(self, metrics, step):
        self.logged.append((step, dict(metrics)))

    def log_spikes(self, batch):
        (self.distributions if batch.reason == DISTRIBUTIONS else self.spikes).append(batch)

    def log_completions(self, batch):
        self.completions.append(batch)

    def event(self, kind, step=None, **body):
        self.events.append(Event(kind, step, body))

    def has_commands(self, *, for_all_ranks=False):
        return bool(self.queue)

    def commands(self, *, for_all_ranks=False):
        taken, self.queue = self.queue, []
        return [PendingCommand(command, self.answers.append) for command in taken]

    def health(self):
        return RunHealth(tuple(self.findings))

    def finish(self, state="finished", reason="", deadline_s=10.0):
        self.ends.append((str(state), reason))
        self.active = False
        return True

    def send(self, kind="reset-reference", *, force=False, **args):
        self.queue.append(Command("c1", "r1", kind, args, force, requested_by="ann@lab", why="KL saturated"))

    def taps(self):
        """Step -> what the taps measured of it."""
        return {step: metrics for step, metrics in self.logged if "loss/raw" in metrics or "optim/grad_norm" in metrics}

    def rows(self):
        """Step -> the trainer's own log row."""
        return {step: metrics for step, metrics in self.logged if "learning_rate" in metrics}
