"""What a family plugin is written against, without MLX."""

from mlxcel.family.contract import Family, LayerAdjacencyGroup, Part, Place

__all__ = ["Family", "LayerAdjacencyGroup", "Part", "Place"]
