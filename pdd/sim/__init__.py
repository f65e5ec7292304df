"""A deployment under a virtual clock: the live system's policy functions over modelled engines, caches and links (`pdd sim`)."""
