"""What a family plugin is written against, without MLX."""

from mlxcel.family.batching import Batching
from mlxcel.family.contract import Family, LayerAdjacencyGroup, Part, Place, never_read

__all__ = ["Batching", "Family", "LayerAdjacencyGroup", "Part", "Place", "never_read"]
