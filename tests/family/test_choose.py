"""Which family runs a checkpoint."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from mlxcel.errors import PluginError, UnsupportedError
from mlxcel.family.choose import choose_family, known_distributions
from mlxcel.plugins import Plugins


@attrs.frozen
class Config:
    """The two attributes of a ModelConfig that the choice looks at."""

    model_type: str
    has_vision: bool = False


def choose(
    site: Any, model_type: str, vision: bool = False, without: tuple[str, ...] = (), **environ: str
) -> str:
    plugins = Plugins.discover(environ=environ, without=without, entry_points=site.entry_points())
    config: Any = Config(model_type, vision)
    name, family = choose_family(config, plugins)
    assert family is plugins.load("family", name)
    return name


def test_a_wire_name_comes_before_a_listing(site: Any) -> None:
    """The family called like the model_type wins over one that lists it."""
    site.family("alpha", model_types=("beta",))
    site.family("beta")
    assert choose(site, "beta") == "beta"
    assert choose(site, "beta", without=("beta",)) == "alpha"


def test_vision_takes_the_vlm_name_if_there_is_one(site: Any) -> None:
    """A checkpoint with a vision tower runs under the _vlm name of the chosen family."""
    site.family("alpha", wire_names=("alpha", "alpha_vlm"), model_types=("alpha_text",))
    site.family("beta")
    assert choose(site, "alpha") == "alpha"
    assert choose(site, "alpha", vision=True) == "alpha_vlm"
    assert choose(site, "alpha_text", vision=True) == "alpha_vlm"
    assert choose(site, "beta", vision=True) == "beta"


def test_a_vlm_name_is_never_a_candidate_itself(site: Any) -> None:
    """No model_type selects a _vlm name directly."""
    site.family("alpha_vlm", model_types=("beta",))
    for model_type in ("alpha_vlm", "beta"):
        with pytest.raises(UnsupportedError):
            choose(site, model_type)


def test_two_families_of_equal_rank(site: Any) -> None:
    """A model_type listed twice names both distributions and how to settle it."""
    site.family("alpha", model_types=("shared",))
    site.family("beta", model_types=("shared",))
    with pytest.raises(PluginError) as caught:
        choose(site, "shared")
    assert "fake-family-alpha and fake-family-beta" in str(caught.value)
    assert "--no-plugin" in str(caught.value)
    assert choose(site, "shared", without=("alpha",)) == "beta"
    assert choose(site, "alpha") == "alpha"


def test_two_names_of_one_family_do_not_conflict(site: Any) -> None:
    """A family with several wire names claims a listed model_type once."""
    site.family("alpha", wire_names=("alpha", "alpha_moe"), model_types=("listed",))
    assert choose(site, "listed") == "alpha"


def test_a_fallback_serves_what_nobody_else_does(site: Any) -> None:
    """It is asked last, and its name says which model_type it stands in for."""
    site.family("other", fallback=True)
    site.family("alpha", model_types=("listed",))
    assert choose(site, "never_heard_of") == "other:never_heard_of"
    assert choose(site, "never_heard_of", vision=True) == "other:never_heard_of"
    assert choose(site, "alpha") == "alpha"
    assert choose(site, "listed") == "alpha"


def test_a_fallback_is_no_substitute_for_a_known_package(site: Any) -> None:
    """Where a package serves the model_type, the error names it, though a fallback is there."""
    site.family("other", fallback=True)
    with pytest.raises(UnsupportedError, match="pip install mlxcel-family-qwen3"):
        choose(site, "qwen3")


def test_two_fallbacks(site: Any) -> None:
    """Which of two fallbacks is meant is for the user to say."""
    site.family("other", fallback=True)
    site.family("another", fallback=True)
    site.family("alpha")
    with pytest.raises(PluginError, match="fake-family-another and fake-family-other"):
        choose(site, "never_heard_of")
    assert choose(site, "never_heard_of", without=("other",)) == "another:never_heard_of"
    assert choose(site, "alpha") == "alpha"


def test_a_broken_family_harms_only_its_own_name(site: Any) -> None:
    """Others are chosen around it; asked for by name it raises its reason."""
    site.family("bad", before="raise ImportError('missing piece')")
    site.family("good", model_types=("listed",))
    assert choose(site, "listed") == "good"
    with pytest.raises(PluginError, match="missing piece"):
        choose(site, "bad")
    with pytest.raises(PluginError, match="missing piece"):
        choose(site, "listed", MLXCEL_PLUGINS_STRICT="1")


def test_a_known_model_type_names_its_package(site: Any) -> None:
    """If a first-party package would serve it, the error says how to get it."""
    site.family("alpha")
    with pytest.raises(UnsupportedError) as caught:
        choose(site, "qwen3")
    assert "'qwen3' (installed: alpha)" in str(caught.value)
    assert "pip install mlxcel-family-qwen3" in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unknown_model_type_points_to_the_plugin_api(site: Any) -> None:
    """Where nobody is known to serve it, one can write a plugin."""
    with pytest.raises(UnsupportedError, match=r"installed: none.*docs/plugin-api\.md"):
        choose(site, "never_heard_of")


def test_a_package_that_is_installed_but_unusable_is_not_recommended(site: Any) -> None:
    """The error gives the reason why the installed package does not serve."""
    site.family("qwen3", distribution="mlxcel-family-qwen3")
    with pytest.raises(UnsupportedError, match="disabled by --no-plugin") as caught:
        choose(site, "qwen3", without=("qwen3",))
    assert "pip install" not in str(caught.value)


def test_known_distributions_are_family_distributions() -> None:
    """The data file maps model types to distributions of the family kind."""
    known = known_distributions()
    assert known["gemma4_text"] == "mlxcel-family-gemma4"
    assert known["kimi_k2"] == "mlxcel-family-deepseek-v3"
    assert list(known) == sorted(known)
    assert all(name.startswith("mlxcel-family-") and "_" not in name for name in known.values())
