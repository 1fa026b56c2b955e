"""Attention on Hopper, in Gluon: TMA, WGMMA, warp specialisation."""
