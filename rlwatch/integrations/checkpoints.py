"""Effects of commands that must survive a restart: they are saved in checkpoints and restored on a resume.

Trainers rebuild their reference from the model's name at the start and do not save it. Without :class:`KeptReference` a
resumed run would silently use the old reference again. :class:`KeptSettings` saves settings. A lowered learning rate
needs neither, because its scale is in the optimizer's state, which trainers save.

A reference lies inside a checkpoint as ``rlwatch_reference/reference.safetensors`` and ``reference.json``, written
completely or not at all. Checkpoints that hold the same reference share one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.commands import Controller, Result, SetKLCoef
from rlwatch.integrations.reference import Anchored
from rlwatch.integrations.weights import (
    REF,
    adapter_of,
    add_reference_adapter,
    copy_into,
    named_tensors,
    unwrapped,
    whole,
)
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command
from rlwatch.tensors.megatron import cut

logger = logging.getLogger("rlwatch")
UNREAD = "it could not be read; see the training log"
CUT = "Megatron cuts the reference over ranks, and rlwatch does not gather it; save it with the loop's own checkpoints"


class KeptReference:
    """Keeper of the reference model: saves it in checkpoints once it was reset, and restores it on a resume.

    There is one keeper on every rank. Give :meth:`reset_done` to the handler of resets. Call :meth:`save` when a
    checkpoint has been written, and :meth:`restore` when training begins from one. The first save after a reset writes
    the weights next to the checkpoints (``rlwatch_reference/`` in their parent directory); every checkpoint then shares
    that file. An error of a disk or file becomes one warning and an event, never an exception.

    Parameters
    ----------
    find
        Returns the current policy and reference; see :class:`~rlwatch.integrations.reference.ResetReference`.
    error_boundary
        Error boundary that leads to the run, which records events.
    writes
        Returns True if this process writes the file; the others only provide their shards.
    """

    def __init__(self, find: Callable[[], Anchored], error_boundary: ErrorBoundary, writes: Callable[[], bool]) -> None:
        self._error_boundary = error_boundary
        self._writes = writes
        self._write_down = WriteDown(find, writes)
        self._take_up = TakeUp(find, writes)
        self._facts: ReferenceFacts | None = None
        self._stored: ReferenceFacts | None = None

    @property
    def facts(self) -> ReferenceFacts | None:
        """Return facts on the reset that made the current reference; None if it is the one that the trainer built."""
        return self._facts

    def reset_done(self, command: Command, report: Mapping[str, JSON], step: int) -> None:
        """Note that ``command`` reset the reference at ``step``; checkpoints include the reference from now on.

        ``report`` is the report of the reset, with the ``fingerprint`` of the reference.
        """
        fingerprint = str(report.get("fingerprint", ""))
        self._facts = ReferenceFacts(step, command.command_id, fingerprint, command.requested_by, command.why)
        self._stored = None

    def moved(self) -> None:
        """Note that the reference model changed by other means than a command, so that the file with its weights is
        outdated.
        """
        self._stored = None

    def save(self, checkpoint: Path, controller: Controller, step: int) -> None:
        """Add the reference to ``checkpoint``, which has just been written at ``step``. Every rank calls it.

        References of an earlier attempt, which a resume has undone since, are removed from the checkpoint. All ranks
        know if a reset is still to be written, so usually they need not communicate. If one is, rank 0 decides when the
        shards are gathered, through ``controller``.
        """
        parent = checkpoint.parent
        new = self._facts if self._stored is None else None
        result = None
        if new is not None:
            result = controller.order(self._write_down, self._write_down.command(parent, new), step)
        if result is not None and result.report is None:
            self._failed("reference_not_kept", checkpoint, step, _reason(result))
        elif result is not None:
            self._stored = self._write_down.written
        if self._writes():
            self._place(checkpoint, step)

    def _place(self, checkpoint: Path, step: int) -> None:
        try:
            if self._stored is not None:
                share_reference(checkpoint, self._stored, checkpoint.parent)
            else:
                remove_reference(checkpoint)
        except OSError as error:
            self._failed("reference_not_kept", checkpoint, step, f"{type(error).__name__}: {error}")

    def restore(self, checkpoint: Path, controller: Controller, step: int) -> None:
        """Restore the reference in ``checkpoint``, if there is one.

        Every rank calls it, when training starts at ``step``. Call it after the trainer has loaded the policy and built
        its own reference. A failure is logged and recorded as an event.
        """
        command, problem = None, None
        try:
            facts = read_facts(checkpoint)
            command = None if facts is None else self._take_up.command(checkpoint, facts)
            problem = why_none(kept_nearby(checkpoint), step) if facts is None else None
        except RLWatchError as error:
            problem = str(error)
        result = controller.order(self._take_up, command, step)
        if result is not None and result.report is not None:
            self._facts, self._stored = self._take_up.facts, None
            self._event("reference_restored", step, checkpoint=str(checkpoint), **result.report)
        elif result is not None or problem is not None:
            self._failed("reference_not_restored", checkpoint, step, problem or _reason(result))

    def _failed(self, kind: str, checkpoint: Path, step: int, reason: str) -> None:
        if self._writes():
            words = "keep the reference in" if kind == "reference_not_kept" else "take up a reference from"
            logger.warning("rlwatch did not %s %s (training goes on): %s", words, checkpoint, reason)
        self._event(kind, step, checkpoint=str(checkpoint), reason=reason)

    def _event(self, kind: str, step: int, **body: JSON) -> None:
        if self._error_boundary.run is not None:
            self._error_boundary.run.event(kind, step, **body)


def _reason(result: Result | None) -> str:
    return UNREAD if result is None else result.refusal or UNREAD


def why_none(nearby: Mapping[str, ReferenceFacts], step: int) -> str | None:
    """Return why a checkpoint of ``step`` has no reference, from the references in checkpoints ``nearby`` (name ->
    facts).

    Returns None if no nearby checkpoint has a reference.
    """
    missing = {name: facts for name, facts in nearby.items() if facts.step <= step}
    later = {name: facts for name, facts in nearby.items() if facts.step > step}
    if missing:
        name, facts = max(missing.items(), key=lambda item: item[1].step)
        return (
            f"the reset at step {facts.step}, which {name} holds, is not in this checkpoint: it is lost, and KL is "
            + ("measured to the reference the trainer was started with")
        )
    if later:
        facts = min(later.values(), key=lambda facts: facts.step)
        return f"the reset at step {facts.step} came after this checkpoint and is undone by resuming from it"
    return None


# Writing and reading a reference, on all ranks or none.

Find = Callable[[], Anchored]


class WriteDown:
    """Handler of the internal command that writes the reference to disk on all ranks or none.

    ``find`` returns the current policy and reference. The shards are gathered tensor by tensor; ``writes`` returns True
    on the rank that writes the file.
    """

    kind: str = "keep-reference"

    def __init__(self, find: Find, writes: Callable[[], bool]) -> None:
        self._find = find
        self._writes = writes
        self.written: ReferenceFacts | None = None

    def command(self, parent: Path, facts: ReferenceFacts) -> Command:
        """Return the command to write the reference into the directory ``parent``.

        ``facts`` describe the reset that made it.
        """
        return _reference_command(self.kind, parent, facts)

    def check(self, command: Command) -> None:  # noqa: ARG002  (the signature of the port)
        """Raise ``RLWatchError`` if there is no reference, or if ranks hold parts that cannot be gathered."""
        anchored = self._find()
        if cut(anchored.policy):
            raise RLWatchError(CUT)
        if not _tensors(anchored):
            raise RLWatchError("there is no reference to keep")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Write the reference. Raises ``RLWatchError`` if the file cannot be written, for instance on a full disk."""
        gathered: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, tensor in _tensors(self._find()).items():
                full = whole(tensor.detach())
                if self._writes():
                    gathered[name] = full.to("cpu", copy=True).contiguous()
        self.written = replace(_facts(command), tensors=len(gathered))
        if self._writes():
            try:
                self.written = write_reference(Path(command.args["path"]), self.written, gathered)
            except OSError as error:
                raise RLWatchError(f"{type(error).__name__}: {error}") from error
        return {}


class TakeUp:
    """Handler of the internal command that copies a saved reference into the one that the trainer built.

    ``find`` returns the current policy and reference. ``writes`` returns True on the rank that verifies the file's
    digest.
    """

    kind: str = "restore-reference"

    def __init__(self, find: Find, writes: Callable[[], bool]) -> None:
        self._find = find
        self._verifies = writes
        self.facts: ReferenceFacts | None = None

    def command(self, checkpoint: Path, facts: ReferenceFacts) -> Command:
        """Return the command to restore the reference in ``checkpoint``, which ``facts`` describe."""
        return _reference_command(self.kind, checkpoint, facts)

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if the saved file is missing, damaged, or of another model."""
        anchored, checkpoint, facts = self._find(), Path(command.args["path"]), _facts(command)
        if self._verifies():
            verify_reference(checkpoint, facts)
        with _opened(checkpoint) as file:
            kept = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no mapping)
        here = {name: tuple(tensor.shape) for name, tensor in _tensors(anchored).items()}
        if anchored.adapted and not here:
            adapter_of(unwrapped(anchored.policy))
        elif kept != here:
            odd = sorted(name for name in kept.keys() | here.keys() if kept.get(name) != here.get(name))
            raise RLWatchError(f"the kept reference is of another model: {odd[0]!r} differs")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Copy every saved tensor into the trainer's reference, in its dtype, device and sharding.

        The result has facts on the reset.
        """
        anchored, self.facts = self._find(), _facts(command)
        if anchored.adapted and not _tensors(anchored):
            policy: Any = unwrapped(anchored.policy)
            add_reference_adapter(policy, adapter_of(policy))
        with _opened(Path(command.args["path"])) as file, torch.no_grad():
            for name, tensor in _tensors(anchored).items():
                copy_into(tensor, file.get_tensor(name))
        facts = self.facts
        return {
            "reset_step": facts.step,
            "fingerprint": facts.fingerprint,
            "tensors": facts.tensors,
            "id": facts.command,
        }


def _reference_command(kind: str, path: Path, facts: ReferenceFacts) -> Command:
    args = {"path": str(path), "facts": asdict(facts)}
    return Command(uuid.uuid4().hex[:16], "", kind, args, requested_by="rlwatch")


def _facts(command: Command) -> ReferenceFacts:
    return ReferenceFacts(**command.args["facts"])


def _tensors(anchored: Anchored) -> dict[str, Tensor]:
    """Return the reference's tensors by name; for an adapted policy those of the adapter ``ref``, if there is one."""
    if anchored.reference is not None:
        return dict(named_tensors(anchored.reference))
    return {name: tensor for name, tensor in named_tensors(anchored.policy) if f".{REF}." in f"{name}."}


def _opened(checkpoint: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(checkpoint / REFERENCE_DIRECTORY / WEIGHTS_FILE, framework="pt")
    except (OSError, SafetensorError) as error:
        raise RLWatchError(f"{checkpoint / REFERENCE_DIRECTORY / WEIGHTS_FILE} cannot be read ({error})") from None


# A reference on disk, inside a checkpoint: ``rlwatch_reference/reference.safetensors`` and ``reference.json``.

REFERENCE_DIRECTORY = "rlwatch_reference"
WEIGHTS_FILE, FACTS_FILE = "reference.safetensors", "reference.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """Facts on a saved reference: the reset that made it, the number of its tensors and the digest of its file.

    ``step`` and ``command`` (an id) are those of the reset, ``by`` and ``why`` who requested it and for what reason.
    """

    step: int
    command: str = ""
    fingerprint: str = ""
    by: str = ""
    why: str = ""
    tensors: int = 0
    sha256: str = ""
    format: int = FORMAT


def write_reference(parent: Path, facts: ReferenceFacts, tensors: Mapping[str, Tensor]) -> ReferenceFacts:
    """Write ``tensors`` (on the CPU, not sharded) as a reference into the directory ``parent``.

    Return the facts as written. Raises ``OSError`` (a full disk), and leaves no partial file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def fill(directory: Path) -> ReferenceFacts:
        try:
            save_file(dict(tensors), directory / WEIGHTS_FILE)
        except SafetensorError as error:  # raised on a full disk
            raise OSError(str(error)) from error
        return replace(facts, tensors=len(tensors), sha256=_sha256(directory / WEIGHTS_FILE))

    return _placed(parent, fill)


def share_reference(parent: Path, facts: ReferenceFacts, source: Path) -> None:
    """Put the reference in the directory ``source`` also into ``parent``: as a hard link, or as a copy where links
    fail.

    ``facts`` describe the reference. Raises ``OSError`` if neither is possible.
    """

    def fill(directory: Path) -> ReferenceFacts:
        try:
            os.link(source / REFERENCE_DIRECTORY / WEIGHTS_FILE, directory / WEIGHTS_FILE)
        except OSError:
            shutil.copyfile(source / REFERENCE_DIRECTORY / WEIGHTS_FILE, directory / WEIGHTS_FILE)
        return facts

    _placed(parent, fill)


def remove_reference(parent: Path) -> None:
    """Remove the saved reference from the directory ``parent``. Other checkpoints that share its file keep it."""
    shutil.rmtree(parent / REFERENCE_DIRECTORY, ignore_errors=True)


def read_facts(checkpoint: Path) -> ReferenceFacts | None:
    """Return the facts on the reference in ``checkpoint``, or None if it has none.

    Raises ``RLWatchError`` if they are unreadable.
    """
    path = checkpoint / REFERENCE_DIRECTORY / FACTS_FILE
    if not (checkpoint / REFERENCE_DIRECTORY).is_dir():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        known = {name: stored[name] for name in ReferenceFacts.__dataclass_fields__ if name in stored}
        facts = ReferenceFacts(**known)
        readable = isinstance(facts.step, int) and isinstance(facts.sha256, str)
    except (OSError, ValueError, TypeError) as error:
        raise RLWatchError(f"{path} cannot be read ({error})") from None
    if not readable or facts.format != FORMAT:
        raise RLWatchError(f"{path} is of a format ({facts.format!r}) this version of rlwatch cannot read")
    return facts


def verify_reference(checkpoint: Path, facts: ReferenceFacts) -> None:
    """Read the whole reference file in ``checkpoint``.

    Raises ``RLWatchError`` if its digest is not the one in ``facts``.
    """
    path = checkpoint / REFERENCE_DIRECTORY / WEIGHTS_FILE
    try:
        digest = _sha256(path)
    except OSError as error:
        raise RLWatchError(f"{path} cannot be read ({error})") from None
    if digest != facts.sha256:
        raise RLWatchError(f"{path} is damaged: it is not the file that was written")


def kept_nearby(checkpoint: Path) -> dict[str, ReferenceFacts]:
    """Return facts on the readable references in other checkpoints next to ``checkpoint``, by the checkpoint's name."""
    nearby = {}
    for path in sorted(checkpoint.resolve().parent.glob(f"*/{REFERENCE_DIRECTORY}")):
        try:
            facts = read_facts(path.parent)
        except RLWatchError:
            continue
        if facts is not None and path.parent != checkpoint.resolve():
            nearby[path.parent.name] = facts
    return nearby


def _placed(parent: Path, fill: Callable[[Path], ReferenceFacts]) -> ReferenceFacts:
    """Fill a temporary directory, then rename it to the final one."""
    final, draft = parent / REFERENCE_DIRECTORY, parent / f".{REFERENCE_DIRECTORY}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        facts = fill(draft)
        (draft / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=1), encoding="utf-8")
        remove_reference(parent)
        draft.rename(final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # it no longer exists once renamed
    return facts


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Settings changed by commands, which trainers would reset to their configuration at the next start.

SETTINGS_FILE = "rlwatch_control.json"


class KeptHandler(CommandHandler, Protocol):
    """Handler of a command that changes a setting. ``kept`` are the arguments set last, None if no command set any."""

    kept: Mapping[str, JSON] | None


class KeptSettings:
    """Keeper of settings that commands changed: saves them in checkpoints and restores them on a resume.

    There is one keeper on every rank. ``handlers`` change the settings. ``error_boundary`` is the error boundary that
    leads to the run. ``writes`` returns True on the rank that writes the file.
    """

    def __init__(
        self, handlers: Sequence[KeptHandler], error_boundary: ErrorBoundary, writes: Callable[[], bool]
    ) -> None:
        self._handlers = {handler.kind: handler for handler in handlers}
        self._error_boundary = error_boundary
        self._writes = writes

    def save(self, checkpoint: Path) -> None:
        """Save the changed settings in ``checkpoint``, which has just been written.

        If no settings were changed, remove an older file. An error of the disk becomes a warning.
        """
        if not self._writes():
            return
        kept = {kind: dict(handler.kept) for kind, handler in self._handlers.items() if handler.kept is not None}
        if not kept:
            with contextlib.suppress(OSError):
                (checkpoint / SETTINGS_FILE).unlink(missing_ok=True)
            return
        draft = checkpoint / f".{SETTINGS_FILE}-{os.getpid()}"
        try:
            draft.write_text(json.dumps({"format": 2, "settings": kept}), encoding="utf-8")
            draft.replace(checkpoint / SETTINGS_FILE)
        except OSError as error:
            logger.warning("rlwatch could not keep %s in %s (training goes on): %s", _names(kept), checkpoint, error)

    def restore(self, checkpoint: Path, controller: Controller, step: int) -> None:
        """Restore the settings saved in ``checkpoint``, when training starts at ``step``.

        Every rank calls it; the settings that rank 0 reads are used on all ranks, through ``controller``. A failure
        becomes a warning.
        """
        kept = _read_settings(checkpoint / SETTINGS_FILE)
        for kind, handler in self._handlers.items():
            command = None if kind not in kept else _settings_command(kind, kept[kind], checkpoint)
            result = controller.order(handler, command, step)
            if result is None or command is None:
                continue
            if result.report is None:
                logger.warning("rlwatch could not %s as %s keeps it: %s", kind, checkpoint, result.refusal)
            elif self._error_boundary.run is not None:
                body: Mapping[str, JSON] = {"command": kind, "args": dict(command.args), "report": result.report}
                self._error_boundary.run.event(
                    "command", step, **body, by="rlwatch", why=command.why, id=command.command_id
                )


def _names(kept: Iterable[str]) -> str:
    return ", ".join(kind.removeprefix("set-") for kind in kept)


def _settings_command(kind: str, args: Mapping[str, JSON], checkpoint: Path) -> Command:
    why = f"it was set before {checkpoint.name} was saved"
    return Command(uuid.uuid4().hex[:16], "", kind, args, force=True, requested_by="rlwatch", why=why)


def _read_settings(path: Path) -> dict[str, Mapping[str, JSON]]:
    """Read the settings by kind; empty if there is no file, or, with a warning, if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kept = {SetKLCoef.kind: {"value": found["kl_coef"]}} if found["format"] == 1 else found["settings"]
        return {kind: COMMAND_KINDS[kind].read(args) for kind, args in kept.items() if kind in COMMAND_KINDS}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        logger.warning("rlwatch cannot read %s (training goes on with the configured settings): %s", path, error)
        return {}
