"""How one layer is split over ranks: what tensor parallelism needs to know of a model."""
