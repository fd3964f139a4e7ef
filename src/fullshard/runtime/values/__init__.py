"""How parameters get their values: initialization, loading, copies, rank 0."""
