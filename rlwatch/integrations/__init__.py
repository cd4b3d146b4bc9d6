"""Integrations of rlwatch with trainers: one subpackage for each trainer, imported only when it is used.

Functions here may raise during set-up, but never once training runs: see :mod:`rlwatch.error_boundary`.

Every trainer's package has the same eight parts. A plain cell names a module of the package. ``shared:`` names a module
of this directory that does all of the work. ``in:`` names the module of the package that contains the part.
``none:`` gives the reason why the part is missing.

===========  ===================  ===================  ===================  ===================  ===================
part         trl                  transformers         torch                verl                 openrlhf
===========  ===================  ===================  ===================  ===================  ===================
attach       attach               attach               attach               attach               attach
taps         taps                 taps                 taps                 taps                 taps
batch        batch                none: no tokens      batch                batch                batch
commands     commands             commands             commands             commands             in: driver
checkpoints  shared: checkpoints  in: compat           shared: checkpoints  in: commands         none: nothing kept
ranks        shared: ranks        shared: ranks        shared: ranks        ranks                shared: step_tally
compat       in: taps             compat               compat               compat               compat
localise     localise             none: no tokens      localise             localise             none: DeepSpeed
others       verifiers, swift,    layer_clipping                            plugin, heartbeat,   driver
             swift_taps                                                     settings, driver,
                                                                            worker, sampling,
                                                                            saving, canaries
===========  ===================  ===================  ===================  ===================  ===================

- **attach** creates the run and installs all hooks: ``watch(trainer)``, ``Watcher``, the hooks on imported classes.
- **taps** measure the trainer while it trains, into a :class:`~rlwatch.integrations.step_tally.StepTally`.
- **batch** reads its micro-batches and generations as :class:`~rlwatch.tensors.tokens.TokenBatch` and
  :class:`~rlwatch.tensors.responses.ResponseBatch`.
- **commands** define the commands that the trainer supports and when they are safe: handlers for the
  :class:`~rlwatch.integrations.commands.Controller`.
- **checkpoints** keep the changes of a reset or a new KL coefficient, so that a resume does not undo them.
- **ranks** connect the processes of one run.
- **compat** checks that the installed version has the required parts, without comparing version numbers.
- **localise** passes loss passes and gradients to the :class:`~rlwatch.integrations.localising.Localiser`.

verl and OpenRLHF train in processes of Ray: their ``driver`` runs in the trainer's process and, in verl, a ``worker``
in each actor. TRL's trainers extend Hugging Face's, so ``trl`` builds on ``transformers``, and ms-swift's GRPO extends
TRL's. Models of Megatron, in verl
or in a custom loop, are handled by :mod:`~rlwatch.integrations.megatron` and :mod:`rlwatch.tensors.megatron`.

SkyRL and AReaL (:mod:`~rlwatch.integrations.skyrl`, :mod:`~rlwatch.integrations.areal`) have one module each: their
driver logs and steers, and :mod:`~rlwatch.integrations.driven` is what they share.

Other trackers (:mod:`~rlwatch.integrations.wandb`, :mod:`~rlwatch.integrations.tensorboard`,
:mod:`~rlwatch.integrations.mlflow`) are mirrored by :mod:`~rlwatch.integrations.tee`.
"""
