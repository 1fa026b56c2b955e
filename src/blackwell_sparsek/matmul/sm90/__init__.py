"""Block-sparse products on Hopper, in Gluon."""
