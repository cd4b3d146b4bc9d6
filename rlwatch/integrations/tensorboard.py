"""Mirroring of TensorBoard: every scalar that this process writes with a ``SummaryWriter`` is also recorded and judged
by rlwatch.

>>> import rlwatch
>>> rlwatch.tee_tensorboard(project="math-rl")  # doctest: +SKIP

``torch.utils.tensorboard`` and ``tensorboardX`` are imported only when ``tee_tensorboard`` is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rlwatch.error_boundary import guarded
from rlwatch.errors import MissingExtraError
from rlwatch.integrations.tee import Held, Tee, check_first, checked_settings, scalars, snapshot, step_index
from rlwatch.run import Run

CALL = "rlwatch.tee_tensorboard()"
WRITERS = ("torch.utils.tensorboard", "tensorboardX")

_newest: Tee[Any] | None = None


def tee_tensorboard(*, run: Run | None = None, send_back: bool = False, **init_kwargs: Any) -> Tee[Any]:
    """Record in rlwatch the scalars that this process writes to TensorBoard from now on, by new and existing writers.

    A directory is a run, as in TensorBoard: it begins with its first scalar, and ends when its writer is closed. The
    run's id is kept in ``rlwatch.json`` next to the event files, so that a restart in the same directory continues the
    run. The event files are unchanged, except with ``send_back``. ``add_scalars("losses", {"actor": x})`` is recorded
    as ``losses/actor``. Values that are not numbers are left out.

    Parameters
    ----------
    run
        A run to record everything into; the caller ends it.
    send_back
        True: also write rlwatch's forecasts at their steps, as ``forecast/p20``, ``forecast/p50``, ``forecast/p100``...
    init_kwargs
        Arguments of :func:`rlwatch.init`. ``run_id`` and ``output_dir`` name the first run only.

    Returns
    -------
    Tee
        Handle on the mirror: ``.run`` and ``.runs`` are the rlwatch runs that record, and ``.untee()`` stops the
        mirroring.

    Raises
    ------
    MissingExtraError
        If there is neither ``torch.utils.tensorboard`` nor ``tensorboardX``.
    ConfigError
        If TensorBoard is mirrored already, or an argument is wrong.
    StoreError
        If the store cannot be opened.
    """
    global _newest
    writers = list(_writers())
    if not writers:
        raise MissingExtraError("tensorboard", "tensorboard", CALL)
    check_first(_newest, "TensorBoard", CALL)
    tee: Tee[Any] = Tee("TensorBoard", checked_settings(init_kwargs, run, CALL), run)
    TensorBoardHooks(tee, writers, send_back=send_back)
    _newest = tee
    return tee


def _writers() -> Iterator[type]:
    for name in WRITERS:
        try:
            yield import_module(name).SummaryWriter
        except ImportError:
            continue


# The hooks on a SummaryWriter while it is mirrored.


class TensorBoardHooks:
    """Hooks on the classes of ``SummaryWriter``, which mirror scalars through a :class:`Tee` after the writer has
    written them.

    ``send_back``: also write rlwatch's forecasts.
    """

    def __init__(self, tee: Tee[TensorBoardMirror], writers: Iterable[type], *, send_back: bool = False) -> None:
        self.error_boundary = tee.error_boundary
        self._tee = tee
        self._send_back = send_back
        self._originals: dict[type, Callable[..., Any]] = {}
        for writer in writers:
            self._originals[writer] = writer.add_scalar  # type: ignore[attr-defined]
            tee.patches.around(writer, "add_scalar", after=self._scalar)
            tee.patches.around(writer, "add_scalars", after=self._scalars)
            tee.patches.around(writer, "flush", after=self._flushed)
            tee.patches.around(writer, "close", after=self._closed)

    @guarded
    def _scalar(
        self, _: Any, writer: Any, tag: str, scalar_value: Any, global_step: Any = None, *_args: Any, **_kwargs: Any
    ) -> None:
        self._log(writer, {tag: scalar_value}, global_step)

    @guarded
    def _scalars(
        self,
        _: Any,
        writer: Any,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: Any = None,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        self._log(writer, {f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}, global_step)

    @guarded
    def _flushed(self, _: Any, writer: Any) -> None:
        mirror = self._tee.existing(directory_of(writer))
        if mirror is not None:
            mirror.flush()

    @guarded
    def _closed(self, _: Any, writer: Any) -> None:
        self._tee.end(directory_of(writer))

    def _log(self, writer: Any, row: Mapping[str, Any], step: Any) -> None:
        directory = directory_of(writer)
        mirror = self._tee.mirror(directory, TensorBoardMirror, lambda: described(directory))
        if mirror is None:
            return
        if self._send_back:
            self._write_forecast(writer, mirror)
        mirror.log(row, step)

    def _write_forecast(self, writer: Any, mirror: TensorBoardMirror) -> None:
        """Write the newest forecast at its step by the writer's own function, so that it is not mirrored."""
        write = next(function for kind, function in self._originals.items() if isinstance(writer, kind))
        for step, name, value in mirror.new_forecast():
            write(writer, name, value, step)


def directory_of(writer: Any) -> str:
    """Return the directory that ``writer``, a ``SummaryWriter``, writes to, as an absolute path or a URL."""
    written = str(getattr(writer, "log_dir", None) or writer.logdir)
    return written if "://" in written else str(Path(written).absolute())


def described(directory: str) -> dict[str, Any]:
    """Return the arguments of :func:`rlwatch.init` for the run in ``directory``: its name and, for a local path,
    ``output_dir``.
    """
    remote = "://" in directory
    return {"name": directory if remote else Path(directory).name, **({} if remote else {"output_dir": directory})}


# One directory of TensorBoard, mirrored scalar by scalar.


class TensorBoardMirror:
    """Recorder of one TensorBoard directory, which collects the scalars of a step into one row.

    A row ends when a scalar of another step comes, when the writer is flushed or closed, and when the process ends. A
    scalar without a step gets the last step given. If no step was ever given, it gets the number of earlier scalars
    with its tag (TensorBoard itself would put all of them at 0).
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._held = Held()
        self._last: int | None = None
        self._last_forecast: int | None = None
        self._times: Counter[str] = Counter()

    def log(self, row: Mapping[str, Any], step: Any) -> None:
        """Add scalars (tag -> value) that were written at ``step`` (or None)."""
        kept = snapshot(scalars(row))
        if not kept:
            return
        at = self._step(next(iter(kept)), step)
        if self._held and self._held[-1][0] != at:
            self.flush()
        self._held.append((at, kept))

    def new_forecast(self) -> list[tuple[int, str, float]]:
        """Return the newest forecast as (step, metric, value) if no earlier call returned it, else an empty list."""
        forecast = self.run.health().forecast
        if forecast is None or forecast.step == self._last_forecast:
            return []
        self._last_forecast = forecast.step
        return [(forecast.step, name, value) for name, value in forecast.metrics.items()]

    def flush(self) -> None:
        """Record the collected scalars."""
        self._held.record(self.run)

    def _step(self, tag: str, step: Any) -> int:
        given = None if step is None else step_index(step)
        if given is not None:
            self._last = given
            return given
        if self._last is not None:
            return self._last
        self._times[tag] += 1
        return self._times[tag] - 1
