"""rlwatch inside a trainer: one package for each, imported only by whoever uses it.

Setting up may raise. Once training runs nothing here does: see :mod:`rlwatch.error_boundary`.

Every trainer has the same eight doors. A plain cell is a file of the trainer's package; ``shared:`` names the file
beside this one that does all of it, ``none:`` the reason why there is nothing to open.

===========  ===================  ===================  ===================  ===================  ===================
door         trl                  transformers         torch                verl                 openrlhf
===========  ===================  ===================  ===================  ===================  ===================
attach       attach               attach               attach               attach               attach
taps         taps                 taps                 taps                 taps                 taps
batch        batch                none: no tokens      batch                batch                batch
commands     commands             commands             commands             commands             commands
checkpoints  shared: checkpoints  checkpoints          shared: checkpoints  checkpoints          none: nothing kept
ranks        shared: ranks        shared: ranks        shared: ranks        ranks                shared: step_tally
compat       compat               compat               compat               compat               compat
localise     localise             none: no tokens      localise             localise             none: DeepSpeed
rooms        verifiers            layer_clipping                            plugin, heartbeat,   driver
                                                                            settings, driver,
                                                                            worker, sampling,
                                                                            saving
===========  ===================  ===================  ===================  ===================  ===================

- **attach** makes the run and puts everything in place: ``watch(trainer)``, ``Watcher``, the hooks on imported classes.
- **taps** look at the trainer while it trains, into a :class:`~rlwatch.integrations.step_tally.StepTally`.
- **batch** reads its micro-batches and generations as :class:`~rlwatch.tensors.tokens.TokenBatch` and
  :class:`~rlwatch.tensors.responses.ResponseBatch`.
- **commands** are what it can carry out and when that is safe: handlers for the one
  :class:`~rlwatch.integrations.commands.Controller`.
- **checkpoints** keep what a reset or a new KL coefficient changed, so that a resume does not undo it.
- **ranks** put the processes of one run together.
- **compat** knows what of the installed version is needed and what is missing, without asking for version numbers.
- **localise** offers loss passes and gradients to the one :class:`~rlwatch.integrations.localising.Localiser`.

verl and OpenRLHF train in processes of Ray: their ``driver`` runs beside the trainer, and in verl a ``worker`` in each
actor. TRL's trainers are Hugging Face's, so that ``trl`` builds on ``transformers``. Models that Megatron holds, in
verl or in a loop of one's own, are :mod:`~rlwatch.integrations.megatron`'s and :mod:`rlwatch.tensors.megatron`'s.

Other trackers (:mod:`~rlwatch.integrations.wandb`, :mod:`~rlwatch.integrations.tensorboard`,
:mod:`~rlwatch.integrations.mlflow`) are no trainers: they are mirrored, by :mod:`~rlwatch.integrations.tee`.
"""
