"""Integration with verl 0.9, switched on by ``trainer.logger='["console","rlwatch"]'``.

verl loads :mod:`~rlwatch.integrations.verl.plugin` by its entry point in every process. The wrappers that it installs
do nothing until ``rlwatch`` is among the loggers. In the driver (``PPOTrainer``) a
:class:`~rlwatch.integrations.verl.driver.VerlDriver` then reads each step's batch and executes commands. In each worker
:class:`~rlwatch.integrations.verl.taps.WorkerTaps` read the policy loss and the gradients. See ``docs/verl.md``.
"""
