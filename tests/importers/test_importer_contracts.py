"""The contract of importers, for each registered one."""

from __future__ import annotations

import math
from typing import ClassVar

import binary_logs
import native_logs

from rlwatch.importers.registry import formats
from rlwatch.testing.importer_contract import ImporterContract, Sample


class TestVerlConsole(ImporterContract):
    format = "verl-console"
    names = ("actor/grad_norm", "val-core/openai/gsm8k/acc/mean@4")

    def write(self, rows: Sample) -> bytes:
        return native_logs.verl_console(rows)


class TestVerlJsonLines(ImporterContract):
    format = "verl-jsonl"
    names = ("actor/grad_norm", "critic/score/mean")
    filename = "experiment.jsonl"
    nonfinite: ClassVar = {"nan": math.nan, "inf": math.nan, "-inf": math.nan}  # orjson writes null for all three

    def write(self, rows: Sample) -> bytes:
        return native_logs.verl_jsonl(rows)


class TestFlatJsonLines(ImporterContract):
    format = "jsonl"
    names = ("grad_norm", "reward")
    filename = "logging.jsonl"

    def write(self, rows: Sample) -> bytes:
        return native_logs.swift_jsonl(rows)


class TestTrlConsole(ImporterContract):
    format = "trl-console"
    names = ("grad_norm", "reward")

    def write(self, rows: Sample) -> bytes:
        return native_logs.trl_console(rows)


class TestOpenRlhfConsole(ImporterContract):
    format = "openrlhf-console"
    names = ("policy_loss", "kl")

    def write(self, rows: Sample) -> bytes:
        return native_logs.openrlhf_console(rows)


class TestTrainerState(ImporterContract):
    format = "trainer-state"
    names = ("grad_norm", "reward")
    filename = "trainer_state.json"

    def write(self, rows: Sample) -> bytes:
        return native_logs.trainer_state(rows, summary=False)


class TestJsonDocument(ImporterContract):
    format = "json"
    names = ("grad_norm", "reward")
    filename = "training_log.json"

    def write(self, rows: Sample) -> bytes:
        return native_logs.json_document(rows)


class TestNotebook(ImporterContract):
    format = "notebook"
    names = ("Training Loss", "reward")
    filename = "train.ipynb"

    def write(self, rows: Sample) -> bytes:
        return native_logs.notebook(rows)


class TestSlimeConsole(ImporterContract):
    format = "slime-console"
    names = ("train/grad_norm", "train/pg_loss")

    def write(self, rows: Sample) -> bytes:
        return native_logs.slime_console(rows)


class TestRollConsole(ImporterContract):
    format = "roll-console"
    names = ("actor/grad_norm", "critic/entropy/mean")

    def write(self, rows: Sample) -> bytes:
        return native_logs.roll_console(rows)


class TestMegatronConsole(ImporterContract):
    format = "megatron-console"
    names = ("grad norm", "reward")

    def write(self, rows: Sample) -> bytes:
        return native_logs.megatron_console(rows)


class TestBlockConsole(ImporterContract):
    format = "block-console"
    names = ("rl_trainer/avg_loss", "reward/evaluate_response/avg_total_reward")

    def write(self, rows: Sample) -> bytes:
        return native_logs.torchforge_console(rows)


class TestMarkdownTable(ImporterContract):
    format = "markdown"
    names = ("Training Loss", "reward")
    filename = "issue.md"

    def write(self, rows: Sample) -> bytes:
        return native_logs.markdown_table(rows, names=self.names)


class TestClearMlOffline(ImporterContract):
    format = "clearml"
    names = ("train/grad_norm", "train/reward")
    filename = "metrics.jsonl"

    def write(self, rows: Sample) -> bytes:
        return native_logs.clearml_metrics(rows)


class TestSwanLab(ImporterContract):
    format = "swanlab"
    names = ("train/grad_norm", "train/reward")
    filename = "run-l1bt2kiz.swanlab"

    def write(self, rows: Sample) -> bytes:
        return binary_logs.swanlab_file(rows)


class TestLoopConsole(ImporterContract):
    format = "loop-console"
    names = ("Actor Loss", "Reward")

    def write(self, rows: Sample) -> bytes:
        return native_logs.loop_console(rows)


class TestConsoleTable(ImporterContract):
    format = "console-table"
    names = ("grad_norm", "reward")

    def write(self, rows: Sample) -> bytes:
        return native_logs.console_table(rows, names=self.names)


class TestLongCsv(ImporterContract):
    format = "csv"
    names = ("optim/grad_norm", "reward/mean")
    filename = "runs.csv"

    def write(self, rows: Sample) -> bytes:
        return native_logs.long_csv(rows)


class TestWideCsv(ImporterContract):
    format = "csv-wide"
    names = ("grad_norm", "reward")
    filename = "run.csv"

    def write(self, rows: Sample) -> bytes:
        return native_logs.wide_csv(rows, names=self.names)


class TestTensorBoardEvents(ImporterContract):
    format = "tensorboard"
    names = ("actor/grad_norm", "critic/score/mean")
    filename = "events.out.tfevents.1753501857.host.213688.0"

    def write(self, rows: Sample) -> bytes:
        return binary_logs.event_file(rows)


class TestWandbOffline(ImporterContract):
    format = "wandb"
    names = ("train/grad_norm", "train/reward")
    filename = "run-1jfgog54.wandb"

    def write(self, rows: Sample) -> bytes:
        return binary_logs.wandb_file(rows)


class TestParquet(ImporterContract):
    format = "parquet"
    names = ("grad_norm", "reward")
    filename = "history.parquet"

    def write(self, rows: Sample) -> bytes:
        return binary_logs.parquet(rows, self.names)


class TestRunDatabase(ImporterContract):
    format = "sqlite"
    names = ("grad_norm", "reward")
    filename = "project.db"

    def write(self, rows: Sample) -> bytes:
        return binary_logs.trackio(rows)


def test_every_registered_importer_has_its_contract_here() -> None:
    """Registering one is enough to be asked for a sample of it."""
    covered = {contract.format for contract in ImporterContract.__subclasses__()}

    directories = {"mlflow-files", "aim"}
    assert covered == set(formats()) - directories, "no files to cut: test_import_trackers_disk.py, tests/nightly"
