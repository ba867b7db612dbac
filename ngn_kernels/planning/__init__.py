"""From tensors to tables: what kernels read and write in a step, kept while nothing moves."""
