"""Who may import whom, by import statements and at run time; what the registries list; which paths the documentation names."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sonde"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if "demo_programs" not in path.parts)

ROOT_MODULES = {
    "script_runner", "errors", "events", "config", "condition_expressions", "layer_name_patterns", "spike_detection", "memory_trend",
    "formatting",
}  # fmt: skip
MEASURING = ROOT_MODULES | {"runlog", "statistics", "capture"}
ANALYSIS = {"nonfinite", "replay", "leaks", "profiler", "memory_profiler"}
READING = ROOT_MODULES | {"runlog", "run_view", "rules", "report", "comparison", "render", "diagnostics", "export"}
MAY_IMPORT = {
    "errors": set(),
    "script_runner": set(),
    "cpu_bfloat16_support": set(),
    "events": set(),
    "config": {"errors", "layer_name_patterns"},
    "layer_name_patterns": {"errors", "formatting"},
    "condition_expressions": {"errors"},
    "spike_detection": set(),
    "formatting": set(),
    "memory_trend": set(),
    "runlog": ROOT_MODULES,
    # the training process
    "statistics": ROOT_MODULES | {"runlog"},
    "capture": ROOT_MODULES | {"runlog", "statistics"},
    "nonfinite": MEASURING | {"leaks"},
    "leaks": MEASURING,
    "replay": MEASURING | {"nonfinite", "leaks"},
    "profiler": READING | MEASURING | ANALYSIS | {"script_runner"},
    "memory_profiler": READING | MEASURING | ANALYSIS | {"script_runner"},
    "tuning": MEASURING | {"script_runner"},
    "tools": READING | MEASURING | ANALYSIS | {"session"},
    "incidents": READING | MEASURING | ANALYSIS,
    "early_stopper": ROOT_MODULES,
    "records_of_tools": ROOT_MODULES,
    "tools_of_session": ROOT_MODULES | {"records_of_tools"},  # tools are loaded through `sonde`, on first access
    "session": MEASURING | {"incidents", "tools_of_session", "early_stopper", "step_decorator"},
    "step_decorator": MEASURING | {"session"},
    "integrations": MEASURING | {"session"},
    # the reading process
    "run_view": ROOT_MODULES | {"runlog"},
    "rules": ROOT_MODULES | {"runlog", "run_view"},
    "report": ROOT_MODULES | {"runlog", "run_view", "rules"},
    "comparison": ROOT_MODULES | {"runlog", "run_view", "rules", "report"},
    "render": READING,
    "diagnostics": READING,
    "export": READING,
    "pytest_plugin": READING,  # a session is loaded through `sonde`, when a test asks for one
    "cli": READING | ANALYSIS
    | {"capture", "statistics", "tuning", "tools", "session", "script_runner", "cpu_bfloat16_support"},
    "__init__": set(),  # all of its names are lazy
    "compat": set(),  # as above
    "__main__": {"cli"},
}
USES_TORCH = {
    "statistics", "capture", "nonfinite", "replay", "leaks", "profiler", "memory_profiler", "tuning", "tools", "incidents", "session",
    "tools_of_session", "step_decorator",
}  # fmt: skip


def room(module: Path) -> str:
    return module.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(module: Path, *, at_import: bool) -> Iterator[str]:
    """The modules that a module names in import statements; those for type checkers are never executed."""
    package = ("sonde", *module.relative_to(SOURCE).parent.parts)
    open_nodes: list[ast.AST] = [ast.parse(module.read_text(encoding="utf-8"))]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            open_nodes.extend(node.orelse)
            continue
        if at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join(part for part in (*above, node.module) if part)
            yield from (f"{base}.{alias.name}" if base == "sonde" else base for alias in node.names)
        open_nodes.extend(ast.iter_child_nodes(node))


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(SOURCE)) for path in paths]


@pytest.mark.parametrize("module", MODULES, ids=names(MODULES))
def test_a_room_imports_only_what_is_below_it(module):
    here = room(module)
    rooms = {name.split(".")[1] for name in imports(module, at_import=False) if name.startswith("sonde.")}
    rooms -= {"__version__"}
    assert rooms <= MAY_IMPORT[here] | {here}


@pytest.mark.parametrize("module", MODULES, ids=names(MODULES))
def test_torch_is_imported_in_the_rooms_of_the_training_process_alone(module):
    found = {name.split(".")[0] for name in imports(module, at_import=False)}
    assert "torch" not in found or room(module) in USES_TORCH


@pytest.mark.parametrize("module", [path for path in MODULES if room(path) == "cli"], ids=lambda path: path.name)
def test_a_command_loads_what_it_works_with_only_when_it_is_called(module):
    heavy = {"numpy", "rich", "torch", "pyarrow", "sonde.capture", "sonde.report", "sonde.rules"}
    at_import = set(imports(module, at_import=True))
    assert not {name for name in at_import if any(name == each or name.startswith(each + ".") for each in heavy)}


@pytest.mark.parametrize("module", MODULES, ids=names(MODULES))
def test_a_module_says_its_idea_first(module):
    assert not module.stat().st_size or ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))


PRIVATE_TORCH_API = SOURCE / "statistics" / "private_torch_api.py"
ACCEPTED = {"_modules", "_parameters", "_buffers", "_forward_hooks"}  # of nn.Module: private_torch_api.py says why
PRIVATE_TO_TORCH = set(re.findall(r"\b_(?!_)[a-z]\w+", PRIVATE_TORCH_API.read_text(encoding="utf-8"))) - ACCEPTED


def private_names_of_torch(module: Path) -> Iterator[str]:
    """`torch._name`, `torch.part._name`, imports of such names, and attributes of torch's objects that private_torch_api.py lists."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = getattr(node, "module", None) or ""
            named = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            yield from (name for name in named if re.match(r"torch\..*(?<=\.)_[a-zA-Z]", name))
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"_(?!_)\w+", node.attr) and node.attr not in ACCEPTED:
            owner = ast.unparse(node.value)
            if re.match(r"(torch|nn)(\.|$)", owner) or (owner not in {"self", "cls"} and node.attr in PRIVATE_TO_TORCH):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr", "setattr"}:
            named = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
            yield from (name for name in named if name in PRIVATE_TO_TORCH)


@pytest.mark.parametrize("module", MODULES, ids=names(MODULES))
def test_one_module_alone_uses_private_names_of_torch(module):
    found = list(private_names_of_torch(module))
    assert bool(found) == (module == PRIVATE_TORCH_API), found


PATCH_TORCH = {SOURCE / "capture" / name for name in ("torch_patches.py", "forward_call_patch.py", "monkeypatch.py")}
GLOBAL_HOOK = re.compile(r"register_(module|optimizer_step)_\w*hook")
METHOD = re.compile(r"__(call|init|iter|next|new|enter|exit)__")


def root_name(node: ast.AST) -> str:
    """`torch` of `torch.optim.Optimizer.step`, of `vars(torch)["save"]` and of `getattr(torch, name)`; "" of anything computed."""
    while True:
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"vars", "getattr"} and node.args:
            node = node.args[0]
        else:
            return node.id if isinstance(node, ast.Name) else ""


def names_of_torch(tree: ast.AST) -> set[str]:
    """Names for modules, classes and functions of torch: by import, by assignment and as variables of loops over them."""
    found = {"DataLoaderIterator"}  # from private_torch_api.py
    bindings: list[tuple[ast.AST, list[ast.AST]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = zip(target.elts, node.value.elts) if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) else ()
                bindings += [(name, [value]) for name, value in pairs or [(target, node.value)]]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            bindings.append((node.target, [node.value]))
        elif isinstance(node, (ast.For, ast.comprehension)):
            values = [part for part in ast.walk(node.iter) if isinstance(part, (ast.Name, ast.Attribute))]
            bindings += [(name, values) for name in ast.walk(node.target) if isinstance(name, ast.Name)]
    for _ in range(3):  # a name of a name
        found |= {name.id for name, values in bindings if isinstance(name, ast.Name) and any(root_name(each) in found for each in values)}
    return found


def changes_of_torch(module: Path) -> Iterator[str]:
    """Global hooks that a module registers, and attributes of modules and classes of torch that it assigns or deletes."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    torch_names = names_of_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.alias) and GLOBAL_HOOK.fullmatch(node.name):
            yield node.name
        elif isinstance(node, ast.Attribute) and GLOBAL_HOOK.fullmatch(node.attr):
            yield ast.unparse(node)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            is_method = len(torch_names) > 1 and isinstance(node, ast.Attribute) and METHOD.fullmatch(node.attr)  # of a class by any name
            if is_method or root_name(node) in torch_names:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"setattr", "delattr"} and root_name(node.args[0]) in torch_names:
            yield ast.unparse(node)


@pytest.mark.parametrize("module", MODULES, ids=names(MODULES))
def test_three_modules_alone_patch_torch_and_register_its_global_hooks(module):
    assert module in PATCH_TORCH or not list(changes_of_torch(module))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.autograd.backward = print",
        "import torch\ntorch.nn.Module.__call__ = print",
        "from torch import nn\ndel nn.Module.zero_grad",
        "from torch.utils.data import DataLoader as Loader\nLoader.__iter__ = print",
        "import torch\nscaler: Any = torch.amp.GradScaler\nsetattr(scaler, name, print)",
        "import torch\nowner, made = torch.optim.Adam, print\nowner.step = made",
        "import torch\nfor owner, made in ((torch, a), (torch.serialization, b)):\n    setattr(owner, made.__name__, made)",
        "import torch\nfor kind in vars(torch.optim).values():\n    kind.step = print",
        "import torch\nvars(torch)['save'] = print",
        "from torch import nn\nowner.__call__ = print",
        "from torch.optim.optimizer import register_optimizer_step_post_hook as register",
        "import torch\ntorch.nn.modules.module.register_module_full_backward_hook(print)",
    ],
)
def test_a_change_of_torch_is_recognized(code, tmp_path):
    (tmp_path / "module.py").write_text(code)
    assert list(changes_of_torch(tmp_path / "module.py"))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nx = torch.zeros(3)\nx.requires_grad = True",
        "from torch import nn\nmodel = nn.Linear(1, 1)\nmodel.weight.grad = None\nmodel.register_forward_hook(print)",
        "for parameter in model.parameters():\n    parameter.grad = None",
        "self.step = 3\nsetattr(info, name, 0.0)",
    ],
)
def test_a_change_of_a_tensor_or_of_one_module_is_none(code, tmp_path):
    (tmp_path / "module.py").write_text(code)
    assert not list(changes_of_torch(tmp_path / "module.py"))


def test_no_class_name_exists_twice():
    defined = [
        node.name
        for module in MODULES
        for node in ast.parse(module.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in defined if defined.count(name) > 1} == {"SondeCallback"}  # public in both Lightning and transformers


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_sonde_loads_nothing_else():
    assert not loaded_after("import sonde") & {"torch", "numpy", "rich", "click", "sonde.config", "sonde.runlog"}


def test_the_command_line_starts_without_numpy_rich_and_torch():
    assert not loaded_after("import sonde.cli\nfor name in sonde.cli.COMMANDS: __import__('sonde.cli.' + name)") & {
        "torch",
        "numpy",
        "rich",
        "pyarrow",
    }


def test_the_reading_half_never_loads_torch():
    reading = [path.relative_to(SOURCE) for path in MODULES if room(path) not in USES_TORCH | {"__main__"}]
    dotted = [".".join(("sonde", *path.with_suffix("").parts)).removesuffix(".__init__") for path in reading]
    assert "torch" not in loaded_after("import " + ", ".join(dotted))


HEALTHY_TRAINING = """
import tempfile, torch, sonde
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with sonde.watch(model, optimizer, to=tempfile.mkdtemp(), strict=True):
    for _ in range(40):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.torch
def test_a_healthy_watched_training_loads_no_analysis():
    pytest.importorskip("torch")
    loaded = {name.split(".")[1] for name in loaded_after(HEALTHY_TRAINING) if name.startswith("sonde.")}
    assert loaded <= MEASURING | {"session", "tools_of_session", "early_stopper"}


PRIVATE = [path for path in MODULES if room(path) in ("statistics", "capture", "nonfinite", "leaks", "replay")]


@pytest.mark.parametrize("module", PRIVATE, ids=names(PRIVATE))
def test_the_measuring_side_does_not_reach_other_packages_through_the_public_names(module):
    assert "sonde" not in set(imports(module, at_import=False))


def test_every_public_name_is_listed_and_an_unknown_one_is_refused():
    import sonde

    assert set(dir(sonde)) == set(sonde.__all__)
    for name in ("DebugConfig", "Run", "diagnose", "Report", "Finding", "Severity", "SondeError"):
        assert getattr(sonde, name).__name__ == name
    with pytest.raises(AttributeError, match="wacht"):
        _ = sonde.wacht


def test_the_tuple_of_commands_is_the_folder_of_commands():
    from sonde.cli import COMMANDS

    folder = [path.stem for path in (SOURCE / "cli").glob("*.py")]
    assert sorted(COMMANDS) == sorted(name for name in folder if not name.startswith("_"))


# ---- the papers


def tree_paths(text: str) -> Iterator[str]:
    """The paths of the tree that ARCHITECTURE.md draws: two blanks deeper is one folder deeper."""
    tree = text.split("```tree\n")[1].split("```")[0]
    above: list[str] = []
    for row in tree.splitlines():
        name = row.split()[0]
        depth = (len(row) - len(row.lstrip())) // 2
        above[depth:] = [name.rstrip("/")]
        yield "/".join(above)


def test_the_tree_of_the_architecture_is_the_tree_on_disk():
    paths = list(tree_paths((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= {Path(path).name for path in paths if path.startswith("src/sonde/")}


GUIDE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "guide").glob("*.md"))
PAPERS = ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "CHANGELOG.md", "docs/run-format.md", "docs/guarantees.md", *GUIDE]
PATH = re.compile(r"`((?:src|tests|docs|benchmarks|examples|\.ci)/[\w./-]+)`|\]\((?!https?:|#)([^)#\s]+)")


@pytest.mark.parametrize("paper", PAPERS)
def test_every_path_that_a_paper_names_exists(paper):
    text = (ROOT / paper).read_text(encoding="utf-8")
    for from_root, beside in PATH.findall(text):
        if "your" in from_root:
            continue
        path = ROOT / from_root if from_root else (ROOT / paper).parent / beside
        assert path.exists(), f"{paper} names {from_root or beside}"


def test_the_page_of_the_guarantees_names_every_test_of_a_guarantee():
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "tests" / "guarantees").glob("test_*.py") if path.name not in page] == []


@pytest.mark.torch
def test_every_public_name_can_be_loaded():
    pytest.importorskip("torch")
    import sonde

    for name, home in sonde._homes().items():
        assert getattr(sonde, name) is getattr(importlib.import_module(home), name)
