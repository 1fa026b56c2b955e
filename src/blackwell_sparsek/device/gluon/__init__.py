"""Parts of Gluon kernels: what a producer warp and its consumer warp groups share."""
