"""The ops of `jdspark.ops` as Pallas kernels for Mosaic GPU, one per file; imported on first use."""
