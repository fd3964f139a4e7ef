"""The shape of the code: which way imports go, who may call what, and how big things may get.

Each rule is a function from one source file to a list of complaints. Each has bad snippets below that it must find, so
that a rule that no longer sees anything fails here and not in silence.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "fullshard"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # without the docstring
MAX_ARGUMENTS = 6  # without self and cls
MAX_ATTRIBUTES = 15

# What a layer may import of fullshard; "" is the top level, the public names. The first layer that fits counts.
ALLOWED_IMPORTS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "core": ("core", "errors"),
    "runtime": ("runtime", "core", "errors"),
    "wrapper": ("wrapper", "runtime", "core", "errors"),
    "tools.planner": ("core", "errors"),
    "tools": ("tools", "runtime", "core", "errors", ""),
    "train": ("train", "errors", ""),
    "cli": ("cli", "tools", "train", "errors", ""),
}
LAYERS = ("core", "runtime", "wrapper", "tools", "train", "cli")
STANDARD_LIBRARY_ONLY = ("errors", "core")
FORBIDDEN_ENGINES = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel", "deepspeed")
# `fullshard bench` times steps of torch's engines beside ours, on the user's own machine.
COMPARES_WITH_ENGINES = ("tools.bench.peers",)
# No engine, but where they all enter what was done to a module, so that others leave it alone.
REGISTRY_OF_ENGINES = "torch.distributed._composable.contract"

# Parts of runtime, lowest first: a part imports only from those before it. Types alone may be imported the other way.
RUNTIME_ORDER = (
    *("device", "dtensors", "graphs", "names", "policy", "registry", "tree", "inputs"),
    *("collectives", "params", "unit", "failures", "values", "boundary", "linker", "engine", "loop"),
    *("build", "hooks", "unshard", "module", "attach", "profile", "api", "whole", "checkpoint"),
)

# Signatures that copy a public function of torch, argument by argument.
MANY_ARGUMENTS = frozenset({"fully_shard", "FullyShardedDataParallel.__init__", "ShardedGradScaler.__init__"})

COLLECTIVES = re.compile(
    r"(all_gather|reduce_scatter|all_reduce|all_to_all|broadcast|gather|scatter|reduce|barrier|monitored_barrier"
    r"|send|recv|isend|irecv|batch_isend_irecv)(_\w+)?"
)
# The same as methods of a process group; only names that nothing else has.
GROUP_COLLECTIVES = re.compile(r"_?(allgather|allreduce|alltoall)(_\w+)?|_allgather_base|_reduce_scatter_base")
HOOKS = re.compile(r"_?register_\w*hooks?|queue_callback")
# train/world.py stands for a user's own program around the engine: it averages losses and agrees on a stop.
CALLS_COLLECTIVES = ("runtime.collectives", "train.world")
REGISTERS_HOOKS = ("runtime.hooks",)
# runtime/failures/debug.py reads one switch, FULLSHARD_DEBUG: whoever looks into a hang can set it for code that is
# not theirs.
READS_ENVIRONMENT = ("cli", "runtime.failures.debug")


@dataclass(frozen=True)
class Source:
    """One file: its module name below fullshard ("core.layout", "" for the package itself), text and syntax tree."""

    module: str
    text: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def within(self, *prefixes: str) -> bool:
        return any(self.module == prefix or self.module.startswith(prefix + ".") for prefix in prefixes)


Rule = Callable[[Source], list[str]]


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything imported, anywhere in the file; `from a import b` counts as a.b."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ["fullshard", *filter(None, source.module.split("."))]
                parts = parts[: len(parts) - node.level + source.is_package]
                base = ".".join([*parts, *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            yield name, node
            name += "."
        elif isinstance(node, ast.ClassDef):
            name = f"{prefix}{node.name}."
        yield from _functions(node, name)


# -- the rules ---------------------------------------------------------------------------------------------------------


def imports_go_one_way(source: Source) -> list[str]:
    layer = next((layer for layer in ALLOWED_IMPORTS if source.within(layer)), None)
    if layer is None:
        return []
    allowed = ALLOWED_IMPORTS[layer]
    complaints = []
    for line, name in _imports(source):
        if name.split(".")[0] != "fullshard":
            continue
        target = name.removeprefix("fullshard").removeprefix(".").split(".")[0]
        target = target if target in (*LAYERS, "errors") else ""
        if target not in allowed:
            complaints.append(f"line {line}: {layer} may not import {name}")
    return complaints


def runtime_parts_import_one_way(source: Source) -> list[str]:
    own = source.module.removeprefix("runtime.").split(".")[0]
    if not source.within("runtime") or own == "runtime":
        return []
    tree = source.tree
    types = {id(part) for node in ast.walk(tree) if _is_for_types(node) for part in ast.walk(node)}
    complaints = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in types:
            continue
        before, _, rest = (node.module or "").partition("fullshard.runtime.")
        part = rest.split(".")[0]
        inside = bool(before) or part in ("", own)
        if not inside and RUNTIME_ORDER.index(part) >= RUNTIME_ORDER.index(own):
            complaints.append(f"line {node.lineno}: runtime.{own} may not import runtime.{part}")
    return complaints


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def core_is_standard_library_only(source: Source) -> list[str]:
    if not source.within(*STANDARD_LIBRARY_ONLY):
        return []
    known = {*sys.stdlib_module_names, "fullshard"}
    return [f"line {line}: imports {name}" for line, name in _imports(source) if name.split(".")[0] not in known]


def no_other_engine(source: Source) -> list[str]:
    if source.within(*COMPARES_WITH_ENGINES):
        return []
    return [
        f"line {line}: imports {name}"
        for line, name in _imports(source)
        if any(f"{name}.".startswith(f"{engine}.") for engine in FORBIDDEN_ENGINES)
        and not name.startswith(f"{REGISTRY_OF_ENGINES}.")
    ]


def only_collectives_communicate(source: Source) -> list[str]:
    if source.within(*CALLS_COLLECTIVES):
        return []
    complaints = [
        f"line {line}: imports {name}"
        for line, name in _imports(source)
        if name.startswith("torch.distributed.") and COLLECTIVES.fullmatch(name.rpartition(".")[2])
    ]
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute):
            continue
        base = ast.unparse(node.value)
        of_torch = re.fullmatch(r"dist|(torch\.)?distributed(\.\w+)*|c10d|funcol", base)
        if (of_torch and COLLECTIVES.fullmatch(node.attr)) or GROUP_COLLECTIVES.fullmatch(node.attr):
            complaints.append(f"line {node.lineno}: uses {base}.{node.attr}")
    return complaints


def only_hooks_registers_hooks(source: Source) -> list[str]:
    if source.within(*REGISTERS_HOOKS):
        return []
    return [
        f"line {node.lineno}: uses {node.attr}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and HOOKS.fullmatch(node.attr)
    ] + [f"line {line}: imports {name}" for line, name in _imports(source) if HOOKS.fullmatch(name.rpartition(".")[2])]


def only_cli_reads_the_environment(source: Source) -> list[str]:
    if source.within(*READS_ENVIRONMENT):
        return []
    names = {"environ", "environb", "getenv", "putenv"}
    return [
        f"line {node.lineno}: uses os.{node.attr}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in names
    ] + [f"line {line}: imports {name}" for line, name in _imports(source) if name.rpartition(".")[2] in names]


def no_globals(source: Source) -> list[str]:
    return [f"line {node.lineno}: global" for node in ast.walk(source.tree) if isinstance(node, ast.Global)]


def files_are_short(source: Source) -> list[str]:
    lines = len(source.text.splitlines())
    return [f"{lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def functions_are_short(source: Source) -> list[str]:
    complaints = []
    for name, node in _functions(source.tree):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        if lines > MAX_FUNCTION_LINES:
            complaints.append(f"line {node.lineno}: {name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    return complaints


def functions_take_few_arguments(source: Source) -> list[str]:
    complaints = []
    for name, node in _functions(source.tree):
        arguments = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([arg for arg in arguments if arg not in ("self", "cls")])
        if count > MAX_ARGUMENTS and name not in MANY_ARGUMENTS:
            complaints.append(f"line {node.lineno}: {name} takes {count} arguments, at most {MAX_ARGUMENTS}")
    return complaints


def classes_have_few_attributes(source: Source) -> list[str]:
    complaints = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        found = {
            target.attr
            for target in ast.walk(node)
            if isinstance(target, ast.Attribute)
            and isinstance(target.ctx, ast.Store)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        }
        found |= {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            if not ast.unparse(item.annotation).startswith("ClassVar")
        }
        if len(found) > MAX_ATTRIBUTES:
            complaints.append(f"line {node.lineno}: {node.name} has {len(found)} attributes, at most {MAX_ATTRIBUTES}")
    return complaints


RULES: tuple[Rule, ...] = (
    imports_go_one_way,
    runtime_parts_import_one_way,
    core_is_standard_library_only,
    no_other_engine,
    only_collectives_communicate,
    only_hooks_registers_hooks,
    only_cli_reads_the_environment,
    no_globals,
    files_are_short,
    functions_are_short,
    functions_take_few_arguments,
    classes_have_few_attributes,
)


# -- the code keeps the rules ------------------------------------------------------------------------------------------


def _sources() -> Iterator[tuple[str, Source]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        yield str(path.relative_to(PACKAGE)), Source(module, path.read_text(), is_package)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule: Rule) -> None:
    sources = list(_sources())
    assert sources, f"no source files in {PACKAGE}: this test would pass on nothing"
    complaints = [f"{path}: {complaint}" for path, source in sources for complaint in rule(source)]
    assert not complaints, "\n".join([rule.__name__, *complaints])


# -- the rules see what they are for -----------------------------------------------------------------------------------

_SEVEN = ", ".join(f"a{i}" for i in range(7))
_LONG = "def f():\n" + "    x = 1\n" * 60
_SELF = "class A:\n  def __init__(self):\n" + "".join(f"    self.a{i} = {i}\n" for i in range(16))

BAD: list[tuple[Rule, str, str]] = [
    (runtime_parts_import_one_way, "runtime.unit", "from fullshard.runtime.engine import Engine"),
    (runtime_parts_import_one_way, "runtime.params.shards", "def f():\n    from fullshard.runtime.values import init"),
    (imports_go_one_way, "core.layout", "from fullshard.runtime.unit import Unit"),
    (imports_go_one_way, "core.layout", "import fullshard"),
    (imports_go_one_way, "core.layout", "def f():\n    from ..runtime import unit"),
    (imports_go_one_way, "errors", "from fullshard.core import layout"),
    (imports_go_one_way, "runtime.engine", "from fullshard.tools import report"),
    (imports_go_one_way, "runtime.engine", "from fullshard import train"),
    (imports_go_one_way, "runtime.engine", "from fullshard.wrapper import wrapper"),
    (imports_go_one_way, "runtime.engine", "import fullshard.cli"),
    (imports_go_one_way, "runtime.engine", "from fullshard import fully_shard"),
    (imports_go_one_way, "tools.planner", "from fullshard.runtime.api import fully_shard"),
    (imports_go_one_way, "tools.report", "from fullshard.train.config import Config"),
    (imports_go_one_way, "train.loop", "from fullshard.runtime.api import fully_shard"),
    (imports_go_one_way, "train.loop", "from fullshard.core.spec import World"),
    (imports_go_one_way, "train.loop", "from fullshard.wrapper.wrapper import FullyShardedDataParallel"),
    (imports_go_one_way, "train.loop", "from ..core import spec"),
    (imports_go_one_way, "cli", "from fullshard.core import cost"),
    (core_is_standard_library_only, "core.layout", "import torch"),
    (core_is_standard_library_only, "core.layout", "if TYPE_CHECKING:\n    from numpy import ndarray"),
    (core_is_standard_library_only, "errors", "import torch.distributed as dist"),
    (no_other_engine, "runtime.api", "from torch.distributed.fsdp import MixedPrecisionPolicy"),
    (no_other_engine, "train.loop", "from torch.nn.parallel import DistributedDataParallel"),
    (no_other_engine, "train.loop", "from torch.distributed import fsdp"),
    (no_other_engine, "tools.report", "import deepspeed"),
    (no_other_engine, "tools.bench.step", "from torch.distributed.fsdp import fully_shard"),
    (only_collectives_communicate, "runtime.unit", "dist.all_reduce(norm)"),
    (only_collectives_communicate, "runtime.unit", "torch.distributed.batch_isend_irecv(ops)"),
    (only_collectives_communicate, "runtime.unit", "torch.distributed.distributed_c10d.all_gather_object(a, b)"),
    (only_collectives_communicate, "runtime.unit", "from torch.distributed import isend"),
    (only_collectives_communicate, "runtime.unit", "from torch.distributed.nn.functional import all_gather"),
    (only_collectives_communicate, "runtime.unit", "group._allgather_base(out, own)"),
    (only_collectives_communicate, "train.loop", "dist.barrier()"),
    (only_hooks_registers_hooks, "runtime.engine", "module.register_forward_pre_hook(f)"),
    (only_hooks_registers_hooks, "runtime.engine", "Variable._execution_engine.queue_callback(f)"),
    (only_hooks_registers_hooks, "runtime.engine", "parameter.register_post_accumulate_grad_hook(f)"),
    (only_hooks_registers_hooks, "runtime.engine", "from torch.autograd.graph import register_multi_grad_hook"),
    (only_hooks_registers_hooks, "tools.verifier", "module._register_state_dict_hook(f)"),
    (only_cli_reads_the_environment, "runtime.engine", "os.environ['RANK']"),
    (only_cli_reads_the_environment, "train.loop", "from os import getenv"),
    (no_globals, "runtime.engine", "def f():\n    global state\n    state = 1"),
    (files_are_short, "core.layout", "x = 1\n" * 401),
    (functions_are_short, "core.layout", _LONG),
    (functions_are_short, "core.layout", "class A:\n" + "".join(f"  {line}\n" for line in _LONG.splitlines())),
    (functions_take_few_arguments, "core.layout", f"def f({_SEVEN}): pass"),
    (functions_take_few_arguments, "core.layout", f"class A:\n    def f(self, *, {_SEVEN}): pass"),
    (functions_take_few_arguments, "core.layout", f"def fully_shard():\n    def inner({_SEVEN}): pass"),
    (classes_have_few_attributes, "core.layout", _SELF),
    (classes_have_few_attributes, "core.layout", "class A:\n" + "".join(f"  a{i}: int = 0\n" for i in range(16))),
]

GOOD: list[tuple[Rule, str, str]] = [
    (runtime_parts_import_one_way, "runtime.engine", "from fullshard.runtime.params.shards import Member"),
    (
        runtime_parts_import_one_way,
        "runtime.unit",
        "if TYPE_CHECKING:\n  from fullshard.runtime.engine import Engine",
    ),
    (imports_go_one_way, "core.layout", "from fullshard.core.spec import World\nfrom ..errors import FullshardError"),
    (imports_go_one_way, "runtime.engine", "from fullshard.core import schedule\nfrom .unit import Unit\nimport torch"),
    (imports_go_one_way, "train.loop", "from fullshard import fully_shard\nfrom fullshard.train.config import Config"),
    (imports_go_one_way, "", "from fullshard.runtime.api import fully_shard"),
    (core_is_standard_library_only, "core.layout", "from __future__ import annotations\nimport math"),
    (core_is_standard_library_only, "runtime.unit", "import torch"),
    (no_other_engine, "runtime.api", "from torch.distributed.tensor import DTensor"),
    (no_other_engine, "tools.bench.peers", "from torch.distributed.fsdp import fully_shard"),
    (only_collectives_communicate, "runtime.collectives.direct", "dist.isend(rows, peer)"),
    (
        only_collectives_communicate,
        "runtime.params.gradients",
        "transport.all_reduce(x)\nt.scatter(0, i, x)\npipe.send(x)",
    ),
    (only_hooks_registers_hooks, "runtime.hooks", "module.register_forward_hook(f)"),
    (only_hooks_registers_hooks, "runtime.engine", "self.register_buffer('x', y)"),
    (only_cli_reads_the_environment, "cli", "os.environ['RANK']"),
    (files_are_short, "core.layout", "x = 1\n" * 400),
    (functions_are_short, "core.layout", 'def f():\n    """A\n' + "    b\n" * 50 + '    """\n' + "    x = 1\n" * 59),
    (functions_take_few_arguments, "runtime.api", f"def fully_shard({_SEVEN}): pass"),
    (functions_take_few_arguments, "core.layout", "def f(self, a, b, c, d, e, f): pass"),
    (classes_have_few_attributes, "core.layout", _SELF.rsplit("\n", 2)[0]),
]


@pytest.mark.parametrize(("rule", "module", "text"), BAD)
def test_rule_finds_the_bad_snippet(rule: Rule, module: str, text: str) -> None:
    assert rule(Source(module, text))


@pytest.mark.parametrize(("rule", "module", "text"), GOOD)
def test_rule_accepts_the_good_snippet(rule: Rule, module: str, text: str) -> None:
    assert rule(Source(module, text)) == []


def test_every_rule_has_a_bad_snippet() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)
