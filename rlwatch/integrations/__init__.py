"""Where rlwatch meets a trainer: one package (or module) per trainer, imported only by whoever uses it.

Setting up may raise. Once training runs nothing here does: see :mod:`rlwatch.seam`.
"""
