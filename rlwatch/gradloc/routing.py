"""Mixtures of experts, which send a token elsewhere when a weight moves a little: there no difference is small."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

TOPK = (torch.topk, torch.Tensor.topk)


class FirstChoice(TorchFunctionMode):
    """Whatever the first forward pass inside chose by ``topk``, the later ones are made to choose as well.

    The derivative of the values is that of ``topk``, whose indices have none. Each ``with`` is one forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chosen: list[Tensor] = []
        self._begun = False
        self._at = 0

    @override
    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._at = 0
        return self

    @override
    def __exit__(self, *failure: Any) -> None:
        self._begun = True
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        if not self._begun:
            self._chosen.append(func(*args, **kwargs).indices)
        indices = self._chosen[self._at]
        self._at += 1
        source = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return torch.return_types.topk((source.gather(dim, indices), indices))
