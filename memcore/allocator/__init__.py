"""From what tensors take to what the allocator reserves: a model of PyTorch's caching allocator, and what it is given."""
