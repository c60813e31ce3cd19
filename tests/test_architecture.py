"""Rules about who may know whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel.family.choose import known_distributions

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core"

LEVELS = (
    ("mlxcel", "mlxcel.errors"),
    (
        "mlxcel.checkpoint",
        "mlxcel.compat",
        "mlxcel.pipeline.operations",
        "mlxcel.pipeline.report",
        "mlxcel.pipeline.step",
    ),
    (
        "mlxcel.family",
        "mlxcel.hookspecs",
        "mlxcel.plugin_checks",
        "mlxcel.plugin_entries",
        "mlxcel.plugin_selection",
        "mlxcel.plugins",
        "mlxcel.tensor.options",
        "mlxcel.tensor.plan",
        "mlxcel.tensor.shard",
    ),
    ("mlxcel.observe", "mlxcel.partition", "mlxcel.stage.contract", "mlxcel.wire"),
    ("mlxcel.transport",),
    ("mlxcel.pipeline",),
    ("mlxcel.stage", "mlxcel.tensor"),
    ("mlxcel.engine",),
    ("mlxcel.cluster",),
    ("mlxcel.client", "mlxcel.server"),
    ("mlxcel.bench",),
    ("mlxcel.cli", "mlxcel.__main__"),
    ("mlxcel.testing",),
)
"""Who may import whom: a module imports its own level and those above it in this list."""

HEAVY_MODULES = (
    "mlxcel.compat",
    "mlxcel.family.transformer",
    "mlxcel.stage",
    "mlxcel.tensor",
    "mlxcel.bench.reference",  # mlx-lm itself, in a process of its own
)
"""Where mlx_lm may be imported at module level; ``mlxcel.testing`` is free to."""

GGUF_MODULES = ("mlxcel.checkpoint.gguf_llama", "mlxcel.cli.import_gguf")
"""Where the architecture names of the GGUF format may stand, which some families share."""

DEFAULT_NAMES = {"mlxcel.cluster.topology": {"tcp"}}
"""Names of plugins that core may say: they are what a flag means when it is left out."""


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def core_modules() -> dict[str, ast.Module]:
    return {
        module_name(path, CORE): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(CORE.rglob("*.py"))
    }


CORE_MODULES = core_modules()


def imports(tree: ast.AST, *, typing_too: bool = False) -> Iterator[str]:
    """Every imported module, wherever the import stands; without those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in CORE_MODULES else str(node.module)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            if typing_too:
                yield from imports(node, typing_too=True)
        else:
            yield from imports(node, typing_too=typing_too)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


LEVEL_OF = {name: index for index, group in enumerate(LEVELS) for name in group}


def level(module: str) -> int:
    """The index in LEVELS of the closest package there that ``module`` is or is within."""
    name = module
    while name not in LEVEL_OF:
        name = name.rpartition(".")[0]
    assert name != "mlxcel" or module == "mlxcel", f"{module} has no place in LEVELS"
    return LEVEL_OF[name]


@pytest.mark.parametrize("module", CORE_MODULES)
def test_dependencies_point_one_way(module: str) -> None:
    """A core module imports nothing from a package that builds on it."""
    upward = [
        name
        for name in imports(CORE_MODULES[module])
        if within(name, ("mlxcel",)) and level(name) > level(module)
    ]
    assert upward == []


def test_planning_modules_import_nothing_heavy() -> None:
    """All that plans is importable without mlx_lm and transformers, which cost seconds."""
    planning = [
        name
        for name in CORE_MODULES
        if name == "mlxcel.stage.contract" or not within(name, (*HEAVY_MODULES, "mlxcel.testing"))
    ]
    source = (
        f"import importlib, sys\n"
        f"for name in {planning!r}:\n"
        f"    importlib.import_module(name)\n"
        f"    for heavy in ('mlx_lm', 'transformers'):\n"
        f"        assert heavy not in sys.modules, (name, heavy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_planning_and_coordinating_need_no_mlx() -> None:
    """A plan is made, and a coordinator runs, where MLX is not even installed."""
    packages = ("mlxcel.partition", "mlxcel.plugins", "mlxcel.hookspecs", "mlxcel.family.contract")
    packages += ("mlxcel.cluster", "mlxcel.server")
    planning = [name for name in CORE_MODULES if within(name, packages)]
    source = (
        f"import importlib, sys\n"
        f"sys.modules['mlx'] = None\n"
        f"for name in {planning!r}:\n"
        f"    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def strings(tree: ast.AST) -> Iterator[str]:
    """String constants that are not docstrings or other bare expressions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        yield from strings(node)


def first_party_names() -> set[str]:
    """What first-party plugins are called: their entry points, and the model types they serve."""
    names = set(known_distributions())
    for path in ROOT.glob("plugins/*/*/pyproject.toml"):
        groups = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["entry-points"]
        names |= {name for group in groups.values() for name in group}
    return names


@pytest.mark.parametrize("module", [m for m in CORE_MODULES if not within(m, ("mlxcel.testing",))])
def test_core_names_no_plugin(module: str) -> None:
    """No module of core knows a plugin's distribution, module or name."""
    source = (CORE / Path(*module.split("."))).with_suffix(".py")
    if not source.exists():
        source = CORE / Path(*module.split(".")) / "__init__.py"
    kinds = "family|transport|trigger|executor|weight_transfer"
    text = source.read_text(encoding="utf-8")
    assert re.findall(rf"\bmlxcel[-_](?:{kinds})[-_]\w+", text) == []
    if module not in GGUF_MODULES:
        names = first_party_names() & set(strings(CORE_MODULES[module]))
        assert names == DEFAULT_NAMES.get(module, set())


def test_nothing_in_core_sees_the_test_doubles() -> None:
    """mlxcel.testing is for tests and plugin authors; the product never imports it."""
    users = [
        module
        for module, tree in CORE_MODULES.items()
        if not within(module, ("mlxcel.testing",))
        and any(within(name, ("mlxcel.testing",)) for name in imports(tree, typing_too=True))
    ]
    assert users == []


def public_modules() -> tuple[str, ...]:
    """The modules in the first table of docs/plugin-api.md."""
    text = (ROOT / "docs" / "plugin-api.md").read_text(encoding="utf-8")
    section = text.split("## What a plugin may import")[1].split("\n## ")[0]
    return tuple(re.findall(r"^\| `(mlxcel[\w.]*)` \|", section, flags=re.MULTILINE))


PLUGIN_FILES = [
    path
    for folder in sorted([*ROOT.glob("plugins/*/*"), *ROOT.glob("examples/*/")])
    for path in sorted(folder.rglob("*.py"))
    if not {"build", ".venv"} & set(path.parts)
]


def test_the_public_modules_exist() -> None:
    """What the documentation offers to plugins is there."""
    public = public_modules()
    assert "mlxcel.family" in public
    assert [name for name in public if name not in CORE_MODULES] == []


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_import_only_the_public_api(path: Path) -> None:
    """First-party plugins and examples use the door that third parties use."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    private = [
        name
        for name in imports(tree, typing_too=True)
        if within(name, ("mlxcel",)) and not (name == "mlxcel" or name in public_modules())
    ]
    assert private == []


BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_KEYWORDS = {("trust_remote_code", "True"), ("allow_pickle", "True")}


def ways_to_run_data(tree: ast.AST) -> set[str]:
    """What in a module could make code of what is read from a file or a peer."""
    nodes = list(ast.walk(tree))
    calls = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    keywords = {(n.arg, ast.unparse(n.value)) for n in nodes if isinstance(n, ast.keyword)}
    imported = {name.partition(".")[0] for name in imports(tree, typing_too=True)}
    named = {"=".join(pair) for pair in keywords & BANNED_KEYWORDS}
    return (imported & BANNED_MODULES) | (calls & BANNED_CALLS) | named


@pytest.mark.parametrize("module", CORE_MODULES)
def test_core_never_runs_data(module: str) -> None:
    """Nothing read from a file or a peer can become code: no pickle, no eval, no exec."""
    assert ways_to_run_data(CORE_MODULES[module]) == set()


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_never_run_data(path: Path) -> None:
    """Nor in a family, a transport or an example."""
    assert ways_to_run_data(ast.parse(path.read_text(encoding="utf-8"))) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "def f():\n    import shelve",
        "eval(text)",
        "load(name, allow_pickle=True)",
    ],
)
def test_ways_to_run_data_are_noticed(source: str) -> None:
    """The two rules above see what they forbid."""
    assert ways_to_run_data(ast.parse(source)) != set()
