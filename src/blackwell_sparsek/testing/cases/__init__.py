"""What is compiled without a GPU: one file for each operation, its kernels as they are launched."""
