"""Integration with OpenRLHF 0.11: the same command as before, started through rlwatch.

    python -m rlwatch.integrations.openrlhf --rlwatch.project math-rl -m openrlhf.cli.train_ppo_ray ...

OpenRLHF works in Ray actors, so :mod:`~rlwatch.integrations.openrlhf.__main__` gives Ray a hook that calls
:func:`~rlwatch.integrations.openrlhf.attach.arm` in each of its processes. In the trainer's process a
:class:`~rlwatch.integrations.openrlhf.driver.OpenRLHFDriver` records and executes commands. In each policy actor
:class:`~rlwatch.integrations.openrlhf.taps.ActorTaps` read the policy loss. See ``docs/openrlhf.md``.
"""
