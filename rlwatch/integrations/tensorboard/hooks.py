"""The methods of a SummaryWriter that are looked at while it is mirrored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlwatch.integrations.tee.handle import Tee
from rlwatch.integrations.tensorboard.mirror import TensorBoardMirror
from rlwatch.seam import guarded


class Hooks:
    """Looks at what writers are told, after they did it, and mirrors it through a :class:`Tee`."""

    def __init__(self, tee: Tee[TensorBoardMirror], writers: Iterable[type], *, send_back: bool = False) -> None:
        self.seam = tee.seam
        self._tee = tee
        self._send_back = send_back
        self._theirs: dict[type, Callable[..., Any]] = {}
        for writer in writers:
            self._theirs[writer] = writer.add_scalar  # type: ignore[attr-defined]
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
            self._tell(writer, mirror)
        mirror.log(row, step)

    def _tell(self, writer: Any, mirror: TensorBoardMirror) -> None:
        """The newest forecast, at its step, by the writer's own function: it is not mirrored."""
        write = next(function for kind, function in self._theirs.items() if isinstance(writer, kind))
        for step, name, value in mirror.news():
            write(writer, name, value, step)


def directory_of(writer: Any) -> str:
    """Where a writer writes: a path, or the URL of a remote place."""
    written = str(getattr(writer, "log_dir", None) or writer.logdir)
    return written if "://" in written else str(Path(written).absolute())


def described(directory: str) -> dict[str, Any]:
    """What TensorBoard knows of a run, as arguments of :func:`rlwatch.init`."""
    remote = "://" in directory
    return {"name": directory if remote else Path(directory).name, **({} if remote else {"output_dir": directory})}
