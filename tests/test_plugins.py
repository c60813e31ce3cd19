"""Finding, checking, listing and disabling plugins."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pluggy
import pytest

from mlxcel.errors import PluginError
from mlxcel.hookspecs import hookimpl
from mlxcel.observe.events import GenerationFinished
from mlxcel.plugins import PluginRecord, Plugins

EVENT = GenerationFinished(prompts=1, tokens=2, seconds=3.0)


def discover(site: Any, without: tuple[str, ...] = (), **environ: str) -> Plugins:
    return Plugins.discover(environ=environ, without=without, entry_points=site.entry_points())


def record(plugins: Plugins, name: str) -> PluginRecord:
    [found] = [r for r in plugins.records() if r.name == name]
    return found


def test_discovery_imports_nothing(site: Any) -> None:
    """Names are known from entry points alone."""
    site.family("alpha", wire_names=("alpha", "alpha_vlm"))
    plugins = discover(site)
    assert plugins.names("family") == ("alpha", "alpha_vlm")
    assert plugins.distribution("family", "alpha") == "fake-family-alpha"
    assert "fake_family_alpha" not in sys.modules


def test_installed_distributions_are_found(site: Any) -> None:
    """Without injected entry points, what is on the path is found."""
    site.family("alpha")
    assert "alpha" in Plugins.discover(environ={}).names("family")


def test_load_gives_the_same_object_every_time(site: Any) -> None:
    """A plugin is imported once; twin names may share one object."""
    site.family("alpha", wire_names=("alpha", "alpha_vlm"), model_types=("beta",))
    plugins = discover(site)
    assert plugins.load("family", "alpha") is plugins.load("family", "alpha_vlm")
    assert [r.state for r in plugins.records()] == ["loaded", "loaded"]


def test_a_loaded_record_carries_all_facts(site: Any) -> None:
    """A record names kind, distribution, both versions and the file."""
    site.family("alpha")
    assert discover(site).records() == (
        PluginRecord(
            name="alpha",
            kind="family",
            distribution="fake-family-alpha",
            version="1.2.3",
            api="1.0",
            state="loaded",
            reason="",
            location=str(site.path / "fake_family_alpha.py"),
        ),
    )


def test_an_unknown_name_lists_the_installed_ones(site: Any) -> None:
    """Asking for what is not installed says what is."""
    site.family("alpha")
    with pytest.raises(PluginError, match=r"'omega'.*not installed \(installed: alpha\)"):
        discover(site).load("family", "omega")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("raise BaseException('base')", "BaseException: base"),
    ],
)
def test_whatever_an_import_raises_is_recorded(site: Any, source: str, reason: str) -> None:
    """A plugin that breaks at import fails alone, and says how to see the traceback."""
    site.family("bad", before=source)
    site.family("good")
    plugins = discover(site)
    bad = record(plugins, "bad")
    assert bad.state == "failed"
    assert bad.reason.startswith(reason)
    assert "MLXCEL_PLUGINS_STRICT=1" in bad.reason
    assert record(plugins, "good").state == "loaded"
    with pytest.raises(PluginError, match="fake-family-bad") as caught:
        plugins.load("family", "bad")
    assert caught.value.__cause__ is not None


def test_a_failure_is_remembered(site: Any) -> None:
    """A broken plugin is imported once, however often it is asked for."""
    site.module("fake_counter", "count = 0\n")
    site.family("bad", before="import fake_counter; fake_counter.count += 1; raise OSError")
    plugins = discover(site)
    for _ in range(3):
        with pytest.raises(PluginError):
            plugins.load("family", "bad")
    assert sys.modules["fake_counter"].count == 1


def test_ctrl_c_during_an_import_is_not_swallowed(site: Any) -> None:
    """KeyboardInterrupt belongs to the user, not to the plugin."""
    site.family("slow", before="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover(site).load("family", "slow")


@pytest.mark.parametrize(
    ("api_version", "state", "reason"),
    [
        (None, "failed", "no api_version"),
        ("one", "failed", "'one'"),
        ("1", "failed", "major.minor"),
        ("0.9", "incompatible", "API 0.9, this mlxcel has 1.0; upgrade fake-family-alpha"),
        ("2.0", "incompatible", "API 2.0, this mlxcel has 1.0; upgrade mlxcel"),
        ("1.7", "loaded", ""),
    ],
)
def test_the_api_version_decides(
    site: Any, api_version: str | None, state: str, reason: str
) -> None:
    """Another major version is refused with both versions; none at all is a failure."""
    site.family("alpha", api_version=api_version)
    found = record(discover(site), "alpha")
    assert found.state == state
    assert reason in found.reason
    assert found.api == (api_version or "")


def test_a_family_is_an_instance_of_family(site: Any) -> None:
    """A class, or anything else with an api_version, is no family."""
    site.module(
        "fake_class",
        "from mlxcel.family import Family\n\nclass plugin(Family):\n"
        "    api_version = '1.0'\n    wire_names = ('alpha',)\n",
    )
    site.distribution("fake-class", {"mlxcel.families": {"alpha": "fake_class:plugin"}})
    found = record(discover(site), "alpha")
    assert (found.state, "not an instance" in found.reason) == ("failed", True)


def test_a_family_answers_to_its_entry_point_name(site: Any) -> None:
    """An entry point whose name is not a wire name is a failure."""
    site.module(
        "fake_name",
        "from mlxcel.family import Family\n\nclass Fake(Family):\n"
        "    api_version = '1.0'\n    wire_names = ('beta',)\n\nplugin = Fake()\n",
    )
    site.distribution("fake-name", {"mlxcel.families": {"alpha": "fake_name:plugin"}})
    assert (
        "'alpha', which is not among its wire_names (beta)"
        in record(discover(site), "alpha").reason
    )


def test_names_are_tuples_of_strings(site: Any) -> None:
    """A plain string as wire_names would match every part of itself."""
    site.module(
        "fake_text",
        "from mlxcel.family import Family\n\nclass Fake(Family):\n"
        "    api_version = '1.0'\n    wire_names = 'alphabet'\n\nplugin = Fake()\n",
    )
    site.distribution("fake-text", {"mlxcel.families": {"alpha": "fake_text:plugin"}})
    assert "not a tuple of strings" in record(discover(site), "alpha").reason


def test_two_distributions_with_one_name(site: Any) -> None:
    """A name claimed twice names both distributions and fails for that name only."""
    site.family("alpha", distribution="first-alpha")
    site.family("alpha", distribution="second-alpha")
    site.family("beta")
    plugins = discover(site)
    states = [(r.name, r.distribution, r.state) for r in plugins.records()]
    assert states == [
        ("alpha", "first-alpha", "duplicate"),
        ("alpha", "second-alpha", "duplicate"),
        ("beta", "fake-family-beta", "loaded"),
    ]
    with pytest.raises(PluginError, match="first-alpha and second-alpha"):
        plugins.load("family", "alpha")
    assert plugins.load("family", "beta") is not None
    assert not {"first_alpha", "second_alpha"} & set(sys.modules)


def test_one_distribution_seen_twice_is_no_duplicate(make_site: Callable[[str], Any]) -> None:
    """An editable install beside an installed one is one distribution, however spelt."""
    old, new = make_site("old"), make_site("new")
    old.family("alpha", distribution="Fake_Family.alpha".lower())
    new.family("alpha")
    points = new.entry_points() + old.entry_points()
    plugins = Plugins.discover(environ={}, entry_points=points)
    assert [r.state for r in plugins.records()] == ["loaded"]


def test_two_families_that_list_one_model_type(site: Any) -> None:
    """The listing names both distributions; each still loads by its own wire name."""
    site.family("alpha", model_types=("shared",))
    site.family("beta", model_types=("shared", "own"))
    site.family("gamma", model_types=("other",))
    plugins = discover(site)
    for name in ("alpha", "beta"):
        found = record(plugins, name)
        assert found.state == "duplicate"
        assert "'shared'" in found.reason
        assert "fake-family-alpha and fake-family-beta" in found.reason
        assert plugins.load("family", name) is not None
    assert record(plugins, "gamma").state == "loaded"


def test_a_wire_name_settles_who_serves_a_model_type(site: Any) -> None:
    """Families may list what another family claims by its own name."""
    site.family("alpha", model_types=("gamma",))
    site.family("beta", model_types=("gamma",))
    site.family("gamma")
    assert {r.state for r in discover(site).records()} == {"loaded"}


@pytest.mark.parametrize("name", ["alpha", "family:alpha"])
@pytest.mark.parametrize(
    ("without", "environ", "reason"),
    [
        (True, None, "--no-plugin"),
        (False, "MLXCEL_DISABLE_PLUGINS", "MLXCEL_DISABLE_PLUGINS"),
    ],
)
def test_a_disabled_plugin_is_never_imported(
    site: Any, name: str, without: bool, environ: str | None, reason: str
) -> None:
    """The deny-lists keep a plugin out: not named, not imported, but listed with the reason."""
    site.family("alpha", before="raise SystemExit('imported')")
    site.family("beta")
    plugins = discover(
        site, without=(name,) if without else (), **({environ: f" {name} ,"} if environ else {})
    )
    assert plugins.names("family") == ("beta",)
    found = record(plugins, "alpha")
    assert found.state == "disabled"
    assert reason in found.reason
    assert found.location == str(site.path / "fake_family_alpha.py")
    assert "fake_family_alpha" not in sys.modules
    assert plugins.notices == ()
    with pytest.raises(PluginError, match=reason):
        plugins.load("family", "alpha")


def test_the_allow_list_disables_the_rest(site: Any) -> None:
    """With MLXCEL_PLUGINS only those named remain; empty means all."""
    site.family("alpha")
    site.family("beta")
    site.family("gamma")
    allowed = discover(site, MLXCEL_PLUGINS="alpha,family:beta")
    assert allowed.names("family") == ("alpha", "beta")
    assert record(allowed, "gamma").reason == "it is not in MLXCEL_PLUGINS."
    assert discover(site, MLXCEL_PLUGINS="").names("family") == ("alpha", "beta", "gamma")


def test_disabling_the_other_settles_a_duplicate_model_type(site: Any) -> None:
    """A family that is off claims nothing."""
    site.family("alpha", model_types=("shared",))
    site.family("beta", model_types=("shared",))
    assert record(discover(site, without=("beta",)), "alpha").state == "loaded"


def test_listed_names_that_match_nothing_are_reported(site: Any) -> None:
    """A misspelt name in any list is said, with the list it stands in."""
    site.family("alpha")
    plugins = discover(
        site,
        without=("alhpa",),
        MLXCEL_PLUGINS="alpha,family:alhpa",
        MLXCEL_DISABLE_PLUGINS="hooks:alpha",
    )
    assert [(line.split()[0], line.split("'")[1]) for line in plugins.notices] == [
        ("--no-plugin", "alhpa"),
        ("MLXCEL_DISABLE_PLUGINS", "hooks:alpha"),
        ("MLXCEL_PLUGINS", "family:alhpa"),
    ]


def test_strict_mode_raises_at_the_first_bad_plugin(site: Any) -> None:
    """Strict mode turns a record into an error that carries its cause."""
    site.family("bad", before="raise ValueError('broken on purpose')")
    site.family("good")
    plugins = discover(site, MLXCEL_PLUGINS_STRICT="1")
    with pytest.raises(PluginError) as caught:
        plugins.records()
    assert isinstance(caught.value.__cause__, ValueError)
    assert plugins.load("family", "good") is not None


def test_strict_mode_covers_hooks_and_model_types(site: Any) -> None:
    """A bad hook plugin, or a doubly listed model_type, stops a strict run too."""
    site.hooks("bad", "raise ValueError\n")
    with pytest.raises(PluginError, match="'bad'"):
        _ = discover(site, MLXCEL_PLUGINS_STRICT="1").hook
    site.family("alpha", model_types=("shared",))
    site.family("beta", model_types=("shared",))
    with pytest.raises(PluginError, match="'shared'"):
        discover(site, ("bad",), MLXCEL_PLUGINS_STRICT="1").records()


def test_the_first_plugin_with_an_answer_wins_over_the_default(site: Any) -> None:
    """A default marked trylast answers only when no plugin does."""

    class Default:
        @hookimpl(trylast=True)
        def mlxcel_place_stages(self, stages: int) -> tuple[range, ...]:
            return (range(stages),)

    site.hooks(
        "placer",
        "@hookimpl\ndef mlxcel_place_stages(stages):\n"
        "    return (range(0, 1),) * 2 if stages == 2 else None\n",
    )
    plugins, default = discover(site), Default()
    plugins.register_default(default)
    plugins.register_default(default)

    def place(stages: int) -> object:
        return plugins.hook.mlxcel_place_stages(
            profile=None, stages=stages, balance="bytes", budgets=None
        )

    assert place(2) == (range(0, 1),) * 2
    assert place(3) == (range(3),)


def test_hooks_of_bad_plugins_are_recorded_not_raised(site: Any) -> None:
    """The hook relay works with whatever loaded."""
    site.hooks("bad", "import sys\nsys.exit()\n")
    site.hooks("good", "@hookimpl\ndef mlxcel_observe(event): pass\n")
    plugins = discover(site)
    assert len(plugins.hook.mlxcel_observe.get_hookimpls()) == 1
    assert record(plugins, "bad").state == "failed"
    assert record(plugins, "good").hooks == ("mlxcel_observe",)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "@hookimpl\ndef mlxcel_observe(event): pass\n"
            "@hookimpl\ndef mlxcel_place_stages(nonsense): pass\n",
            "nonsense",
        ),
        (
            "@hookimpl\ndef mlxcel_observe(event): pass\n"
            "@hookimpl\ndef mlxcel_of_tomorrow(): pass\n",
            "mlxcel_of_tomorrow, which plugin API 1.0",
        ),
        ("@hookimpl(wrapper=True)\ndef mlxcel_observe(event): yield\n", "wrapper"),
        ("def mlxcel_observe(event): pass\n", "implements no hook"),
        ("@hookimpl\ndef mlxcel_observe(event): pass\nraise OSError('halfway')\n", "halfway"),
    ],
)
def test_a_half_good_hook_plugin_registers_nothing(site: Any, source: str, reason: str) -> None:
    """A hook plugin is registered whole or not at all."""
    site.hooks("half", source)
    plugins = discover(site)
    found = record(plugins, "half")
    assert found.state == "failed"
    assert reason in found.reason
    assert found.hooks == ()
    assert plugins.hook.mlxcel_observe.get_hookimpls() == []
    assert plugins.hook.mlxcel_place_stages.get_hookimpls() == []


def test_a_registration_that_breaks_off_is_rolled_back(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a hook manager that registers half and then raises is left clean."""
    register = pluggy.PluginManager.register

    def breaks_off(self: Any, plugin: Any, name: str | None = None) -> None:
        register(self, plugin, name)
        raise RuntimeError("broke off")

    site.hooks("half", "@hookimpl\ndef mlxcel_observe(event): pass\n")
    plugins = discover(site)
    monkeypatch.setattr(pluggy.PluginManager, "register", breaks_off)
    assert "broke off" in record(plugins, "half").reason
    assert plugins.hook.mlxcel_observe.get_hookimpls() == []


def test_a_raising_observer_stops_nobody_and_is_logged_once(
    site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Observers are called one by one under a guard."""
    seen = "seen = []\n@hookimpl\ndef mlxcel_observe(event):\n    seen.append(event)\n"
    site.hooks("a", seen)
    site.hooks("b", "@hookimpl\ndef mlxcel_observe(event):\n    raise SystemExit('rude')\n")
    site.hooks("c", seen)
    site.hooks("d", "calls = []\n@hookimpl\ndef mlxcel_observe():\n    calls.append(1)\n")
    plugins = discover(site)
    with caplog.at_level(logging.ERROR):
        plugins.observe(EVENT)
        plugins.observe(EVENT)
    assert sys.modules["fake_hooks_a"].seen == [EVENT, EVENT]
    assert sys.modules["fake_hooks_c"].seen == [EVENT, EVENT]
    assert sys.modules["fake_hooks_d"].calls == [1, 1]
    assert [r.message for r in caplog.records] == [
        "observer b (fake-hooks-b) raised and is ignored"
    ]


def test_entry_points_of_other_programs_are_left_alone(site: Any) -> None:
    """Only mlxcel's own groups are read."""
    site.distribution("stranger", {"console_scripts": {"alpha": "no_such_module:main"}})
    assert discover(site).records() == ()


def test_records_are_sorted_by_kind_and_name() -> None:
    """The listing does not depend on the order of installation."""
    points = [
        metadata.EntryPoint(name, "no_such_module_at_all:plugin", group)
        for group in ("mlxcel.transports", "mlxcel.families")
        for name in ("b", "a")
    ]
    records = Plugins.discover(environ={}, entry_points=points).records()
    assert [(r.kind, r.name) for r in records] == [
        ("family", "a"),
        ("family", "b"),
        ("transport", "a"),
        ("transport", "b"),
    ]
