"""What plugin authors test with. Imports no MLX until something is built."""

from mlxcel.testing import tiny
from mlxcel.testing.random_deepseek import random_deepseek
from mlxcel.testing.random_llama import random_llama

__all__ = ["random_deepseek", "random_llama", "tiny"]
