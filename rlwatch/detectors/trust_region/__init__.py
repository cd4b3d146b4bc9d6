"""The trust region: KL to the reference, how it is estimated, clipping, and ratios that grow with length."""
