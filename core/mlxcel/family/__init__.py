"""What a family plugin is written against, without MLX."""

from mlxcel.family.contract import Family, LayerAdjacencyGroup, Part, Place, never_read

__all__ = ["Family", "LayerAdjacencyGroup", "Part", "Place", "never_read"]
