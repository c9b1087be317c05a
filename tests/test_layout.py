import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HEADS

import linformer_hf


SOURCE = Path(linformer_hf.__file__).parent
FILES = sorted(SOURCE.glob("*.py"))
TRAVELLING = sorted(SOURCE.glob("*_linformer.py"))
OUTSIDE = {"torch", "transformers", "huggingface_hub"} | set(sys.stdlib_module_names)

travelling = pytest.mark.parametrize("path", TRAVELLING, ids=lambda path: path.name)
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def imports(path):
    """(relative depth, module, names) of each import statement, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module, [alias.name for alias in node.names]


def relative_imports(path):
    return {module for level, module, _ in imports(path) if level}


def test_the_three_files_travel():
    names = [path.name for path in TRAVELLING]
    assert names == ["configuration_linformer.py", "modeling_linformer.py", "projections_linformer.py"]


@travelling
def test_travelling_files_import_little_and_by_name(path):
    for level, module, _ in imports(path):
        if level:
            assert level == 1, f"from {'.' * level}{module}"
            assert module is not None, "`from . import x` is silently not pushed"
            assert f"{module}.py" in {other.name for other in TRAVELLING}, module
        else:
            assert module.split(".")[0] in OUTSIDE, module
            # other models' internals change between minor versions
            assert not module.startswith("transformers.models"), module


@travelling
def test_transformers_finds_just_those_files(path):
    # its search is by regular expressions, which docstrings and comments may fool
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    assert set(get_relative_imports(path)) == relative_imports(path)
    assert set(get_imports(path)) <= OUTSIDE


@travelling
def test_annotations_stay_real(path):
    assert "from __future__ import annotations" not in path.read_text()  # else @strict checks nothing


def test_imports_have_no_cycle():
    graph = {path.stem: {module.split(".")[0] for module in relative_imports(path)} for path in FILES}
    order = []
    while graph:
        ready = sorted(name for name, needs in graph.items() if not needs & graph.keys())
        assert ready, f"cycle among {sorted(graph)}"
        order += ready
        for name in ready:
            del graph[name]
    first = [order.index(f"{name}_linformer") for name in ("configuration", "projections", "modeling")]
    assert first == sorted(first)


@every_file
def test_the_package_does_not_import_examples_or_tests(path):
    roots = {module.split(".")[0] for level, module, _ in imports(path) if not level}
    assert not roots & {"examples", "tests", "linformer_hf"}


def forwards():
    tree = ast.parse((SOURCE / "modeling_linformer.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in HEADS.values() and node.name != "LinformerModel":
            (forward,) = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward"]
            yield node.name, forward


def test_heads_are_thin():
    lines = {name: forward.end_lineno - forward.lineno + 1 for name, forward in forwards()}
    assert len(lines) == 5
    assert {name: count for name, count in lines.items() if count > 35} == {}


def test_heads_pass_their_keyword_arguments_to_the_loss():
    # they carry num_items_in_batch
    for name, forward in forwards():
        source = ast.unparse(forward)
        assert "self.loss_function(" in source or "num_items_in_batch" in source or "self.loss_function," in source, (
            name
        )


def test_types_are_chosen_by_a_table():
    source = (SOURCE / "modeling_linformer.py").read_text()
    assert "PROJECTIONS[config.projection_type]" in source
    ladder = re.findall(r"projection_type\s*==", source + (SOURCE / "projections_linformer.py").read_text())
    assert len(ladder) <= 2


def test_typed_and_public():
    assert (SOURCE / "py.typed").exists()
    assert set(HEADS.values()) | {"LinformerConfig", "LinformerPreTrainedModel"} <= set(linformer_hf.__all__)
    assert all(hasattr(linformer_hf, name) for name in linformer_hf.__all__)


def run(code):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=True
    )


IMPORT_TIME = """
import sys, time
start = time.perf_counter()
import transformers
from transformers import AutoModelForMaskedLM, AutoModelForMultipleChoice, RobertaForMaskedLM
theirs = time.perf_counter() - start
known = {name.split(".")[0] for name in sys.modules}
start = time.perf_counter()
import linformer_hf
ours = time.perf_counter() - start
print(theirs, ours, *sorted({name.split(".")[0] for name in sys.modules} - known))
"""


def test_importing_costs_no_more_than_importing_transformers():
    result = run(IMPORT_TIME)
    theirs, ours, *new = result.stdout.split()
    assert new == ["linformer_hf"]  # nothing heavy of its own
    assert float(ours) < 0.1 * float(theirs)
    assert "ERROR" not in result.stdout + result.stderr


def test_importing_is_silent():
    result = run("import linformer_hf; from transformers import AutoModel; AutoModel.from_config")
    assert result.stdout == ""
    assert result.stderr == ""


# Rules of Transformers' linter that only concern the library itself, and why
NOT_FOR_US = {
    "TRF041": "asks to name the library's checkpoints that take each branch; there are none",
    "TRF057": "@auto_docstring knows the library's own models only and prints errors for others",
}


def test_transformers_linter_is_content(tmp_path):
    pytest.importorskip("mlinter", reason="pip install transformers-mlinter")
    files = [str(SOURCE / f"{name}_linformer.py") for name in ("configuration", "modeling")]
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "mlinter", *files, "--no-cache", "--no-progress", "--output-json", str(report)]
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    findings = json.loads(report.read_text())["findings"]
    assert findings, "the linter found not even what is excused: did it run?"
    assert [finding for finding in findings if not any(rule in str(finding) for rule in NOT_FOR_US)] == []
