"""Localisation of a gradient: attribution of a step's gradient norm to tokens, sequences and layers.

A loss of reinforcement learning depends on the policy only through the log-probs of the sampled tokens, and perhaps
their entropies and an auxiliary loss. With ``a = dL/dlogp`` (read by a hook during the ordinary backward, whatever
the loss is), ``g`` the gradient of the step, ``G = ||g||`` and ``u = g / G``, each token contributes

    c[b, t] = a[b, t] <dlogp[b, t]/dtheta, u>,        and the contributions sum up to G.

One directional derivative of the log-probs along ``u`` yields all contributions at once. It takes two forward passes,
however many tokens there are. The published search (GradLoc, Tencent Hunyuan 2026) needs about 2 log2(N) backward
passes for one token.
"""
