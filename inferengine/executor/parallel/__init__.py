"""Tensor parallelism as processes: rank 0 schedules and computes, the others compute the same steps on their parts."""
