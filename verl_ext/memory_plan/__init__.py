"""The memory that each GPU of a run would need, predicted without a GPU; imported only for a plan."""
