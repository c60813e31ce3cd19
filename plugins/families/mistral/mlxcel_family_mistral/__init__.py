"""The Mistral family: Mistral 7B and Ministral. mlx-lm runs them with Llama's class."""

from __future__ import annotations

from mlxcel_family_llama import Llama


class Mistral(Llama):
    """Llama's layers, full or sliding attention."""

    wire_names = ("mistral",)
    model_types = ()


plugin = Mistral()
