"""Gluon kernels made of the device functions; only ever compiled, see `test_gluon.py`."""
