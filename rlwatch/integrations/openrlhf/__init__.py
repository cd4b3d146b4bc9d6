"""OpenRLHF 0.11: the same command, started through rlwatch.

    python -m rlwatch.integrations.openrlhf --rlwatch.project math-rl -m openrlhf.cli.train_ppo_ray ...

OpenRLHF works in Ray actors of its own, so :mod:`~rlwatch.integrations.openrlhf.__main__` gives Ray a hook that
:func:`~rlwatch.integrations.openrlhf.attach.arm` runs in each of its processes. In the trainer's a
:class:`~rlwatch.integrations.openrlhf.driver.OpenRLHFDriver` records and obeys commands; in each policy actor
:class:`~rlwatch.integrations.openrlhf.taps.ActorTaps` read the policy loss. See ``docs/openrlhf.md``.
"""
