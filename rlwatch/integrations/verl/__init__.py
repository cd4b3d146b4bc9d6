"""verl 0.9: ``trainer.logger='["console","rlwatch"]'`` is all it takes.

verl loads :mod:`~rlwatch.integrations.verl.plugin` by its entry point in every process; what it puts in place
does nothing until ``rlwatch`` is among the loggers. In the driver (``PPOTrainer``) a
:class:`~rlwatch.integrations.verl.driver.VerlDriver` then reads each step's batch and obeys commands; in each worker
:class:`~rlwatch.integrations.verl.taps.WorkerTaps` read the policy loss and the gradients. See ``docs/verl.md``.
"""
