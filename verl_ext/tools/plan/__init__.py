"""The memory that each GPU of a run would need, predicted without a GPU. Only plans import this package."""
