"""Which of mlx-lm's text architectures can be split, found out by splitting a tiny one of each."""
