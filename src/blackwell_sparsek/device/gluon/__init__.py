"""Building blocks of Gluon kernels, used by a producer warp and its consumer warp groups."""
